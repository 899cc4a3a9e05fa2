"""Connections that cross the sandbox's wall on the host's side.

A closed sandbox gets its doors from the helper (``inside/door.py``). One that shares the
host's network cannot listen there for itself, as all of them would want the same port;
``HostDoor`` listens once for all. ``Exposed`` leads from the host to a port inside.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

from benchflow.contracts.errors import SandboxError, SandboxStartError

_CHUNK = 1 << 16


async def join(
    one: tuple[asyncio.StreamReader, asyncio.StreamWriter],
    other: tuple[asyncio.StreamReader, asyncio.StreamWriter],
) -> None:
    """Copy both ways until both directions have ended."""
    try:
        await asyncio.gather(_copy(one[0], other[1]), _copy(other[0], one[1]))
    finally:
        for writer in (one[1], other[1]):
            writer.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(ConnectionError):
        while data := await reader.read(_CHUNK):
            writer.write(data)
            await writer.drain()
        if writer.can_write_eof():
            writer.write_eof()


class Forwarder:
    """A server whose every connection is joined to a new one from ``dial``."""

    def __init__(
        self, dial: Callable[[], Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]
    ) -> None:
        self._dial = dial
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def listen(self, port: int) -> int:
        """Listen on the host's loopback; 0 chooses a port. Returns the port."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", port)
        return self._server.sockets[0].getsockname()[1]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            await join((reader, writer), await self._dial())
        except (OSError, SandboxError):
            writer.close()
        finally:
            self._tasks.discard(task)

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


class Exposed(Forwarder):
    """A port of the host that leads to a port inside."""

    port = 0

    @classmethod
    async def start(cls, connect: Callable[[], Awaitable[socket.socket]]) -> Exposed:
        async def dial():
            inner = await connect()
            inner.setblocking(False)
            return await asyncio.open_connection(sock=inner)

        exposed = cls(dial)
        exposed.port = await exposed.listen(0)
        return exposed


class HostDoors:
    """Loopback listeners shared by the sandboxes that share the host's network."""

    def __init__(self) -> None:
        self._doors: dict[int, tuple[Path, int, Forwarder]] = {}
        self._lock = asyncio.Lock()

    async def open(self, port: int, path: Path) -> None:
        """Make ``port`` lead to the unix socket. Raises ``SandboxStartError`` when taken."""
        async with self._lock:
            known = self._doors.get(port)
            if known is not None and known[0] == path:
                self._doors[port] = (path, known[1] + 1, known[2])
                return
            door = Forwarder(lambda: asyncio.open_unix_connection(path))
            try:
                if known is not None:
                    raise OSError("another model server is behind it")
                await door.listen(port)
            except OSError as error:
                raise SandboxStartError(
                    f"port {port} of this machine is needed for sandboxes with open network: {error}",
                    fix="end what uses the port, or run with a closed network",
                ) from error
            self._doors[port] = (path, 1, door)

    async def close(self, port: int) -> None:
        async with self._lock:
            path, users, door = self._doors[port]
            if users > 1:
                self._doors[port] = (path, users - 1, door)
                return
            del self._doors[port]
            await door.close()
