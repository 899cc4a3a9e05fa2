"""Build a task's image from its Dockerfile, one cached layer per instruction that writes.

A layer is named by everything that decides it: the base, the instructions before it, its
own words, the environment it sees and the content of the files it copies. A failed or
interrupted step leaves no layer, so nothing half-made is ever taken for a success.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from weakref import WeakValueDictionary

from benchflow.contracts.errors import BenchflowError, HostPressureError, ImageBuildError, SandboxError
from benchflow.contracts.sandbox import ExecResult, ImageSource
from benchflow.kernel.storage import dumps
from benchflow.sandboxes.buildlog import BuildLog, where
from benchflow.sandboxes.context import BuildContext, signature
from benchflow.sandboxes.dockerfile import DOCKER_ADVICE, Dockerfile, Instruction, parse
from benchflow.sandboxes.filelock import FileLocks
from benchflow.sandboxes.lent import TARGET, lend
from benchflow.sandboxes.local.bases import find_base, resolve_base
from benchflow.sandboxes.local.copying import UpperWriter, parse_owner
from benchflow.sandboxes.local.hostbase import machine_state
from benchflow.sandboxes.local.layers import BUILT, LayerStore, LocalImage, Rootfs, Upper, is_deep
from benchflow.sandboxes.local.merge import View
from benchflow.sandboxes.local.steps import BuildState, apply_setting, copy_plan

_VERSION = "1"
"""Counts changes of what an instruction means, so that older layers are not reused."""
_PACKAGE_MANAGERS = ("apt-get", "apt ", "apk ", "yum ", "dnf ")


RunCommand = Callable[..., Awaitable[ExecResult]]
"""Runs one command in a throw-away sandbox whose writes land in an upper: ``once.run_once``."""


class Builder:
    """Builds images into a store. Concurrent calls for one source wait for its first build."""

    def __init__(self, store: LayerStore, run: RunCommand) -> None:
        self.store = store
        self.run = run
        self._known: dict[ImageSource, tuple[object, str]] = {}
        self._building: WeakValueDictionary[ImageSource, asyncio.Lock] = WeakValueDictionary()
        self.locks = FileLocks(store.root / "locks")

    async def build(self, source: ImageSource) -> LocalImage:
        """The image of a source. Raises ``ImageBuildError`` naming the Dockerfile line,
        ``PrerequisiteError`` for a missing base, ``HostPressureError`` for a full disk."""
        async with self._building.setdefault(source, asyncio.Lock()):
            state = self._state(source)
            known = self._known.get(source)
            if known is not None and known[0] == state:
                try:
                    return self.store.load_image(known[1])
                except SandboxError:
                    del self._known[source]  # somebody removed its layers
            image = await _Build(self, source).run()
            self._known[source] = (state, image.ref)
            return image

    def check(self, source: ImageSource) -> None:
        """Raise when the base of ``source`` is not to be had here; builds nothing. What else is
        wrong with its Dockerfile is for the build to say."""
        build = _Build(self, source)
        try:
            dockerfile = build.read()
            state = BuildState(dockerfile.escape)
            for instruction in dockerfile.instructions:
                if instruction.keyword == "FROM":
                    name = source.base_for(state.begin_stage(instruction))
                    break
                apply_setting(state, instruction)
            else:
                return
        except ImageBuildError:
            return
        resolve_base(self.store, name, source.local_base)

    def _state(self, source: ImageSource) -> object:
        """Cheap identity of everything a build of this source reads on the host."""
        bases = _stamp(self.store.root / "bases")
        dockerfile = source.dockerfile and _stamp(source.dockerfile)
        context = signature(source.context) if source.context and source.context.is_dir() else ()
        return bases, dockerfile, context, machine_state() if source.local_base else None


class _Build:
    """One build, from FROM to the manifest."""

    def __init__(self, builder: Builder, source: ImageSource) -> None:
        self._builder = builder
        self._store = builder.store
        self._source = source
        self._deadline = time.monotonic() + source.build_timeout
        self._context: BuildContext | None = None
        self._log = BuildLog(builder.store.root / "build-logs", source.name)
        self._layers: list[Path] = []
        self._key = ""

    async def run(self) -> LocalImage:
        try:
            return await self._run()
        finally:
            self._log.close()

    async def _run(self) -> LocalImage:
        dockerfile = self.read()
        state = BuildState(dockerfile.escape)
        for instruction in dockerfile.instructions:
            try:
                await self._step(state, instruction)
            except (OSError, ValueError) as error:
                explained = _explained(error, instruction)
                raise explained from (None if explained is error else error)
        return self._store.save_image(
            LocalImage(
                digest="",
                base=self._base.base,
                rootfs=self._rootfs(),
                base_depth=len(self._base.rootfs.lowers),
                env=state.env,
                workdir=state.workdir,
                user=state.user,
                notes=(*self._base.notes, *state.notes),
            )
        )

    def read(self) -> Dockerfile:
        source = self._source
        prebuilt = source.docker_image and source.base_for(source.docker_image)
        if prebuilt and (source.dockerfile is None or find_base(self._store, prebuilt) is not None):
            return parse(f"FROM {prebuilt}\n".encode())
        if source.dockerfile is None:
            if source.local_base:
                return parse(f"FROM {source.local_base}\n".encode())
            raise ImageBuildError(
                f"task {source.name!r} has neither a Dockerfile nor docker_image",
                fix="add environment/Dockerfile to the task",
            )
        try:
            data = source.dockerfile.read_bytes()
        except OSError as error:
            raise ImageBuildError(f"cannot read {source.dockerfile}: {error.strerror}") from error
        return parse(data)

    async def _step(self, state: BuildState, instruction: Instruction) -> None:
        if time.monotonic() > self._deadline:
            raise self._timed_out()
        match instruction.keyword:
            case "FROM":
                await self._from(state, instruction)
            case "RUN":
                await self._run_command(state, instruction)
            case "COPY" | "ADD":
                await self._copy(state, instruction)
            case "WORKDIR":
                await self._workdir(state, instruction)
            case _:
                apply_setting(state, instruction)

    async def _from(self, state: BuildState, instruction: Instruction) -> None:
        name = self._source.base_for(state.begin_stage(instruction))
        self._base = await asyncio.to_thread(resolve_base, self._store, name, self._source.local_base)
        self._key = _hash(_VERSION, self._base.digest)
        state.env = dict(self._base.env)
        state.workdir, state.user = self._base.workdir, self._base.user

    def _rootfs(self) -> Rootfs:
        base = self._base.rootfs
        return Rootfs(base.kind, (*base.lowers, *self._layers), base.binds)

    def _view(self) -> View:
        rootfs = self._rootfs()
        return View(rootfs.lowers, rootfs.binds)

    async def _layer(self, material: object, fill: Callable[[Upper], Awaitable[None]]) -> None:
        """Add the layer that ``material`` names, made by ``fill`` unless it exists."""
        self._key = _hash(self._key, material)
        name = BUILT + self._key
        layer = self._store.built(name)
        if layer is None:
            async with self._builder.locks.hold(name):
                layer = self._store.built(name)
                if layer is None:
                    layer = await self._make(name, fill)
        if any(layer.iterdir()):
            self._layers.append(layer)
        if is_deep(self._layers):
            self._layers = list(await asyncio.to_thread(self._store.flatten, self._layers, owned=False))

    async def _make(self, name: str, fill: Callable[[Upper], Awaitable[None]]) -> Path:
        upper = self._store.new_upper(lowers=self._rootfs().lowers)
        try:
            await fill(upper)
            return self._store.freeze(upper, name=name, owned=False)
        finally:
            await asyncio.to_thread(self._store.discard, upper)

    async def _workdir(self, state: BuildState, instruction: Instruction) -> None:
        path = state.absolute(state.expand(instruction.value)).rstrip("/") or "/"
        state.workdir = path
        if self._view().is_dir(path):
            return

        async def fill(upper: Upper) -> None:
            UpperWriter(self._rootfs(), upper.upper).directory(path)

        await self._layer(("WORKDIR", path), fill)

    async def _copy(self, state: BuildState, instruction: Instruction) -> None:
        if self._context is None:
            if self._source.context is None:
                raise ImageBuildError("there is no environment folder to copy from")
            self._context = await asyncio.to_thread(BuildContext, self._source.context, self._source.exclude)
        plan = copy_plan(state, instruction, self._context)
        owner = parse_owner(self._view(), plan.owner) if plan.owner else None
        material = await asyncio.to_thread(plan.material)

        async def fill(upper: Upper) -> None:
            writer = UpperWriter(self._rootfs(), upper.upper, owner=owner, mode=plan.mode)
            await asyncio.to_thread(plan.write, writer)
            if writer.foreign and owner:
                await self._chown(upper, writer.foreign, owner)

        await self._layer((instruction.keyword, material, owner), fill)

    async def _chown(self, upper: Upper, paths: list[str], owner: tuple[int, int]) -> None:
        """Give files to another user where only the sandbox's own root may do so."""
        for start in range(0, len(paths), 1000):
            argv = ["chown", "-h", "--", f"{owner[0]}:{owner[1]}", *paths[start : start + 1000]]
            result = await self._sandboxed(upper, argv)
            if not result.ok:
                raise ImageBuildError(f"cannot set the owner {owner[0]}:{owner[1]}: {result.out[-200:]}")

    async def _run_command(self, state: BuildState, instruction: Instruction) -> None:
        argv = instruction.argv or [*state.shell, instruction.value]
        cwd, user = state.workdir or "/", state.user
        env = {**state.env, **state.declared_args()}

        async def fill(upper: Upper) -> None:
            with tempfile.TemporaryDirectory(prefix="benchflow-lent-") as scratch:
                lent = await asyncio.to_thread(lend, Path(scratch), self._view().read_text("/etc/os-release"))
                self._log.begin(instruction, lent.secrets)
                result = await self._sandboxed(
                    upper, argv, {**lent.env, **env}, cwd, user, [(lent.directory, TARGET)]
                )
            if result.timed_out:
                raise self._timed_out()
            if result.exit_code:
                raise self._failed(instruction, result.exit_code)

        await self._layer(("RUN", argv, sorted(env.items()), cwd, user), fill)

    async def _sandboxed(
        self,
        upper: Upper,
        argv: list[str],
        env: Mapping[str, str] = {},
        cwd: str = "/",
        user: str | None = None,
        binds: Sequence[tuple[Path, str]] = (),
    ) -> ExecResult:
        return await self._builder.run(
            self._rootfs(),
            upper,
            argv,
            env=env,
            cwd=cwd,
            user=user,
            extra_ro_binds=binds,
            timeout=max(0.1, self._deadline - time.monotonic()),
            on_output=self._log.write,
        )

    def _failed(self, instruction: Instruction, code: int) -> ImageBuildError:
        how = f"exited with {code}" if code > 0 else f"was killed by signal {-code}"
        fix = f"the whole output is in {self._log.path}"
        if self._base.base == "host" and any(name in instruction.value for name in _PACKAGE_MANAGERS):
            fix = f"the host base has no package manager: import a base, or {DOCKER_ADVICE}; {fix}"
        message = f"{where(instruction)} {how}{self._log.reason()}"
        return ImageBuildError(message, fix=fix, detail=self._log.tail())

    def _timed_out(self) -> ImageBuildError:
        return ImageBuildError(
            f"the build of {self._source.name!r} took longer than {self._source.build_timeout:g} s",
            fix="raise the task's build timeout" + (f"; output: {self._log.path}" if self._log.used else ""),
            detail=self._log.tail(),
        )


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return status.st_mtime_ns, status.st_ctime_ns, status.st_ino


def _explained(error: Exception, instruction: Instruction) -> BenchflowError:
    """The error of a step with the line that it came from."""
    if isinstance(error, ImageBuildError):
        if error.message.startswith("Dockerfile line"):
            return error
        text = f"{where(instruction)}: {error.message}"
        return ImageBuildError(text, fix=error.fix, detail=error.detail)
    if isinstance(error, BenchflowError):
        return error
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return HostPressureError(f"{where(instruction)}: disk full", fix="free space, then run again")
    return ImageBuildError(f"{where(instruction)}: {error}")


def _hash(*parts: object) -> str:
    return hashlib.sha256(dumps(parts)).hexdigest()[:32]
