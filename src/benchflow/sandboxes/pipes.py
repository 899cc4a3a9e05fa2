"""The host's ends of a command's stdin, stdout and stderr.

Descriptors are non-blocking and watched by the event loop directly; no transport is made
for the common case of a command whose output is collected.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
from collections.abc import Callable
from contextlib import suppress

_CHUNK = 1 << 18
_PIPE_SIZE = 1 << 20
_DEFAULT_PIPE = 1 << 16
_F_SETPIPE_SZ = 1031


def pipe_in() -> tuple[int, int]:
    """``(ours, theirs)`` of a pipe we read: ours does not block, theirs does."""
    ours, theirs = os.pipe2(os.O_CLOEXEC)
    os.set_blocking(ours, False)
    return ours, theirs


def pipe_out() -> tuple[int, int]:
    """``(ours, theirs)`` of a pipe we write."""
    theirs, ours = os.pipe2(os.O_CLOEXEC)
    os.set_blocking(ours, False)
    return ours, theirs


class Collector:
    """Reads a pipe to its end and keeps at most ``limit`` bytes: the head and the tail."""

    def __init__(self, fd: int, limit: int, on_data: Callable[[bytes], None] | None = None) -> None:
        self.fd = fd
        self.size = 0
        self.ended = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._head_room = limit - limit // 2
        self._tail_room = limit // 2
        self._head = bytearray()
        self._tail = bytearray()
        self._keep = True
        self._on_data = on_data
        self._large = False
        self._loop.add_reader(fd, self._read)

    def _read(self) -> None:
        try:
            data = os.read(self.fd, _CHUNK)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self.close()
            return
        if len(data) >= _DEFAULT_PIPE and not self._large:
            self._large = True  # a torrent: fewer, larger reads
            with suppress(OSError):
                fcntl.fcntl(self.fd, _F_SETPIPE_SZ, _PIPE_SIZE)
        if self._keep:
            self._add(data)

    def _add(self, data: bytes) -> None:
        self.size += len(data)
        if self._on_data is not None:
            self._on_data(data)
        room = self._head_room - len(self._head)
        if room > 0:
            self._head += data[:room]
            data = data[room:]
        if data and self._tail_room:
            self._tail += data
            if len(self._tail) > 2 * self._tail_room + _CHUNK:
                del self._tail[: -self._tail_room]

    def drain(self) -> None:
        """Take what the pipe holds now."""
        with suppress(BlockingIOError):
            while not self.ended.is_set():
                data = os.read(self.fd, _CHUNK)
                if not data:
                    self.close()
                    return
                self._add(data)

    def take(self) -> bytes:
        """What was kept. From now on output is read and thrown away, so that a process left
        in the background is neither blocked nor killed by its own output."""
        self._keep = False
        tail = bytes(self._tail[-self._tail_room :]) if self._tail_room else b""
        kept = bytes(self._head) + tail
        self._head, self._tail = bytearray(), bytearray()
        return kept

    def close(self) -> None:
        if not self.ended.is_set():
            self._loop.remove_reader(self.fd)
            os.close(self.fd)
            self.ended.set()


class Feeder:
    """Writes ``data`` to a pipe as the reader takes it, then closes it."""

    def __init__(self, fd: int, data: bytes) -> None:
        self._fd = fd
        self._data = memoryview(data)
        self._loop = asyncio.get_running_loop()
        self._open = True
        self._watched = False
        self._write()

    def _write(self) -> None:
        try:
            while self._data:
                self._data = self._data[os.write(self._fd, self._data) :]
        except BlockingIOError:
            if not self._watched:
                self._watched = True
                self._loop.add_writer(self._fd, self._write)
            return
        except OSError:
            pass  # the command does not want its input
        self.close()

    def close(self) -> None:
        if self._open:
            self._open = False
            if self._watched:
                self._loop.remove_writer(self._fd)
            os.close(self._fd)


async def reader_of(fd: int, limit: int) -> tuple[asyncio.StreamReader, asyncio.BaseTransport]:
    """A stream on a pipe we read; lines up to ``limit`` bytes."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=limit)
    transport, _ = await loop.connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(fd, "rb", 0)
    )
    return reader, transport


async def writer_of(fd: int) -> asyncio.StreamWriter:
    """A stream on a pipe we write; closing it is the reader's end of file."""
    loop = asyncio.get_running_loop()
    transport, protocol = await loop.connect_write_pipe(
        lambda: asyncio.StreamReaderProtocol(asyncio.StreamReader()), os.fdopen(fd, "wb", 0)
    )
    return asyncio.StreamWriter(transport, protocol, None, loop)
