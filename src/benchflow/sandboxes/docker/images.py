"""Task images on a Docker engine: one build per task version, found again by its tag.

The tag names everything that decides the image, so that another job, process or user of the
engine takes what is there. What a build leaves half-made is told by its label.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

from benchflow.contracts.errors import (
    BenchflowError,
    HostPressureError,
    ImageBuildError,
    PrerequisiteError,
    UsageError,
)
from benchflow.contracts.sandbox import ImageSource, Reaped, SandboxImage
from benchflow.kernel.ownership import Owner, state_dir
from benchflow.kernel.storage import dumps
from benchflow.sandboxes.buildlog import BuildLog
from benchflow.sandboxes.context import signature
from benchflow.sandboxes.docker.build import DISK_FULL, build, messages
from benchflow.sandboxes.docker.engine import Engine, EngineError
from benchflow.sandboxes.docker.labels import own_label, owner_of
from benchflow.sandboxes.docker.loan import LOAN, Loan, lend_to, may_help
from benchflow.sandboxes.docker.recipe import LABEL, Recipe, is_image_name, tar
from benchflow.sandboxes.docker.registry import registry_auth
from benchflow.sandboxes.filelock import FileLocks

_REPOSITORY = "benchflow/task"
_BASES = "benchflow.bases"
"""Label: the base images by name, with the ids that the build found under these names."""
_LENT = "benchflow.lent"
"""Label of an image that could be built only with this host's certificates or indexes."""
_BUILDER = "benchflow.builder"
"""Label of a volume that stands on the engine while a build runs: who is building."""
_running: set[str] = set()
"""The builds of this process that run now; other marks of its own were cut off."""
_ASK_SEC = 30.0
_STALE_SEC = 24 * 3600.0
"""Age at which the cached steps of a build that failed are removed with the leftovers."""


@dataclass(frozen=True, slots=True)
class _Order:
    """One image to build. ``bases`` are ids by name."""

    recipe: Recipe
    tag: str
    buildkit: bool
    bases: Mapping[str, str]
    log: BuildLog


class Images:
    """The images of one engine. Concurrent calls for one task version share one build."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._known: dict[ImageSource, tuple[object, SandboxImage]] = {}
        self._offered: set[tuple[str, str]] = set()
        self._locks = FileLocks(state_dir() / "docker" / "locks")

    async def check(self, source: ImageSource) -> None:
        """Raise ``UsageError`` for a Dockerfile or image name that is wrong, and
        ``PrerequisiteError`` for one that this engine is too old for, and for an image that is
        not to be had or not for this machine.
        Builds and fetches nothing."""
        info = await self._engine.connect()
        if source.docker_image:
            name = source.base_for(source.docker_image)
            if not is_image_name(name):
                raise UsageError(f"task {source.name!r}: {name!r} is not an image name", fix="write NAME:TAG")
            try:
                return await self._offer(name, "")
            except PrerequisiteError:
                if source.dockerfile is None:
                    raise
        try:
            recipe = await asyncio.to_thread(Recipe, source)
        except ImageBuildError as error:
            raise UsageError(f"task {source.name!r}: {error.message}", fix=error.fix) from error
        try:
            recipe.needs_buildkit(info.api)
            for name, platform in recipe.bases:
                await self._offer(name, platform)
        except ImageBuildError as error:
            raise PrerequisiteError(f"task {source.name!r}: {error.message}", fix=error.fix) from error
        except PrerequisiteError:
            tag = await self._tag(recipe)
            if await self._current(tag, recipe) is None:
                raise

    async def prepare(self, source: ImageSource) -> SandboxImage:
        """Build, fetch or find the image of a task. Raises ``ImageBuildError`` naming the
        Dockerfile's line, ``PrerequisiteError`` for a missing base, ``HostPressureError`` when
        the engine's disk is full."""
        await self._engine.connect()
        state = await asyncio.to_thread(_state, source)
        known = self._known.get(source)
        if known is None or known[0] != state or await self._inspect(known[1].ref) is None:
            known = self._known[source] = (state, await self._made(source))
        return known[1]

    async def _made(self, source: ImageSource) -> SandboxImage:
        notes: list[str] = []
        if source.docker_image:
            name = source.base_for(source.docker_image)
            try:
                return _described(await self._fetched(name, ""), name, ())
            except PrerequisiteError as error:
                if source.dockerfile is None:
                    raise
                notes.append(f"built from the Dockerfile, as docker_image was not to be had: {error.message}")
        recipe = await asyncio.to_thread(Recipe, source)
        tag = await self._tag(recipe)
        found = await self._current(tag, recipe)
        if found is None:
            async with self._locks.hold(tag):
                found = await self._current(tag, recipe) or await self._built(recipe, tag)
        return _described(found, recipe.base, tuple(notes))

    async def _tag(self, recipe: Recipe) -> str:
        def name() -> str:
            digest = recipe.digest(recipe.context(), self._engine.info.machine)
            return f"{_REPOSITORY}:{digest[:32]}"

        return await asyncio.to_thread(name)

    async def _current(self, tag: str, recipe: Recipe) -> dict[str, Any] | None:
        """The built image, unless a base has got other content under its name since."""
        found = await self._inspect(tag)
        if found is None:
            return None
        built_on = json.loads((found["Config"].get("Labels") or {}).get(_BASES, "{}"))
        for name, _ in recipe.bases:
            base = await self._inspect(name)
            if base is not None and base["Id"] != built_on.get(name):
                return None
        return found

    async def _built(self, recipe: Recipe, tag: str) -> dict[str, Any]:
        source = recipe.source
        log = BuildLog(state_dir() / "docker" / "build-logs", source.name)
        clock = asyncio.timeout(source.build_timeout)
        try:
            async with clock, self._marked(tag):
                bases = {name: (await self._fetched(name, platform))["Id"] for name, platform in recipe.bases}
                order = _Order(recipe, tag, recipe.needs_buildkit(self._engine.info.api), bases, log)
                try:
                    await self._build(order)
                except ImageBuildError as error:
                    if not (may_help(error) and recipe.can_mount(self._engine.info.api)):
                        raise
                    async with lend_to(self._engine, recipe.base, log) as loan:
                        await self._build(replace(order, buildkit=True), loan)
        except TimeoutError:
            if not clock.expired():
                raise
            raise ImageBuildError(
                f"the build of {source.name!r} took longer than {source.build_timeout:g} s",
                fix="raise the task's build timeout" + (f"; output: {log.path}" if log.used else ""),
                detail=log.tail(),
            ) from None
        finally:
            log.close()
        found = await self._inspect(tag)
        if found is None:
            raise ImageBuildError(f"the image of {source.name!r} was removed as soon as it was built")
        return found

    async def _build(self, order: _Order, loan: Loan | None = None) -> None:
        """With a loan: once more, with this host's certificates and package indexes."""
        dockerfile, steps = order.recipe.sent(loan.image, loan.env) if loan else order.recipe.sent()
        await build(
            self._engine,
            tag=order.tag,
            stream=tar(await asyncio.to_thread(order.recipe.context), dockerfile),
            steps=steps,
            buildkit=order.buildkit,
            labels={LABEL: "1", _BASES: dumps(order.bases).decode(), **({_LENT: "1"} if loan else {})},
            log=order.log,
        )

    @asynccontextmanager
    async def _marked(self, tag: str) -> AsyncIterator[None]:
        """Tell everybody on the engine that a build runs. One that was cut off leaves its mark,
        which says after its owner's death that half-made things may lie about."""
        name = f"benchflow-build-{os.urandom(6).hex()}"
        labels = {_BUILDER: own_label(), "benchflow.tag": tag}
        await self._engine.json("POST", "volumes/create", body={"Name": name, "Labels": labels})
        _running.add(name)
        try:
            try:
                yield
            finally:
                _running.discard(name)
        except BenchflowError:
            await self._engine.remove(f"volumes/{name}")
            raise
        await self._engine.remove(f"volumes/{name}")

    # -- images of others --------------------------------------------------------------

    async def _inspect(self, name: str) -> dict[str, Any] | None:
        return await self._engine.find(f"images/{name}/json")

    async def _offer(self, name: str, platform: str) -> None:
        """Raise unless the image is here, or its registry has it for this machine."""
        if (name, platform) in self._offered:
            return
        found = await self._inspect(name)
        if found is not None:
            machines = [str(found["Architecture"])]
        else:
            try:
                async with asyncio.timeout(_ASK_SEC):
                    said = await self._distribution(name)
            except TimeoutError:
                raise _missing(name, f"its registry did not answer in {_ASK_SEC:g} s") from None
            except EngineError as error:
                raise _missing(name, error.message) from error
            machines = [str(item.get("architecture")) for item in said.get("Platforms") or []]
        self._check_machine(name, machines, platform)
        self._offered.add((name, platform))

    async def _distribution(self, name: str) -> dict[str, Any]:
        headers = registry_auth(name)
        async with self._engine.open("GET", f"distribution/{name}/json", headers=headers) as response:
            return await response.json()

    async def _fetched(self, name: str, platform: str) -> dict[str, Any]:
        """The image, pulled when it is not here yet."""
        found = await self._inspect(name)
        if found is None:
            await self._pull(name, platform)
            found = await self._inspect(name)
            if found is None:
                raise _missing(name, "the registry sent another image")
        self._check_machine(name, [str(found["Architecture"])], platform)
        return found

    async def _pull(self, name: str, platform: str) -> None:
        pinned = "@" in name or ":" in name.rpartition("/")[2]
        params = {"fromImage": name, "tag": None if pinned else "latest", "platform": platform or None}
        fault = ""
        try:
            async with self._engine.open(
                "POST", "images/create", params=params, headers=registry_auth(name)
            ) as response:
                async for message in messages(response, self._engine):
                    fault = str(message.get("error") or fault)
        except EngineError as error:
            fault = error.message
        if DISK_FULL in fault.lower():
            raise HostPressureError(
                f"the image {name!r} did not fit on the disk of the docker engine: {DISK_FULL}",
                fix="free space there (docker system df, docker image prune), then run again",
            )
        if fault:
            raise _missing(name, fault)

    def _check_machine(self, name: str, machines: list[str], platform: str) -> None:
        parts = platform.split("/")
        wanted = parts[1] if len(parts) > 1 else self._engine.info.machine
        if machines and wanted not in machines:
            raise PrerequisiteError(
                f"the image {name!r} is for {', '.join(sorted(set(machines)))}, and {wanted} is needed",
                fix=f"docker pull --platform linux/{wanted} {name}, or name another with "
                f"--base-image-override {name}=IMAGE",
            )

    # -- leftovers ---------------------------------------------------------------------

    async def reap(self, *, older_than: float = 0.0, dry_run: bool = False) -> list[Reaped]:
        """Remove the half-made images and build containers of builds whose process died, and
        cached steps of failed builds after a day. Nothing while anybody builds."""
        marks = await self._engine.json("GET", "volumes", params={"filters": {"label": [_BUILDER]}})
        owners = {mark["Name"]: owner_of(mark["Labels"], _BUILDER) for mark in marks["Volumes"] or []}
        if any(_builds(name, owner) for name, owner in owners.items()):
            return []
        age = older_than if owners else max(older_than, _STALE_SEC)
        who = ", ".join(sorted(str(owner) for owner in owners.values())) or "a build that failed"
        found: list[Reaped] = []
        for kind, path, name, made in await self._half_made():
            if (old := time.time() - made) >= age:
                removed = not dry_run and await self._engine.remove(path)
                found.append(Reaped("docker", name, kind, old, who, removed))
        if not dry_run:
            for name in owners:
                await self._engine.remove(f"volumes/{name}")
        return found

    async def _half_made(self) -> list[tuple[str, str, str, float]]:
        """What only a build can have made: kind, path, name and time of each."""
        ours = {"label": [LABEL]}
        found: list[tuple[str, str, str, float]] = []
        for item in await self._engine.json("GET", "containers/json", params={"all": True, "filters": ours}):
            if _labels(item) <= {LABEL, LOAN}:
                found.append(
                    (
                        "build container",
                        f"containers/{item['Id']}",
                        item["Id"][:12],
                        item["Created"],
                    )
                )
        for item in await self._engine.json("GET", "images/json", params={"filters": ours}):
            tagged = set(item.get("RepoTags") or ()) - {"<none>:<none>"} and LOAN not in item["Labels"]
            if not tagged and _labels(item) <= {LABEL, _BASES, _LENT, LOAN}:
                found.append(("image", f"images/{item['Id']}", item["Id"][7:19], item["Created"]))
        return found


def _builds(mark: str, owner: Owner | None) -> bool:
    """Whether the builder that set a mark may still be at it. One we cannot read is left alone."""
    if owner == Owner.current():
        return mark in _running
    return owner is None or owner.alive()


def _labels(item: Mapping[str, Any]) -> set[str]:
    return {name for name in item.get("Labels") or {} if name.startswith("benchflow.")}


def _state(source: ImageSource) -> object:
    """Cheap identity of everything a build of this source reads on the host."""
    status = source.dockerfile.stat() if source.dockerfile and source.dockerfile.exists() else None
    stamp = status and (status.st_mtime_ns, status.st_ctime_ns, status.st_ino)
    return stamp, signature(source.context) if source.context and source.context.is_dir() else ()


def _described(found: Mapping[str, Any], base: str, notes: tuple[str, ...]) -> SandboxImage:
    config = found.get("Config") or {}
    if _LENT in (config.get("Labels") or {}):
        notes = (*notes, "built with the host's certificates and package indexes, which are not in the image")
    env = dict(item.split("=", 1) for item in config.get("Env") or () if "=" in item)
    return SandboxImage(
        provider="docker",
        ref=found["Id"],
        digest=found["Id"],
        base=base,
        workdir=config.get("WorkingDir") or None,
        user=config.get("User") or None,
        env=env,
        notes=notes,
    )


def _missing(name: str, reason: str) -> PrerequisiteError:
    reason = " ".join(reason.removeprefix("docker: ").split())
    return PrerequisiteError(
        f"the image {name!r} is not on this docker engine and cannot be fetched: {reason[:300]}",
        fix=f"docker pull {name} or docker load it where the network allows, or use another with "
        f"--base-image-override {name}=IMAGE",
    )
