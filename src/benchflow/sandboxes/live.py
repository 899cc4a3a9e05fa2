"""What every live sandbox with a helper in it does the same way: commands, files, ports."""

from __future__ import annotations

import asyncio
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

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
from benchflow.sandboxes.commands import Commands, LiveProcess, Request, as_argv, end
from benchflow.sandboxes.doors import expose
from benchflow.sandboxes.resident import Resident
from benchflow.sandboxes.transfer import pack, unpack

DEFAULT_WORKDIR = "/app"
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

T = TypeVar("T")


def workspace(wanted: str | None) -> str:
    """The workspace: never ``/`` itself, which nobody may chown or snapshot as a workspace."""
    path = os.path.normpath("/" + (wanted or DEFAULT_WORKDIR).lstrip("/"))
    return DEFAULT_WORKDIR if path == "/" else path


def plain(name: str) -> str:
    """A rollout's name as part of what machines give names to."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", name).strip("-.")[:80] or "sandbox"


class LiveSandbox(ABC):
    """A sandbox whose helper is ``resident``. Subclasses make it stand still and remove it."""

    shares_loopback = False
    """Whether a port inside is one of the host's loopback too."""

    def __init__(
        self,
        spec: SandboxSpec,
        image: SandboxImage,
        capabilities: SandboxCapabilities,
        resident: Resident,
        *,
        workdir: str,
        env: Mapping[str, str],
        enforced: Mapping[str, object],
        threads: Executor,
    ) -> None:
        self.name = spec.name
        self.spec = spec
        self.image = image
        self.capabilities = capabilities
        self.enforced: Mapping[str, object] = enforced
        self.workdir = workdir
        self.closing = AsyncExitStack()
        """What goes when the sandbox goes: exposed ports."""
        self._env = dict(env)
        self._commands = Commands(resident)
        self._threads = threads
        self._open = asyncio.Event()
        self._open.set()
        self._lifecycle = asyncio.Lock()
        self._paused = False
        self._ended: asyncio.Task[None] | None = None
        self.on_end: Callable[[Any], None] = lambda sandbox: None

    @property
    def resident(self) -> Resident:
        return self._commands.resident

    @abstractmethod
    async def _stand_still(self) -> None: ...

    @abstractmethod
    async def _go_on(self) -> None: ...

    @abstractmethod
    async def _remove(self) -> None: ...

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
    ) -> LiveProcess:
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
            raise UsageError(f"this sandbox has no service {service!r}: {self.capabilities.why['services']}")
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
                return await self._kill_otherwise(user, error)

    async def _kill_otherwise(self, user: str | None, error: SandboxError) -> int:
        """For when the helper cannot do it."""
        raise HardeningError(f"{self.name}: {error.message}") from error

    async def _kill_all(self, user: str | None) -> int:
        return (await self.resident.answer("killall", user))[0]

    # -- files -------------------------------------------------------------------------

    async def upload(self, local: Path, remote: str, *, owner: str | None = None) -> None:
        await self._ready()
        feeding, call, said = await self._commands.transfer_in(_absolute(remote), owner)
        try:
            try:
                await self._in_thread(feeding.write_all, pack(local))
            except BaseException:
                await asyncio.shield(end(self.resident, call))
                raise
            code = await asyncio.shield(call.exited)
            said.drain()
            if code:
                raise TransferError(f"cannot upload to {remote}: {said.take().decode('utf-8', 'replace')}")
        finally:
            self.resident.forget(call)
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
                await asyncio.shield(end(self.resident, call))
            except BaseException:
                await asyncio.shield(end(self.resident, call))
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
            self.resident.forget(call)
            said.close()

    async def _in_thread(self, work: Callable[..., T], *arguments: object) -> T:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, work, *arguments)

    # -- network -----------------------------------------------------------------------

    async def expose(self, port: int) -> Endpoint:
        """An address on the host's loopback that leads to a port inside, until teardown."""
        await self._ready()
        if self.shares_loopback:
            return Endpoint(f"http://127.0.0.1:{port}")
        exposed = expose(lambda: self.resident.connect(port))
        self.closing.push_async_callback(exposed.close)
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

    @asynccontextmanager
    async def _closed_gate(self):
        self._open.clear()
        try:
            yield
        finally:
            self._open.set()

    # -- the end -----------------------------------------------------------------------

    async def teardown(self) -> None:
        if self._ended is None:
            self._ended = asyncio.ensure_future(self._tear_down())
        await asyncio.shield(self._ended)

    async def _tear_down(self) -> None:
        async with self._lifecycle:
            await self.closing.aclose()
            self._commands.close()
            await self._remove()
        self.on_end(self)


def _absolute(remote: str) -> str:
    if not remote.startswith("/"):
        raise UsageError(f"a path in a sandbox must be absolute: {remote!r}")
    return os.path.normpath(remote)


def _unpack(stream: int, local: Path, limit: int, skipped: list[str]) -> None:
    with open(stream, "rb") as source:
        unpack(source, local, limit=limit, skipped=skipped)
