"""What the parts of the helper share: replies, signals, small reads."""

import _ctypes
import posix

READY, EXIT, ERROR, GONE, DONE, STARTED, SOCKET, FATAL = range(1, 9)
SIGTERM, SIGKILL, SIGSTOP, SIGCONT, SIGCHLD, SIGPIPE, SIGXFSZ = 15, 9, 19, 18, 17, 13, 25
PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER = 4, 36
CHANNEL = 3
"""Descriptor of the socket to the engine, in the helper and in what it forks."""
MESSAGE = 1 << 16
MSG_CMSG_CLOEXEC = 0x40000000

_prctl = _ctypes.dlsym(_ctypes.dlopen(None, 2), "prctl")  # pyright: ignore[reportArgumentType]


class Failure(Exception):
    """A request that cannot be carried out; the text goes to the engine."""


def prctl(option, value):
    _ctypes.call_function(_prctl, (option, value, 0, 0, 0))


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
