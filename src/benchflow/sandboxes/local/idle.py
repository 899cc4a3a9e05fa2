"""The first process of every sandbox: an executable of some 130 bytes that only waits.

bubblewrap needs a program to run, and an image may have none. It holds the namespaces,
takes no part in anything, and cannot be killed from inside, being process 1.
"""

from __future__ import annotations

import platform
import struct

from benchflow.contracts.errors import PrerequisiteError

_BASE = 0x400000
_HEADERS = 64 + 56
_CODE = {
    # pause(); again
    "x86_64": (62, bytes.fromhex("b822000000 0f05 ebf7")),
    # ppoll(NULL, 0, NULL, NULL); again
    "aarch64": (183, bytes.fromhex("280980d2 000080d2 010080d2 020080d2 030080d2 010000d4 faffff17")),
}


def idle_program() -> bytes:
    """A static ELF executable for this machine."""
    machine = platform.machine()
    if machine not in _CODE:
        raise PrerequisiteError(
            f"the local sandbox does not run on {machine} processors", fix="use --sandbox docker"
        )
    number, code = _CODE[machine]
    size = _HEADERS + len(code)
    identity = b"\x7fELF" + bytes([2, 1, 1]) + bytes(9)
    entry = _BASE + _HEADERS
    header = struct.pack("<HHIQQQIHHHHHH", 2, number, 1, entry, 64, 0, 0, 64, 56, 1, 0, 0, 0)
    segment = struct.pack("<IIQQQQQQ", 1, 5, 0, _BASE, _BASE, size, size, 0x1000)
    return identity + header + segment + code
