"""The host's end of a container's helper, which is the container's first process.

Everything travels over the connection that is attached to its standard streams: requests and
replies, and the bytes of the pipes that commands are given here (``inside/mux.py``).
"""

from __future__ import annotations

import asyncio
import fcntl
import marshal
import os
import socket
from collections.abc import Awaitable, Callable
from typing import Any

from benchflow.contracts.errors import SandboxLostError, SandboxStartError
from benchflow.sandboxes.docker.engine import Engine, Hijacked
from benchflow.sandboxes.doors import MOST
from benchflow.sandboxes.inside.mux import DROP, END, PLACES, REPLY, REQUEST, Broken, Mux, Sink, Source, frame
from benchflow.sandboxes.resident import SOCKET, Resident

_SPARE_PLACE = 7
_SAID = 4000


class ContainerResident(Resident):
    """Attach with ``attach`` before the container is started, then say what to set up."""

    def __init__(self, name: str, why: Callable[[], Awaitable[str]]) -> None:
        """``why`` finds out what ended the container."""
        super().__init__(name)
        self.said = b""
        """The end of what the first process wrote to its stderr."""
        self._why = why
        self._asking: asyncio.Task[None] | None = None
        self._connection: Hijacked | None = None
        self._mux = Mux(self._write, self._watch, self._unwatch, self._on_frame, reads_output=False)

    async def attach(self, engine: Engine, container: str) -> None:
        params = {"stream": True, "stdin": True, "stdout": True, "stderr": True}
        self._connection = await engine.hijack(f"containers/{container}/attach", params, self)

    async def set_up(self, plan: dict[str, Any], timeout: float) -> tuple[int, int, str]:
        """Have ``plan`` carried out; returns the agent's uid, gid and home."""
        self._write(frame(REQUEST, 0, marshal.dumps(plan)))
        try:
            async with asyncio.timeout(timeout):
                return await asyncio.shield(self._hello.ended)
        except (SandboxLostError, TimeoutError) as error:
            said = self.said.decode("utf-8", "replace").strip()
            reason = f"not ready after {timeout:g} s" if isinstance(error, TimeoutError) else self.lost
            raise SandboxStartError(f"{self.name} did not start: {said or reason}", detail=said) from error

    async def _send(self, ident: int, data: bytes, fds: list[int]) -> None:
        reading = [fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY for fd in fds]
        ways = b"".join(b"r" if reads else b"w" for reads in reading)
        self._write(frame(REQUEST, ident, bytes([len(fds)]) + ways + data))
        for place, (fd, reads) in enumerate(zip(fds, reading, strict=True)):
            own = os.dup(fd)
            os.set_blocking(own, False)
            (Source if reads else Sink)(self._mux, ident * PLACES + place, own)

    def _write(self, data: bytes) -> None:
        if self._connection is not None:
            self._connection.write(data)

    # -- what comes --------------------------------------------------------------------

    def on_output(self, stream: int, data: bytes) -> None:
        if stream != 1:
            self.said = (self.said + data)[-_SAID:]
            return
        try:
            self._mux.feed(data)
        except Broken as error:
            self._fail(f"its helper talks nonsense: {error}")

    def on_end(self) -> None:
        self._connection = None
        if self.lost is None and self._asking is None:
            self._asking = self._loop.create_task(self._find_out())

    async def _find_out(self) -> None:
        self._fail(await self._why())

    def _on_frame(self, kind: int, number: int, data: bytes) -> None:
        if kind != REPLY:
            raise Broken("a request")
        self._mux.tell(number, lambda: self._on_reply(data, self._handed(number, data)))

    def _handed(self, ident: int, data: bytes) -> list[socket.socket]:
        """A connection that the helper has made inside, as a socket of ours. One too many is
        broken off: whoever makes them must not use up the engine's descriptors."""
        if data[0] != SOCKET:
            return []
        number = ident * PLACES + _SPARE_PLACE
        others = sum(other % PLACES == _SPARE_PLACE for other in self._mux.sinks)
        if ident not in self._calls and others >= MOST:
            self._write(frame(DROP, number) + frame(END, number))
            return []
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        Source(self._mux, number, os.dup(ours.fileno()))
        Sink(self._mux, number, os.dup(ours.fileno()), lambda: _shut(ours))
        return [theirs]

    def _watch(self, fd: int, read: Callable[[], Any] | None, write: Callable[[], Any] | None) -> None:
        if read is not None:
            self._loop.add_reader(fd, read)
        elif write is not None:
            self._loop.add_writer(fd, write)

    def _unwatch(self, fd: int) -> None:
        self._loop.remove_reader(fd)
        self._loop.remove_writer(fd)

    # -- the end -----------------------------------------------------------------------

    def _disconnect(self) -> None:
        self._mux.close()
        self.kill()

    def kill(self) -> None:
        """The helper ends with its stdin, and the container with its helper."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def _shut(peer: socket.socket) -> None:
    try:
        peer.shutdown(socket.SHUT_WR)
    except OSError:
        pass
    peer.close()
