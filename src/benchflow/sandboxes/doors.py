"""Connections that cross a sandbox's wall on the host's side.

``Door`` is a listener of the host whose every connection is served here, mostly by joining it
to a new one: to the gateway, to a proxy, to a port inside. Where it listens makes the
difference: on the host's loopback or a bridge's address for sandboxes that share that network
(``SharedDoors``), or in a sandbox's own network namespace (``listen_in_namespace``), which needs
nothing in its image. ``Callers`` serves what the helper inside accepts and hands out.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import socket
import threading
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

from benchflow.contracts.errors import SandboxError, SandboxStartError

MOST = 256
"""Connections at once through one door; more wait in its backlog. What a sandbox does must not
use up the engine's descriptors."""
CHUNK = 1 << 16
_CLONE_NEWNET = 0x40000000
_CAP_SYS_ADMIN = 21

Dial = Callable[[], Awaitable[socket.socket]]
Serve = Callable[[socket.socket], Awaitable[None]]


async def join(client: socket.socket, server: socket.socket) -> None:
    """Copy both ways until both directions have ended; holds a chunk of each at most. A server
    may answer and leave before it has heard everything, and the client still gets the answer; a
    client that breaks off ends it all."""
    with client, server:
        copying = [asyncio.ensure_future(way) for way in (_ask(client, server), _answer(server, client))]
        try:
            await asyncio.gather(*copying)
        finally:
            for task in copying:
                task.cancel()
            await asyncio.wait(copying)  # a closed descriptor must not be waited on


async def _ask(client: socket.socket, server: socket.socket) -> None:
    loop, heard = asyncio.get_running_loop(), True
    while data := await loop.sock_recv(client, CHUNK):
        if heard:
            try:
                await loop.sock_sendall(server, data)
            except ConnectionError:
                heard = False
    finish(server)


async def _answer(server: socket.socket, client: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    while data := await receive(server):
        await loop.sock_sendall(client, data)
    finish(client)


async def receive(server: socket.socket, size: int = CHUNK) -> bytes:
    """What a server says; nothing when it has ended in whatever way."""
    try:
        return await asyncio.get_running_loop().sock_recv(server, size)
    except ConnectionError:
        return b""


def finish(end: socket.socket) -> None:
    """Say no more."""
    with suppress(OSError):
        end.shutdown(socket.SHUT_WR)


async def connect(address: str | tuple[str, int]) -> socket.socket:
    """A connection to a unix socket, or to ``(IP address, port)``."""
    if isinstance(address, str):
        made = socket.socket(socket.AF_UNIX)
    else:
        made = socket.socket(socket.AF_INET6 if ":" in address[0] else socket.AF_INET)
    made.setblocking(False)
    try:
        await asyncio.get_running_loop().sock_connect(made, address)
    except BaseException:
        made.close()
        raise
    return made


def joined(dial: Dial) -> Serve:
    """Serve connections by joining each to a new one."""

    async def serve(accepted: socket.socket) -> None:
        await join(accepted, await dial())

    return serve


def to_unix(path: Path) -> Serve:
    return joined(lambda: connect(str(path)))


class Connections:
    """Connections being served, until ``close``."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def take(self, accepted: socket.socket, serve: Serve) -> asyncio.Task[None]:
        task = asyncio.ensure_future(_attend(accepted, serve))
        self._tasks.add(task)
        task.add_done_callback(partial(self._done, accepted))
        return task

    def _done(self, accepted: socket.socket, task: asyncio.Task[None]) -> None:
        accepted.close()
        self._tasks.discard(task)

    async def close(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)


async def _attend(accepted: socket.socket, serve: Serve) -> None:
    with suppress(OSError):  # either side went away, or nobody is behind the door
        accepted.setblocking(False)
        if accepted.family != socket.AF_UNIX:
            accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        await serve(accepted)


class Door(Connections):
    """Serves what comes to ``listener`` until ``close``, which ends the connections too."""

    def __init__(self, listener: socket.socket, serve: Serve) -> None:
        super().__init__()
        listener.setblocking(False)
        self._listener = listener
        self._serve = serve
        self._room = asyncio.Semaphore(MOST)
        self._accepting = asyncio.ensure_future(self._accept())

    @property
    def port(self) -> int:
        return self._listener.getsockname()[1]

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._room.acquire()
            try:
                accepted, _ = await loop.sock_accept(self._listener)
            except OSError:  # the caller has gone, or descriptors are short: let others go on
                self._room.release()
                await asyncio.sleep(0.01)
                continue
            self.take(accepted, self._serve).add_done_callback(lambda _: self._room.release())

    async def close(self) -> None:
        self._accepting.cancel()
        await asyncio.wait([self._accepting])
        await super().close()
        self._listener.close()


class Callers(Connections):
    """Connections made inside that a sandbox's helper hands out, for where the host cannot listen
    there itself. So a sandbox that shares nothing with this host, a container on a remote engine,
    reaches the model over the one connection by which it is driven."""

    def __init__(self, targets: Mapping[int, Path]) -> None:
        """``targets`` are the host's unix sockets by the port inside."""
        super().__init__()
        self._targets = targets

    def come(self, port: int, caller: socket.socket) -> None:
        if port in self._targets and len(self._tasks) < MOST:
            self.take(caller, to_unix(self._targets[port]))
        else:
            caller.close()


def listen(address: str | tuple[str, int]) -> socket.socket:
    """Listen on a unix socket, or at ``(IPv4 address, port)``; port 0 chooses one."""
    listener = socket.socket(socket.AF_UNIX if isinstance(address, str) else socket.AF_INET)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(MOST)
    except BaseException:
        listener.close()
        raise
    return listener


def may_enter_namespaces() -> bool:
    """Whether this process has the right to listen in another's network namespace."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return False
    rights = next((line.split()[1] for line in lines if line.startswith("CapEff:")), "0")
    return bool(int(rights, 16) >> _CAP_SYS_ADMIN & 1)


async def listen_in_namespace(namespace: int, ports: list[int]) -> list[socket.socket]:
    """Sockets that listen on the loopback of a network namespace, given by a descriptor of it.
    The kernel ties them to it for good; nothing inside can close them. Raises ``OSError``."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[list[socket.socket]] = loop.create_future()

    def settle(result: list[socket.socket] | OSError) -> None:
        if isinstance(result, OSError):
            done.set_exception(result)
        else:
            done.set_result(result)

    def enter() -> None:
        made: list[socket.socket] = []
        try:
            libc = ctypes.CDLL(None, use_errno=True)
            if libc.setns(namespace, _CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
            for port in ports:
                made.append(listen(("127.0.0.1", port)))
        except OSError as error:
            for listener in made:
                listener.close()
            loop.call_soon_threadsafe(settle, error)
        else:
            loop.call_soon_threadsafe(settle, made)

    # A thread of its own, which ends there: no other work may ever run in that namespace.
    threading.Thread(target=enter, name="door", daemon=True).start()
    return await asyncio.shield(done)


class SharedDoors:
    """Listeners shared by the sandboxes that share a network, as all would want the same port."""

    def __init__(self) -> None:
        self._doors: dict[tuple[str, int], tuple[Path, int, Door]] = {}

    def open(self, host: str, port: int, path: Path) -> None:
        """Make the address lead to the unix socket. Raises ``SandboxStartError`` when taken."""
        known = self._doors.get((host, port))
        if known is not None and known[0] == path:
            self._doors[host, port] = (path, known[1] + 1, known[2])
            return
        try:
            if known is not None:
                raise OSError("another model server is behind it")
            door = Door(listen((host, port)), to_unix(path))
        except OSError as error:
            raise SandboxStartError(
                f"{host}:{port} of this machine is needed for sandboxes with open network: {error}",
                fix="end what uses the port, or run with a closed network",
            ) from error
        self._doors[host, port] = (path, 1, door)

    async def close(self, host: str, port: int) -> None:
        path, users, door = self._doors[host, port]
        if users > 1:
            self._doors[host, port] = (path, users - 1, door)
            return
        del self._doors[host, port]
        await door.close()


def expose(connect: Callable[[], Awaitable[socket.socket]]) -> Door:
    """A port of the host that leads to a port inside, by ``connect``."""

    async def dial() -> socket.socket:
        try:
            inner = await connect()
        except SandboxError as error:
            raise ConnectionError(str(error)) from error
        inner.setblocking(False)
        return inner

    return Door(listen(("127.0.0.1", 0)), joined(dial))
