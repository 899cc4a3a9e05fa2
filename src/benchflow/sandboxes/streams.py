"""Doors that a process inside the sandbox holds open: for where the host cannot listen there.

The process (``inside/listen.py``) listens on loopback ports inside and sends what comes over its
standard streams to us, who dial. So a sandbox that shares nothing with this host, a container
on a remote engine, reaches the model over the one stream by which it is driven.

A frame is a kind, a connection's number, a value, and for ``D`` so many bytes:

    R ready   O opened (value: port)   D data (value: size)   E its sender has no more
    W room for so many bytes more      X broken off

Each direction of a connection begins with room for ``WINDOW`` bytes, so that neither side ever
holds more, and no slow connection stops another. Nothing said inside is trusted: who breaks
these rules loses the sandbox.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from benchflow.contracts.errors import SandboxError, SandboxLostError, SandboxStartError
from benchflow.contracts.sandbox import Process
from benchflow.sandboxes.doors import CHUNK, MOST, connect, finish, receive

WINDOW = 1 << 18
_HEAD = struct.Struct(">cII")
_READY_SEC = 30.0
_UNREACHABLE = "the model cannot be reached: its door inside the sandbox"
Spawn = Callable[[list[str]], Awaitable[Process]]


class Channel:
    """One connection that travels over the streams."""

    def __init__(self) -> None:
        self.inbox: asyncio.Queue[bytes | None] = asyncio.Queue()
        self.held = 0
        self.ended = False
        self.credit = WINDOW
        self.more_credit = asyncio.Event()
        self.task: asyncio.Task[None] | None = None


class InsideDoors:
    """Ports inside that lead to unix sockets of the host for as long as a process inside lives.

    ``spawn`` starts a command as root inside, ``program`` is the one that runs ``listen.py``.
    Should it end before ``close``, ``on_lost`` is told why, once.
    """

    def __init__(
        self,
        spawn: Spawn,
        program: Sequence[str],
        sockets: Mapping[int, Path],
        on_lost: Callable[[str], None],
    ) -> None:
        self._spawn = spawn
        self._program = program
        self._sockets = dict(sockets)
        self._on_lost = on_lost
        self._process: Process | None = None
        self._channels: dict[int, Channel] = {}
        self._reading: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Return when the ports can be used. Raises ``SandboxStartError`` with the reason."""
        self._process = process = await self._spawn([*self._program, *map(str, self._sockets)])
        try:
            async with asyncio.timeout(_READY_SEC):
                await _ready(process)
        except BaseException as error:
            await self.close()
            if isinstance(error, TimeoutError) and not isinstance(error, SandboxError):
                raise SandboxStartError(f"{_UNREACHABLE} did not open in {_READY_SEC:g} s") from error
            raise
        self._reading = asyncio.ensure_future(self._read(process))

    @asynccontextmanager
    async def away(self) -> AsyncIterator[None]:
        """For as long as nothing may run inside: end the process, and start another afterwards."""
        was_open = self._process is not None
        await self.close()
        try:
            yield
        finally:
            if was_open:
                try:
                    await self.open()
                except SandboxError as error:
                    self._on_lost(error.message)

    # -- what comes from inside --------------------------------------------------------

    async def _read(self, process: Process) -> None:
        reason = "the process that holds the model's door open inside was killed"
        try:
            while True:
                kind, number, value = _HEAD.unpack(await process.stdout.readexactly(_HEAD.size))
                data = b""
                if kind == b"D":
                    if not 0 < value <= CHUNK:
                        raise ValueError("a frame too large")
                    data = await process.stdout.readexactly(value)
                await self._take(kind, number, value, data)
        except (asyncio.IncompleteReadError, ConnectionError, SandboxLostError):
            pass
        except ValueError as error:
            reason = f"the process that holds the model's door open inside broke its rules: {error}"
        for channel in list(self._channels.values()):
            if channel.task is not None:
                channel.task.cancel()
        self._on_lost(reason)

    async def _take(self, kind: bytes, number: int, value: int, data: bytes) -> None:
        channel = self._channels.get(number)
        if kind == b"O":
            if channel is not None or value not in self._sockets or len(self._channels) >= 2 * MOST:
                raise ValueError("a connection too many")
            channel = self._channels[number] = Channel()
            channel.task = asyncio.ensure_future(self._serve(number, channel, self._sockets[value]))
            await asyncio.sleep(0)  # or a flood of openings would leave no turn to what it opened
        elif channel is None:
            return  # broken off meanwhile
        elif kind == b"D":
            channel.held += value
            if channel.ended or channel.held > WINDOW + CHUNK:
                raise ValueError("more data than there is room for")
            channel.inbox.put_nowait(data)
        elif kind == b"E" and not channel.ended:
            channel.ended = True
            channel.inbox.put_nowait(None)
        elif kind == b"W":
            channel.credit = min(channel.credit + value, WINDOW)
            channel.more_credit.set()
        elif kind == b"X" and channel.task is not None:
            del self._channels[number]
            channel.task.cancel()

    # -- connections -------------------------------------------------------------------

    async def _serve(self, number: int, channel: Channel, path: Path) -> None:
        whole = False
        try:
            with await connect(str(path)) as upstream:
                both = [self._inward(number, channel, upstream), self._outward(number, channel, upstream)]
                tasks = [asyncio.ensure_future(way) for way in both]
                try:
                    await asyncio.gather(*tasks)
                    whole = True
                finally:
                    for task in tasks:
                        task.cancel()
                    await asyncio.wait(tasks)
        except OSError:
            pass  # the gateway's side broke off, and the one inside is told
        finally:
            if self._channels.get(number) is channel:
                del self._channels[number]
                if not whole:
                    self._send(b"X", number)

    async def _inward(self, number: int, channel: Channel, upstream: socket.socket) -> None:
        """From the gateway into the sandbox."""
        while True:
            while channel.credit <= 0:
                channel.more_credit.clear()
                await channel.more_credit.wait()
            data = await receive(upstream, min(channel.credit, CHUNK))
            if not data:
                break
            channel.credit -= len(data)
            self._send(b"D", number, len(data), data)
            if self._process is not None:
                await self._process.stdin.drain()
        self._send(b"E", number)

    async def _outward(self, number: int, channel: Channel, upstream: socket.socket) -> None:
        """From the sandbox to the gateway."""
        loop, taken = asyncio.get_running_loop(), 0
        while (data := await channel.inbox.get()) is not None:
            with suppress(ConnectionError):  # it may be answering before it has heard everything
                await loop.sock_sendall(upstream, data)
            channel.held -= len(data)
            taken += len(data)
            if taken >= WINDOW // 2:
                self._send(b"W", number, taken)
                taken = 0
        finish(upstream)

    def _send(self, kind: bytes, number: int, value: int = 0, data: bytes = b"") -> None:
        if self._process is not None:
            with suppress(OSError, RuntimeError):  # it has gone, as the end of its output tells
                self._process.stdin.write(_HEAD.pack(kind, number, value) + data)

    # -- the end -----------------------------------------------------------------------

    async def close(self) -> None:
        """End the process and its connections. Idempotent."""
        process, self._process = self._process, None
        tasks = [channel.task for channel in self._channels.values() if channel.task is not None]
        self._channels = {}
        if self._reading is not None:
            tasks.append(self._reading)
            self._reading = None
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        if process is not None:
            with suppress(SandboxError):
                await process.kill()


async def _ready(process: Process) -> None:
    try:
        head = await process.stdout.readexactly(_HEAD.size)
    except asyncio.IncompleteReadError:
        said = (await process.stderr.read(4000)).decode("utf-8", "replace").strip()
        last = said.splitlines()[-1] if said else "it ended"
        raise SandboxStartError(f"{_UNREACHABLE} did not open: {last}", detail=said) from None
    if _HEAD.unpack(head)[0] != b"R":
        raise SandboxStartError(f"{_UNREACHABLE} speaks out of turn")
