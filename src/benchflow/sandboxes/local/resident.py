"""The host's end of a sandbox's helper: start it, ask it, notice when it dies.

One socket carries requests (marshalled, with the stdio descriptors attached) and fixed
binary replies; what comes back from inside is only ever unpacked as numbers and text.
"""

from __future__ import annotations

import array
import asyncio
import os
import select
import signal
import socket
import struct
import subprocess
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from benchflow.contracts.errors import SandboxLostError, SandboxStartError
from benchflow.sandboxes.local import bwrap
from benchflow.sandboxes.local.cgroups import Cgroup
from benchflow.sandboxes.local.leases import children, last_children
from benchflow.sandboxes.local.nursery import Nursery, nursery
from benchflow.sandboxes.local.userns import UserNamespace
from benchflow.sandboxes.resident import Resident, finished

_MESSAGE = 1 << 16
_LARGEST_INLINE = 1 << 15
_STDERR_TAIL = 4000
_GONE_TIMEOUT = 10.0

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Start:
    """What to start. ``on_fork`` gets bubblewrap's pid, before anything runs in it."""

    jail: bwrap.Jail
    cgroup: Cgroup | None
    on_fork: Callable[[int], None]


class JailResident(Resident):
    """A running jail and its helper. Create with ``start``."""

    def __init__(
        self, name: str, channel: socket.socket, process: subprocess.Popen[bytes], stderr: int
    ) -> None:
        super().__init__(name)
        self._channel = channel
        self._process = process
        self._stderr = stderr
        self._helper = -1  # a pidfd: the helper is no child of this process
        self._helper_pid = 0
        self._outer = os.pidfd_open(process.pid)
        self._sending = asyncio.Lock()
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
    ) -> tuple[JailResident, tuple[int, int, str]]:
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

    async def _send(self, ident: int, data: bytes, fds: list[int]) -> None:
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
            handed = array.array("i")
            for _, kind, raw in ancillary:
                if kind == socket.SCM_RIGHTS:
                    handed.frombytes(raw[: len(raw) - len(raw) % handed.itemsize])
                elif self._helper < 0:
                    self._watch_helper(raw)
            self._on_reply(data, [socket.socket(fileno=fd) for fd in handed])

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

    def _disconnect(self) -> None:
        self._loop.remove_reader(self._channel.fileno())
        self._loop.remove_writer(self._channel.fileno())
        self._channel.close()
        self._loop.remove_reader(self._outer)
        if self._helper >= 0:
            self._loop.remove_reader(self._helper)

    # -- ending ------------------------------------------------------------------------

    async def stop(self) -> str:
        """Kill everything inside and wait until it is gone. Returns what bubblewrap wrote to
        its error output. Idempotent; a cancellation is raised when it is done."""
        self.close()
        return await finished(self._loop.run_in_executor(None, self.reap))

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


def _first_process(bwrap_pid: int) -> int:
    found = children(bwrap_pid)
    if not found:
        raise SandboxStartError("bubblewrap ended")
    return found[0]
