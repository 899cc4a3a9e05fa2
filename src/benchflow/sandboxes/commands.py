"""Commands in a sandbox: run one to its end, or hold a live one by its pipes."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from benchflow.contracts.errors import SandboxError, SandboxLostError
from benchflow.contracts.sandbox import OUTPUT_LIMIT, Command, ExecResult
from benchflow.sandboxes.pipes import Collector, Feeder, pipe_in, pipe_out, reader_of, writer_of
from benchflow.sandboxes.resident import Call, Resident

LINE_LIMIT = 64 << 20
"""Bytes of one line that a spawned process's streams can hold."""
_DRAIN_GRACE = 0.05
"""Seconds to wait for the end of output after the command itself has ended."""
_KILL_GRACE = 25.0
_MOST_LEFTOVERS = 64


@dataclass(frozen=True, slots=True)
class Request:
    """A command with everything resolved. ``low`` is the image's environment, ``high`` what
    was asked for; HOME and USER of the user come in between unless ``bare``."""

    argv: list[str]
    cwd: str
    user: str | None = None
    low: Mapping[str, str] = field(default_factory=dict[str, str])
    high: Mapping[str, str] = field(default_factory=dict[str, str])
    bare: bool = False

    def arguments(self, has_stdin: bool) -> tuple[Any, ...]:
        return (has_stdin, self.argv, self.cwd, dict(self.low), dict(self.high), self.user, self.bare)


def as_argv(cmd: Command) -> list[str]:
    argv = ["/bin/sh", "-c", cmd] if isinstance(cmd, str) else [os.fspath(part) for part in cmd]
    if not argv or any("\0" in part for part in argv):
        raise SandboxError("a command needs at least one word, and no NUL in any")
    return argv


class Commands:
    """Runs commands through a resident; keeps the pipes that background processes still hold."""

    def __init__(self, resident: Resident) -> None:
        self.resident = resident
        self._leftovers: list[Collector] = []
        self._live: set[LiveProcess] = set()

    async def run(
        self,
        request: Request,
        *,
        stdin: bytes | None = None,
        timeout: float | None = None,
        limit: int = OUTPUT_LIMIT,
        on_output: Callable[[bytes], None] | None = None,
    ) -> ExecResult:
        began = time.monotonic()
        feed = pipe_out() if stdin is not None else None
        outs = [pipe_in(), pipe_in()]
        theirs = [pair[1] for pair in ([feed] if feed else []) + outs]
        collectors = [Collector(pair[0], limit, on_output) for pair in outs]
        feeder: Feeder | None = None
        try:
            try:
                call = await self.resident.ask("exec", *request.arguments(feed is not None), fds=theirs)
            finally:
                _close(theirs)
            if feed is not None and stdin is not None:
                ours, feed = feed[0], None
                feeder = Feeder(ours, stdin)
            code, timed_out = await self._outcome(call, timeout)
            await self._settle(collectors)
        except BaseException:
            for collector in collectors:
                collector.close()
            if feed is not None:
                os.close(feed[0])
            raise
        finally:
            if feeder is not None:
                feeder.close()
        sizes = [collector.size for collector in collectors]
        out, err = (collector.take() for collector in collectors)
        self._keep(collectors)
        return ExecResult(code, out, err, sizes[0], sizes[1], time.monotonic() - began, timed_out)

    async def _outcome(self, call: Call, timeout: float | None) -> tuple[int, bool]:
        try:
            try:
                async with asyncio.timeout(timeout):
                    return await asyncio.shield(call.exited), False
            except TimeoutError:
                await end(self.resident, call)
                return (call.exited.result() if call.exited.done() else -9), True
        except asyncio.CancelledError:
            await asyncio.shield(end(self.resident, call))
            raise
        finally:
            self.resident.forget(call)

    async def _settle(self, collectors: list[Collector]) -> None:
        """The command has ended: take the rest of its output, but do not wait for processes
        it left behind holding the pipe."""
        for collector in collectors:
            collector.drain()
        held = [collector for collector in collectors if not collector.ended.is_set()]
        if held:
            with suppress(TimeoutError):
                async with asyncio.timeout(_DRAIN_GRACE):
                    for collector in held:
                        await collector.ended.wait()

    def _keep(self, collectors: list[Collector]) -> None:
        self._leftovers = [item for item in self._leftovers if not item.ended.is_set()]
        self._leftovers += [item for item in collectors if not item.ended.is_set()]
        while len(self._leftovers) > _MOST_LEFTOVERS:
            self._leftovers.pop(0).close()

    async def spawn(self, request: Request) -> LiveProcess:
        feed, out, err = pipe_out(), pipe_in(), pipe_in()
        theirs, ours = [feed[1], out[1], err[1]], [feed[0], out[0], err[0]]
        try:
            call = await self.resident.ask("exec", *request.arguments(True), fds=theirs)
        except BaseException:
            _close(ours)
            raise
        finally:
            _close(theirs)
        process = LiveProcess(self.resident, call)
        await process.open(*ours)
        self._live.add(process)
        call.ended.add_done_callback(lambda _: self.resident.forget(call))
        await asyncio.shield(call.started)
        return process

    async def transfer_in(self, path: str, owner: str | None) -> tuple[Feeding, Call, Collector]:
        """Start unpacking a tar stream at ``path``."""
        feed, err = pipe_out(), pipe_in()
        collector = Collector(err[0], 1 << 16)
        try:
            call = await self.resident.ask("unpack", path, owner, fds=[feed[1], err[1]])
        except BaseException:
            collector.close()
            os.close(feed[0])
            raise
        finally:
            _close([feed[1], err[1]])
        return Feeding(feed[0]), call, collector

    async def transfer_out(self, path: str) -> tuple[int, Call, Collector]:
        """Start packing ``path``; the descriptor returned is a blocking pipe with the stream."""
        out, err = os.pipe2(os.O_CLOEXEC), pipe_in()
        collector = Collector(err[0], 1 << 16)
        try:
            call = await self.resident.ask("pack", path, fds=[out[1], err[1]])
        except BaseException:
            collector.close()
            os.close(out[0])
            raise
        finally:
            _close([out[1], err[1]])
        return out[0], call, collector

    def close(self) -> None:
        for collector in self._leftovers:
            collector.close()
        for process in list(self._live):
            process.close()
        self._leftovers, self._live = [], set()


class Feeding:
    """The writing end of a transfer, made blocking for a thread that packs."""

    def __init__(self, fd: int) -> None:
        os.set_blocking(fd, True)
        self.fd = fd

    def write_all(self, chunks) -> None:
        try:
            for chunk in chunks:
                view = memoryview(chunk)
                while view:
                    view = view[os.write(self.fd, view) :]
        except BrokenPipeError:
            pass  # the other side says why
        finally:
            os.close(self.fd)


class LiveProcess:
    """A live command with its three pipes."""

    stdin: asyncio.StreamWriter
    stdout: asyncio.StreamReader
    stderr: asyncio.StreamReader

    def __init__(self, resident: Resident, call: Call) -> None:
        self._resident = resident
        self._call = call
        self._transports: list[asyncio.BaseTransport] = []

    @property
    def pid(self) -> int:
        """Its number inside the sandbox."""
        return self._call.started.result()

    async def open(self, stdin: int, stdout: int, stderr: int) -> None:
        self.stdin = await writer_of(stdin)
        self.stdout, out = await reader_of(stdout, LINE_LIMIT)
        self.stderr, err = await reader_of(stderr, LINE_LIMIT)
        self._transports = [self.stdin.transport, out, err]

    async def wait(self) -> int:
        return await asyncio.shield(self._call.exited)

    async def kill(self) -> None:
        await end(self._resident, self._call)

    def close(self) -> None:
        for transport in self._transports:
            transport.close()


async def end(resident: Resident, call: Call) -> None:
    """Kill a command with every descendant and wait until they are gone. If the kernel
    will not let go of one, the sandbox is lost: nothing may run on unseen."""
    if resident.lost is not None or call.ended.done():
        return
    resident.forget(await resident.ask("kill_of", call.ident))
    try:
        async with asyncio.timeout(_KILL_GRACE):
            await asyncio.shield(call.ended)
    except SandboxLostError:
        pass
    except (SandboxError, TimeoutError) as error:
        resident.kill()
        raise SandboxLostError(f"a command in {resident.name} could not be killed: {error}") from error


def _close(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)
