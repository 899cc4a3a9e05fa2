"""What the parts of the helper share: replies, signals, small reads."""

import _ctypes
import posix

READY, EXIT, ERROR, GONE, DONE, STARTED, SOCKET, FATAL = range(1, 9)
SIGINT, SIGTERM, SIGKILL, SIGSTOP, SIGCONT, SIGCHLD, SIGPIPE, SIGXFSZ = 2, 15, 9, 19, 18, 17, 13, 25
PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER = 4, 36
CHANNEL = 3
"""Descriptor of the socket to the engine, in the helper and in what it forks."""
MESSAGE = 1 << 16
MSG_CMSG_CLOEXEC = 0x40000000

RLIMIT_NOFILE = 7

_libc = _ctypes.dlopen(None, 2)  # pyright: ignore[reportArgumentType]
_prctl = _ctypes.dlsym(_libc, "prctl")
_setrlimit = _ctypes.dlsym(_libc, "setrlimit")
_for_commands = b""


class Failure(Exception):
    """A request that cannot be carried out; the text goes to the engine."""


def prctl(option, value):
    _ctypes.call_function(_prctl, (option, value, 0, 0, 0))


def divide_files(soft, hard):
    """Take all the descriptors this process may have, and leave commands half of them.

    The kernel counts those on their way through sockets per user, for all sandboxes
    together, and refuses to send when the sender's own limit is reached. What root sends
    around in one sandbox must not reach that of another one's helper."""
    global _for_commands
    half = max(hard // 2, 1)
    _for_commands = min(soft, half).to_bytes(8, "little") + half.to_bytes(8, "little")
    _ctypes.call_function(_setrlimit, (RLIMIT_NOFILE, 2 * hard.to_bytes(8, "little")))


def limit_files():
    """Give this process a command's limit of descriptors, for good."""
    if _for_commands:
        _ctypes.call_function(_setrlimit, (RLIMIT_NOFILE, _for_commands))


def pack_reply(kind, ident, a=0, b=0, text=b""):
    return (
        bytes((kind,))
        + ident.to_bytes(8, "little")
        + a.to_bytes(8, "little", signed=True)
        + b.to_bytes(8, "little", signed=True)
        + text
    )


def send(kind, ident, a=0, b=0, text=b""):
    posix.write(CHANNEL, pack_reply(kind, ident, a, b, text))


def encode(text):
    return text.encode("utf-8", "surrogateescape")


def receive(socket):
    """``(bytes, descriptors)`` of one message; no bytes at the end."""
    data, ancillary, *_ = socket.recvmsg(MESSAGE, 512, MSG_CMSG_CLOEXEC)
    return data, [fd for _, _, raw in ancillary for fd in memoryview(raw).cast("i")]


def read_file(path):
    """The whole content; nothing for a file that is not there, or a process that has gone."""
    try:
        fd = posix.open(path, posix.O_RDONLY | posix.O_CLOEXEC)
    except OSError:
        return b""
    parts = []
    try:
        while part := posix.read(fd, 1 << 16):
            parts.append(part)
    except ProcessLookupError:
        return b""
    finally:
        posix.close(fd)
    return b"".join(parts)
