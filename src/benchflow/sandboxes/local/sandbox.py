"""A live local sandbox: the contract's ``Sandbox`` on top of a helper in a jail."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from benchflow.contracts.errors import (
    HardeningError,
    SandboxError,
    SandboxLostError,
    TransferError,
    UsageError,
)
from benchflow.contracts.sandbox import (
    OUTPUT_LIMIT,
    Command,
    Endpoint,
    ExecResult,
    SandboxCapabilities,
    SandboxImage,
    SandboxSpec,
)
from benchflow.sandboxes.doors import expose
from benchflow.sandboxes.local.cell import Cell
from benchflow.sandboxes.local.commands import Commands, LocalProcess, Request, as_argv, end
from benchflow.sandboxes.transfer import pack, unpack

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_STOP, _CONTINUE = 19, 18
_ROOM_DEADLINE = 10.0

T = TypeVar("T")


class LocalSandbox:
    """Made by ``LocalProvider.create``. One cell at a time runs; ``snapshot`` replaces it."""

    def __init__(
        self,
        spec: SandboxSpec,
        image: SandboxImage,
        capabilities: SandboxCapabilities,
        cell: Cell,
        workdir: str,
        env: Mapping[str, str],
    ) -> None:
        self.name = spec.name
        self.spec = spec
        self.image = image
        self.capabilities = capabilities
        self.enforced: Mapping[str, object] = cell.enforced
        self.workdir = workdir
        self._cell = cell
        self._env = dict(env)
        self._commands = Commands(cell.resident)
        self._exposed = AsyncExitStack()
        self._open = asyncio.Event()
        self._open.set()
        self._lifecycle = asyncio.Lock()
        self._paused = False
        self._ended: asyncio.Task[None] | None = None
        self.on_end: Callable[[LocalSandbox], None] = lambda sandbox: None

    # -- commands ----------------------------------------------------------------------

    async def exec(
        self,
        cmd: Command,
        *,
        user: str | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        clean_env: bool = False,
        stdin: bytes | None = None,
        timeout: float | None = None,
        output_limit: int = OUTPUT_LIMIT,
        service: str = "main",
    ) -> ExecResult:
        """See the contract. A user or working directory that does not exist is an error of
        the command: exit code 126 and a line on stderr, or ``SandboxError`` for the user."""
        request = self._request(cmd, user, cwd, env, clean_env, service)
        await self._ready()
        return await self._commands.run(request, stdin=stdin, timeout=timeout, limit=output_limit)

    async def spawn(
        self,
        cmd: Command,
        *,
        user: str | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        service: str = "main",
    ) -> LocalProcess:
        request = self._request(cmd, user, cwd, env, False, service)
        await self._ready()
        return await self._commands.spawn(request)

    def _request(
        self,
        cmd: Command,
        user: str | None,
        cwd: str | None,
        env: Mapping[str, str] | None,
        clean: bool,
        service: str,
    ) -> Request:
        if service != "main":
            raise UsageError(f"the local sandbox has no service {service!r}", fix="use --sandbox docker")
        low = {"PATH": PATH} if clean else {"PATH": PATH, **self.image.env}
        high = dict(env or {}) if clean else {**self._env, **(env or {})}
        return Request(as_argv(cmd), cwd or self.workdir, user, low, high, bare=clean)

    async def _ready(self) -> None:
        """Wait while a snapshot swaps the cell; refuse when nothing may run."""
        await self._open.wait()
        if self._ended is not None:
            raise SandboxLostError(f"the sandbox {self.name} was torn down")
        if self._paused:
            raise SandboxError(f"the sandbox {self.name} is paused")

    async def kill_processes(self, *, user: str | None = None) -> int:
        await self._ready()
        async with self._lifecycle:
            try:
                return await self._kill_all(user)
            except SandboxLostError:
                raise
            except SandboxError as error:
                if await self._in_thread(self._cell.kill_frozen, user):
                    return await self._proved_gone(user)
                raise HardeningError(f"{self.name}: {error.message}") from error

    async def _proved_gone(self, user: str | None) -> int:
        """Ask again until the dead have made room for whoever has to look."""
        deadline = time.monotonic() + _ROOM_DEADLINE
        while True:
            try:
                return await self._kill_all(user)
            except SandboxLostError:
                raise
            except SandboxError as error:
                if time.monotonic() > deadline:
                    raise HardeningError(f"{self.name}: {error.message}") from error
                await asyncio.sleep(0.01)

    async def _kill_all(self, user: str | None) -> int:
        return (await self._cell.resident.answer("killall", user))[0]

    # -- files -------------------------------------------------------------------------

    async def upload(self, local: Path, remote: str, *, owner: str | None = None) -> None:
        await self._ready()
        feeding, call, said = await self._commands.transfer_in(_absolute(remote), owner)
        try:
            try:
                await self._in_thread(feeding.write_all, pack(local))
            except BaseException:
                await asyncio.shield(end(self._cell.resident, call))
                raise
            code = await asyncio.shield(call.exited)
            said.drain()
            if code:
                raise TransferError(f"cannot upload to {remote}: {said.take().decode('utf-8', 'replace')}")
        finally:
            self._cell.resident.forget(call)
            said.close()

    async def download(self, remote: str, local: Path, *, limit: int = 1 << 30) -> tuple[str, ...]:
        await self._ready()
        stream, call, said = await self._commands.transfer_out(_absolute(remote))
        failure: TransferError | None = None
        skipped: list[str] = []
        try:
            try:
                await self._in_thread(_unpack, stream, local, limit, skipped)
            except TransferError as error:
                failure = error
                await asyncio.shield(end(self._cell.resident, call))
            except BaseException:
                await asyncio.shield(end(self._cell.resident, call))
                raise
            code = await asyncio.shield(call.exited)
            said.drain()
            reason = said.take().decode("utf-8", "replace")
            if code == 1 and reason and "Broken pipe" not in reason:
                raise TransferError(f"cannot download {remote}: {reason}") from failure
            if failure is not None:
                raise failure
            return tuple(skipped)
        finally:
            self._cell.resident.forget(call)
            said.close()

    async def _in_thread(self, work: Callable[..., T], *arguments: object) -> T:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._cell.threads, work, *arguments)

    # -- network -----------------------------------------------------------------------

    async def expose(self, port: int) -> Endpoint:
        """An address on the host's loopback that leads to a port inside, until teardown."""
        await self._ready()
        if self.spec.network.mode == "open":
            return Endpoint(f"http://127.0.0.1:{port}")
        exposed = expose(lambda: self._cell.resident.connect(port))
        self._exposed.push_async_callback(exposed.close)
        return Endpoint(f"http://127.0.0.1:{exposed.port}")

    # -- standing still ----------------------------------------------------------------

    async def pause(self) -> None:
        """Return when nothing inside runs any more. Idempotent."""
        async with self._lifecycle:
            if not self._paused:
                await self._stand_still()
                self._paused = True

    async def resume(self) -> None:
        async with self._lifecycle:
            if self._paused:
                await self._go_on()
                self._paused = False

    async def _stand_still(self) -> None:
        self._cell.resident.check()
        if self._cell.cgroup.can_freeze:
            await self._in_thread(self._cell.cgroup.freeze)
        else:
            await self._cell.resident.answer("hold", _STOP)

    async def _go_on(self) -> None:
        self._cell.resident.check()
        if self._cell.cgroup.can_freeze:
            await self._in_thread(self._cell.cgroup.thaw)
        else:
            await self._cell.resident.answer("hold", _CONTINUE)

    async def snapshot(self) -> SandboxImage:
        """The file system as an image. With nothing running inside its upper becomes a layer
        by a rename and the sandbox goes on upon it; else everything is held still while the
        upper is copied."""
        async with self._lifecycle, self._closed_gate():
            if self._paused:
                return await self._copied()
            running, _, _ = await self._cell.resident.answer("count")
            if running == 0:
                return await self._frozen()
            await self._stand_still()
            try:
                return await self._copied(f"copied while {running} processes were held still")
            finally:
                await self._go_on()

    @asynccontextmanager
    async def _closed_gate(self):
        self._open.clear()
        try:
            yield
        finally:
            self._open.set()

    async def _frozen(self) -> SandboxImage:
        self._commands.close()
        image = await self._cell.restack()
        self._commands = Commands(self._cell.resident)
        return self._public(image)

    async def _copied(self, *notes: str) -> SandboxImage:
        return self._public(await self._in_thread(self._cell.copy, notes))

    def _public(self, image) -> SandboxImage:
        return replace(image.public(), workdir=self.workdir)

    # -- the end -----------------------------------------------------------------------

    async def teardown(self) -> None:
        if self._ended is None:
            self._ended = asyncio.ensure_future(self._tear_down())
        await asyncio.shield(self._ended)

    async def _tear_down(self) -> None:
        async with self._lifecycle:
            await self._exposed.aclose()
            self._commands.close()
            await self._cell.remove()
        self.on_end(self)


def _absolute(remote: str) -> str:
    if not remote.startswith("/"):
        raise UsageError(f"a path in a sandbox must be absolute: {remote!r}")
    return os.path.normpath(remote)


def _unpack(stream: int, local: Path, limit: int, skipped: list[str]) -> None:
    with open(stream, "rb") as source:
        unpack(source, local, limit=limit, skipped=skipped)
