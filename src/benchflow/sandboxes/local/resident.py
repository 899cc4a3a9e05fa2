"""The host's end of a sandbox's helper: start it, ask it, notice when it dies.

One socket carries requests (marshalled, with the stdio descriptors attached) and fixed
binary replies; what comes back from inside is only ever unpacked as numbers and text.
"""

from __future__ import annotations

import array
import asyncio
import itertools
import marshal
import os
import select
import signal
import socket
import struct
import subprocess
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from benchflow.contracts.errors import SandboxError, SandboxLostError, SandboxStartError
from benchflow.sandboxes.local import bwrap
from benchflow.sandboxes.local.cgroups import Cgroup
from benchflow.sandboxes.local.leases import children, last_children
from benchflow.sandboxes.local.nursery import Nursery, nursery
from benchflow.sandboxes.local.userns import UserNamespace

READY, EXIT, ERROR, GONE, DONE, STARTED, SOCKET, FATAL = range(1, 9)
_REPLY = struct.Struct("<BQqq")
_MESSAGE = 1 << 16
_LARGEST_INLINE = 1 << 15
_STDERR_TAIL = 4000
_GONE_TIMEOUT = 10.0
_KILLED = -1
"""In place of an answer: whoever was to give it was killed from inside."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Start:
    """What to start. ``on_fork`` gets bubblewrap's pid, before anything runs in it."""

    jail: bwrap.Jail
    cgroup: Cgroup | None
    on_fork: Callable[[int], None]


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


class Resident:
    """A running jail and its helper. Create with ``start``."""

    def __init__(
        self, name: str, channel: socket.socket, process: subprocess.Popen[bytes], stderr: int
    ) -> None:
        self.name = name
        self.lost: str | None = None
        self.explain: Callable[[], str] = str
        """Asked for the reason when the helper died without a word."""
        self._channel = channel
        self._process = process
        self._stderr = stderr
        self._helper = -1  # a pidfd: the helper is no child of this process
        self._helper_pid = 0
        self._outer = os.pidfd_open(process.pid)
        self._loop = asyncio.get_running_loop()
        self._calls: dict[int, Call] = {}
        self._numbers = itertools.count(1)
        self._sending = asyncio.Lock()
        self._hello = self._new_call(0)
        self._loop.add_reader(channel.fileno(), self._on_readable)
        self._loop.add_reader(self._outer, self._on_death, "its first process died")

    @classmethod
    async def start(
        cls,
        name: str,
        prepare: Callable[[], Start],
        userns: UserNamespace,
        *,
        timeout: float,
        plan: dict[str, Any] | None = None,
    ) -> tuple[Resident, tuple[int, int, str]]:
        """Fork bubblewrap, then a helper into what it made, and wait until that has carried
        out ``plan``; return with the agent's uid, gid and home. ``prepare`` runs in the
        forking thread. Raises ``SandboxStartError`` with what was said."""
        loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        ours.setblocking(False)
        gate, block = socket.socketpair()
        gate.send(b"1")
        gate.setblocking(False)
        stderr = os.memfd_create("stderr", os.MFD_CLOEXEC)

        def fork() -> tuple[subprocess.Popen[bytes], Nursery, Start]:
            start = prepare()
            process = bwrap.start(
                start.jail, userns, cgroup=start.cgroup, block=block.fileno(), stderr=stderr
            )
            start.on_fork(process.pid)
            return process, nursery(), start

        forked = loop.run_in_executor(bwrap.launcher(os.getpid()), fork)
        try:
            try:
                process, home, start = await finished(forked)
            except BaseException:
                if forked.done() and not forked.cancelled() and forked.exception() is None:
                    resident = cls(name, ours, forked.result()[0], stderr)
                    await resident.stop()
                else:
                    ours.close()
                    os.close(stderr)
                raise
            finally:
                block.close()
            resident = cls(name, ours, process, stderr)
            try:
                async with asyncio.timeout(timeout):
                    with suppress(ConnectionError):
                        await loop.sock_recv(gate, 1)  # its end: bubblewrap is done, or dead
                    groups = start.cgroup.member_files() if start.cgroup else []
                    first = _first_process(process.pid)
                    home.enter(first, theirs.fileno(), start.jail.open_network, groups, plan)
                    theirs.close()
                    return resident, await resident._hello.ended
            except (SandboxLostError, SandboxStartError, TimeoutError) as error:
                reason = f"not ready after {timeout:g} s" if isinstance(error, TimeoutError) else str(error)
                detail = await resident.stop()
                raise SandboxStartError(f"{name} did not start: {detail or reason}", detail=detail) from error
            except BaseException:
                await resident.stop()
                raise
        finally:
            theirs.close()
            gate.close()

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
            await self._send(data, list(fds))
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

    async def _send(self, data: bytes, fds: list[int]) -> None:
        large = -1
        if len(data) > _LARGEST_INLINE:
            large = os.memfd_create("request", os.MFD_CLOEXEC)
            with open(os.dup(large), "wb") as body:
                body.write(data)
            os.lseek(large, 0, os.SEEK_SET)
            data, fds = b"M", [large, *fds]
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        try:
            async with self._sending:
                while True:
                    try:
                        self._channel.sendmsg([data], rights)
                        return
                    except BlockingIOError:
                        await self._writable()
        finally:
            if large >= 0:
                os.close(large)

    async def _writable(self) -> None:
        ready = self._loop.create_future()
        fd = self._channel.fileno()
        self._loop.add_writer(fd, lambda: ready.done() or ready.set_result(None))
        try:
            await ready
        finally:
            if self.lost is None:
                self._loop.remove_writer(fd)

    # -- hearing -----------------------------------------------------------------------

    def _on_readable(self) -> None:
        ancillary: list[Any] = []
        while self.lost is None:
            try:
                data, ancillary, _, _ = self._channel.recvmsg(_MESSAGE, 128)
            except BlockingIOError:
                return
            except ConnectionError:
                data = b""
            except OSError as error:
                self._fail(str(error))
                return
            if not data:
                self._fail(self.explain() or "its helper died")
                return
            self._on_reply(data, ancillary)

    def _on_reply(self, data: bytes, ancillary: list) -> None:
        handed = array.array("i")
        for _, kind, raw in ancillary:
            if kind == socket.SCM_RIGHTS:
                handed.frombytes(raw[: len(raw) - len(raw) % handed.itemsize])
            elif self._helper < 0:
                self._watch_helper(raw)
        sockets = [socket.socket(fileno=fd) for fd in handed]
        if len(data) < _REPLY.size:
            self._close_all(sockets)
            return
        kind, ident, first, second = _REPLY.unpack_from(data)
        text = data[_REPLY.size :].decode("utf-8", "replace")
        call = self._calls.get(ident)
        if kind == FATAL:
            self._fail(text)
        elif call is None:
            self._close_all(sockets)
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

    def _watch_helper(self, credentials: bytes) -> None:
        """Take a handle on the sender of the first message, by its ``struct ucred``. The
        channel's end tells nothing of its death: supervisors hold the channel too."""
        self._helper_pid = struct.unpack("3i", credentials[:12])[0]
        try:
            self._helper = os.pidfd_open(self._helper_pid)
        except OSError:
            return  # it is gone, and nobody else holds the channel yet
        self._loop.add_reader(self._helper, self._on_death, "its helper died")

    def _on_death(self, how: str) -> None:
        self._on_readable()  # there may be last words
        self._fail(self.explain() or how)

    @staticmethod
    def _close_all(sockets: list[socket.socket]) -> None:
        for item in sockets:
            item.close()

    def _fail(self, reason: str) -> None:
        if self.lost is not None:
            return
        self.lost = reason
        self._loop.remove_reader(self._channel.fileno())
        self._loop.remove_writer(self._channel.fileno())
        self._channel.close()
        self._loop.remove_reader(self._outer)
        if self._helper >= 0:
            self._loop.remove_reader(self._helper)
        self.kill()  # what runs on without its helper runs unseen
        for call in list(self._calls.values()):
            call.fail(SandboxLostError(self._lost_text()))
        self._calls.clear()

    def _lost_text(self) -> str:
        return f"the sandbox {self.name} is gone: {self.lost}"

    # -- ending ------------------------------------------------------------------------

    async def stop(self) -> str:
        """Kill everything inside and wait until it is gone. Returns what bubblewrap wrote to
        its error output. Idempotent; a cancellation is raised when it is done."""
        self.close()
        return await finished(self._loop.run_in_executor(None, self.reap))

    def close(self) -> None:
        """Stop talking: every call under way fails, and the sandbox dies."""
        self._fail("it was stopped")

    def own_pids(self) -> set[int]:
        """The host's pids of what belongs to the sandbox itself rather than to a command."""
        outer, helper = self._process.pid, self._helper_pid
        return {outer, *children(outer), helper, *children(helper)}

    def kill(self) -> None:
        """Kill the sandbox's first process, and so all of it, and the helper; do not wait."""
        if self._process.returncode is None:
            # Not bubblewrap itself: it ends after the sandbox, and so tells when that is gone.
            outer = self._process.pid
            for pid in children(outer) or [*last_children(outer), outer]:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        if self._helper >= 0:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._helper, signal.SIGKILL)

    def reap(self) -> str:
        """The blocking part of ``stop``, for a thread; ``close`` comes before."""
        if self._stderr < 0:
            return ""
        self.kill()
        if not _ended(self._outer):
            self._process.kill()
        self._process.wait()
        if self._helper >= 0:
            _ended(self._helper)
            os.close(self._helper)
        os.close(self._outer)
        size = os.lseek(self._stderr, 0, os.SEEK_END)
        said = os.pread(self._stderr, _STDERR_TAIL, max(0, size - _STDERR_TAIL))
        os.close(self._stderr)
        self._stderr = self._helper = -1
        return said.decode("utf-8", "replace").strip()


def _ended(pidfd: int) -> bool:
    """Wait for a process to end. (``Popen.wait`` with a timeout would poll.)"""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(_GONE_TIMEOUT * 1000))


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


def _settle(future: asyncio.Future, value) -> None:
    if not future.done():
        future.set_result(value)


def _first_process(bwrap_pid: int) -> int:
    found = children(bwrap_pid)
    if not found:
        raise SandboxStartError("bubblewrap ended")
    return found[0]
