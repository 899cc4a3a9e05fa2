"""The host's end of a sandbox's helper: ask it, and sort its answers.

How requests and replies travel is a subclass's matter. What comes back from inside is only
ever unpacked as numbers and text.
"""

from __future__ import annotations

import asyncio
import itertools
import marshal
import signal
import socket
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from benchflow.contracts.errors import SandboxError, SandboxLostError

READY, EXIT, ERROR, GONE, DONE, STARTED, SOCKET, FATAL = range(1, 9)
_REPLY = struct.Struct("<BQqq")
_KILLED = -1
"""In place of an answer: whoever was to give it was killed from inside."""

T = TypeVar("T")


@dataclass(slots=True)
class Call:
    """One request under way. ``started`` gets a command's pid, ``exited`` its exit code;
    ``ended`` is set by the last word on the request (two numbers and a text)."""

    ident: int
    started: asyncio.Future[int]
    exited: asyncio.Future[int]
    ended: asyncio.Future[tuple[int, int, str]]
    handed: list[socket.socket] = field(default_factory=list[socket.socket])

    def fail(self, error: BaseException) -> None:
        for future in (self.started, self.exited, self.ended):
            if not future.done():
                future.set_exception(error)
                future.exception()  # a caller may await only one of the two


class Resident(ABC):
    """A sandbox's helper, seen from here. ``lost`` says why there is none any more."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.lost: str | None = None
        self.explain: Callable[[], str] = str
        """Asked for the reason when the helper died without a word."""
        self.on_caller: Callable[[int, socket.socket], None] = lambda port, caller: caller.close()
        """Gets the connections made inside to ports that lead to us (see ``doors.Callers``)."""
        self._loop = asyncio.get_running_loop()
        self._calls: dict[int, Call] = {}
        self._numbers = itertools.count(1)
        self._hello = self._new_call(0)

    @abstractmethod
    async def _send(self, ident: int, data: bytes, fds: list[int]) -> None:
        """Deliver a request with its descriptors, which stay the caller's."""

    @abstractmethod
    def _disconnect(self) -> None:
        """Let go of the connection, and of nothing else."""

    @abstractmethod
    def kill(self) -> None:
        """Kill everything in the sandbox; do not wait."""

    def _new_call(self, ident: int | None = None) -> Call:
        ident = next(self._numbers) if ident is None else ident
        future = self._loop.create_future
        call = Call(ident, future(), future(), future())
        self._calls[ident] = call
        return call

    # -- asking ------------------------------------------------------------------------

    async def ask(self, verb: str, *arguments: Any, fds: Sequence[int] = ()) -> Call:
        """Send a request. The descriptors are duplicated inside; the caller closes its own."""
        self.check()
        call = self._new_call()
        data = marshal.dumps((verb, call.ident, *arguments))
        try:
            await self._send(call.ident, data, list(fds))
        except OSError as error:
            self._fail(f"the connection broke: {error.strerror}")
            raise SandboxLostError(self._lost_text()) from error
        return call

    async def answer(self, verb: str, *arguments: Any) -> tuple[int, int, str]:
        """Send a request and wait for its answer."""
        call = await self.ask(verb, *arguments)
        try:
            answer = await call.ended
            if answer[0] == _KILLED:
                raise SandboxError(f"{self.name}: the process that carries out {verb!r} was killed")
            return answer
        finally:
            self._calls.pop(call.ident, None)

    async def connect(self, port: int) -> socket.socket:
        """A socket connected to a port of the sandbox's loopback."""
        call = await self.ask("connect", port)
        try:
            await call.ended
            return call.handed.pop()
        finally:
            self._calls.pop(call.ident, None)

    def forget(self, call: Call) -> None:
        self._calls.pop(call.ident, None)

    def check(self) -> None:
        if self.lost is not None:
            raise SandboxLostError(self._lost_text())

    def _on_reply(self, data: bytes, sockets: Sequence[socket.socket] = ()) -> None:
        if len(data) < _REPLY.size:
            _close_all(sockets)
            return
        kind, ident, first, second = _REPLY.unpack_from(data)
        text = data[_REPLY.size :].decode("utf-8", "replace")
        call = self._calls.get(ident)
        if kind == FATAL:
            self._fail(text)
        elif kind == SOCKET and not ident:
            for caller in sockets:
                self.on_caller(first, caller)
        elif call is None:
            _close_all(sockets)
        elif kind == STARTED:
            _settle(call.started, first)
        elif kind == EXIT:
            _settle(call.exited, first)
        elif kind == ERROR:
            call.fail(SandboxError(text))
        elif kind == GONE:
            _settle(call.started, 0)
            _settle(call.exited, -signal.SIGKILL)
            _settle(call.ended, (_KILLED, 0, ""))
        else:
            call.handed += sockets
            _settle(call.ended, (first, second, text))

    def _fail(self, reason: str) -> None:
        if self.lost is not None:
            return
        self.lost = reason
        self._disconnect()
        self.kill()  # what runs on without its helper runs unseen
        for call in list(self._calls.values()):
            call.fail(SandboxLostError(self._lost_text()))
        self._calls.clear()

    def _lost_text(self) -> str:
        return f"the sandbox {self.name} is gone: {self.lost}"

    def close(self, reason: str = "it was stopped") -> None:
        """Stop talking: every call under way fails, and the sandbox dies."""
        self._fail(reason)


async def finished(future: asyncio.Future[T]) -> T:
    """Wait for work in a thread to its end, whatever happens; a cancellation is raised then."""
    cancelled: asyncio.CancelledError | None = None
    while not future.done():
        try:
            await asyncio.wait([future])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
    return future.result()


def _close_all(sockets: Sequence[socket.socket]) -> None:
    for item in sockets:
        item.close()


def _settle(future: asyncio.Future, value) -> None:
    if not future.done():
        future.set_result(value)
