"""The system-call filter of every sandbox, assembled as classic BPF.

A denylist like that of the usual container runtimes: what reaches other namespaces, the
kernel's configuration or little-tested attack surface answers EPERM. ``clone3`` answers
ENOSYS, because its flags lie in memory where a filter cannot look; libraries then fall
back to ``clone``, whose flags can be checked. ``ptrace`` stays: the helper is not
dumpable and another user's processes are out of reach, and debuggers are honest work.
"""

from __future__ import annotations

import os
import platform
import struct
from functools import lru_cache

from benchflow.contracts.errors import PrerequisiteError

EPERM, ENOSYS, EAFNOSUPPORT = 1, 38, 97

_KILL, _ERRNO, _ALLOW = 0x80000000, 0x00050000, 0x7FFF0000
_LOAD, _JUMP_EQ, _JUMP_GE, _JUMP_SET, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NR, _ARCH, _ARGS = 0, 4, 16

_NAMESPACE_FLAGS = 0x7E020000
"""CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID and NEWNET."""
_PERSONALITIES = (0x0, 0x8, 0x20000, 0x20008, 0xFFFFFFFF)
_FAMILIES = (38, 40)
"""AF_ALG and AF_VSOCK: the second reaches the hypervisor from any network namespace."""
_TERMINAL_INJECTION = (0x5412, 0x541C)
"""TIOCSTI and TIOCLINUX."""

_ARCHES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}

DENIED: dict[str, tuple[int | None, int | None]] = {
    # name: number on x86_64, on aarch64
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "open_tree_attr": (467, 467),
    "unshare": (272, 97),
    "setns": (308, 268),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "open_by_handle_at": (304, 265),
    "fanotify_init": (300, 262),
    "pidfd_getfd": (438, 438),
    "kcmp": (312, 272),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "create_module": (174, None),
    "query_module": (178, None),
    "get_kernel_syms": (177, None),
    "reboot": (169, 142),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "acct": (163, 89),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "clock_adjtime": (305, 266),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "syslog": (103, 116),
    "vhangup": (153, 58),
    "lookup_dcookie": (212, 18),
    "nfsservctl": (180, 42),
    "ioperm": (173, None),
    "iopl": (172, None),
    "uselib": (134, None),
    "ustat": (136, None),
    "sysfs": (139, None),
    "_sysctl": (156, None),
}
_CLONE, _CLONE3, _PERSONALITY, _SOCKET, _IOCTL = (56, 220), (435, 435), (135, 92), (41, 198), (16, 29)


@lru_cache(maxsize=1)
def program() -> bytes:
    """The filter for this machine, as an array of ``struct sock_filter``."""
    machine = platform.machine()
    if machine not in _ARCHES:
        raise PrerequisiteError(
            f"the local sandbox has no system-call filter for {machine}", fix="use --sandbox docker"
        )
    return assemble(*_ARCHES[machine])


def assemble(column: int, arch: int) -> bytes:
    """``column`` selects the numbers in the tables, ``arch`` is the audit architecture."""
    code: list[bytes] = [
        _op(_LOAD, _ARCH),
        _op(_JUMP_EQ, arch, 1, 0),
        _op(_RETURN, _KILL),  # a 32-bit program would be filtered by the wrong numbers
        _op(_LOAD, _NR),
    ]
    if column == 0:  # the x32 numbers of x86_64
        code += [_op(_JUMP_GE, 0x40000000, 0, 1), _errno(ENOSYS)]
    for numbers in DENIED.values():
        number = numbers[column]
        if number is not None:
            code += [_op(_JUMP_EQ, number, 0, 1), _errno(EPERM)]
    code += [_op(_JUMP_EQ, _CLONE3[column], 0, 1), _errno(ENOSYS)]
    code += _when(_CLONE[column], 0, [_op(_JUMP_SET, _NAMESPACE_FLAGS, 0, 1), _errno(EPERM)])
    allowed = [_op(_JUMP_EQ, value, len(_PERSONALITIES) - at, 0) for at, value in enumerate(_PERSONALITIES)]
    code += _when(_PERSONALITY[column], 0, [*allowed, _errno(EPERM)])
    code += _when(_SOCKET[column], 0, _refuse_values(_FAMILIES, EAFNOSUPPORT))
    code += _when(_IOCTL[column], 1, _refuse_values(_TERMINAL_INJECTION, EPERM))
    code.append(_op(_RETURN, _ALLOW))
    return b"".join(code)


def filter_fd() -> int:
    """A memory file with the program, positioned at its start; the caller closes it."""
    fd = os.memfd_create("seccomp", os.MFD_CLOEXEC)
    os.write(fd, program())
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def _when(number: int, argument: int, body: list[bytes]) -> list[bytes]:
    """``body`` sees the low half of an argument; falling out of it allows the call."""
    block = [_op(_LOAD, _ARGS + 8 * argument), *body, _op(_RETURN, _ALLOW)]
    return [_op(_JUMP_EQ, number, 0, len(block)), *block]


def _refuse_values(values: tuple[int, ...], error: int) -> list[bytes]:
    return [step for value in values for step in (_op(_JUMP_EQ, value, 0, 1), _errno(error))]


def _errno(number: int) -> bytes:
    return _op(_RETURN, _ERRNO | number)


def _op(code: int, value: int, when_true: int = 0, when_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, when_true, when_false, value)
