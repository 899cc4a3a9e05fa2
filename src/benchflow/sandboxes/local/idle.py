"""The first process of every sandbox: an executable of some 190 bytes that only waits.

bubblewrap needs a program to run, and an image may have none. It holds the namespaces,
takes no part in anything, and cannot be killed from inside, being process 1. As it ignores
SIGCHLD, the kernel buries the orphans that come to it.
"""

from __future__ import annotations

import platform
import struct

from benchflow.contracts.errors import PrerequisiteError

_BASE = 0x400000
_HEADERS = 64 + 56
_IGNORE = struct.pack("<QQQQ", 1, 0, 0, 0)
"""A kernel ``sigaction`` with SIG_IGN."""
_CODE = {
    # rt_sigaction(SIGCHLD, &ignore, NULL, 8); then pause(), again and again
    "x86_64": (
        62,
        bytes.fromhex("b80d000000 bf11000000 488d3514000000 31d2 41ba08000000 0f05 b822000000 0f05 ebf7")
        + bytes(1),
    ),
    # the same with ppoll(NULL, 0, NULL, NULL), as there is no pause
    "aarch64": (
        183,
        struct.pack(
            "<12I",
            0xD2800220,  # mov x0, #17
            0x10000161,  # adr x1, ignore
            0xD2800002,  # mov x2, #0
            0xD2800103,  # mov x3, #8
            0xD28010C8,  # mov x8, #134
            0xD4000001,  # svc #0
            0xD2800000,  # mov x0, #0
            0xD2800001,  # mov x1, #0
            0xD2800003,  # mov x3, #0
            0xD2800928,  # mov x8, #73
            0xD4000001,  # svc #0
            0x17FFFFFB,  # b to the first "mov x0, #0"
        ),
    ),
}


def idle_program() -> bytes:
    """A static ELF executable for this machine."""
    machine = platform.machine()
    if machine not in _CODE:
        raise PrerequisiteError(
            f"the local sandbox does not run on {machine} processors", fix="use --sandbox docker"
        )
    number, instructions = _CODE[machine]
    code = instructions + _IGNORE
    size = _HEADERS + len(code)
    identity = b"\x7fELF" + bytes([2, 1, 1]) + bytes(9)
    entry = _BASE + _HEADERS
    header = struct.pack("<HHIQQQIHHHHHH", 2, number, 1, entry, 64, 0, 0, 64, 56, 1, 0, 0, 0)
    segment = struct.pack("<IIQQQQQQ", 1, 5, 0, _BASE, _BASE, size, size, 0x1000)
    return identity + header + segment + code
