"""The first process of every sandbox: an executable of some 250 bytes that only waits.

bubblewrap needs a program to run, and an image may have none. It holds the namespaces,
takes no part in anything, and cannot be killed from inside, being process 1. As it ignores
SIGCHLD, the kernel buries the orphans that come to it.
"""

from __future__ import annotations

import hashlib
import os
import platform
import struct
from functools import lru_cache
from pathlib import Path

from benchflow.contracts.errors import PrerequisiteError
from benchflow.kernel.ownership import state_dir
from benchflow.sandboxes.local.capabilities import MASK

_BASE = 0x400000
_HEADERS = 64 + 56
_DATA_AT = 64
"""Where the data begin, counted from the first instruction: the header of capset, its sets,
and a kernel ``sigaction``."""
_CODE = {
    # capset(header, sets); rt_sigaction(SIGCHLD, &ignore, NULL, 8); then pause(), for ever
    "x86_64": (
        62,
        bytes.fromhex(
            "b87e000000 488d3d34000000 488d3535000000 0f05"
            "b80d000000 bf11000000 488d353a000000 31d2 41ba08000000 0f05"
            "b822000000 0f05 ebf7"
        ),
    ),
    # the same with ppoll(NULL, 0, NULL, NULL), as there is no pause
    "aarch64": (
        183,
        struct.pack(
            "<16I",
            0x10000200,  # adr x0, header
            0x10000221,  # adr x1, sets
            0xD2800B68,  # mov x8, #91
            0xD4000001,  # svc #0
            0xD2800220,  # mov x0, #17
            0x10000261,  # adr x1, ignore
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


def idle_path() -> Path:
    """The program as a file below the state folder, made on first use."""
    return _idle_in(state_dir() / "runtime")


@lru_cache(maxsize=4)
def _idle_in(folder: Path) -> Path:
    program = idle_program(MASK)
    path = folder / f"idle-{hashlib.sha256(program).hexdigest()[:16]}"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        scratch = path.with_suffix(f".{os.getpid()}")
        scratch.write_bytes(program)
        scratch.chmod(0o755)
        scratch.rename(path)
    return path


def idle_program(capabilities: int) -> bytes:
    """A static ELF executable for this machine. It keeps the capabilities of the bit mask,
    and none that could be inherited."""
    machine = platform.machine()
    if machine not in _CODE:
        raise PrerequisiteError(
            f"the local sandbox does not run on {machine} processors", fix="use --sandbox docker"
        )
    number, code = _CODE[machine]
    sets = [part for half in (capabilities & 0xFFFFFFFF, capabilities >> 32) for part in (half, half, 0)]
    data = struct.pack("<Ii6I4Q", 0x20080522, 0, *sets, 1, 0, 0, 0)
    body = code.ljust(_DATA_AT, b"\0") + data
    size = _HEADERS + len(body)
    identity = b"\x7fELF" + bytes([2, 1, 1]) + bytes(9)
    entry = _BASE + _HEADERS
    header = struct.pack("<HHIQQQIHHHHHH", 2, number, 1, entry, 64, 0, 0, 64, 56, 1, 0, 0, 0)
    segment = struct.pack("<IIQQQQQQ", 1, 5, 0, _BASE, _BASE, size, size, 0x1000)
    return identity + header + segment + body
