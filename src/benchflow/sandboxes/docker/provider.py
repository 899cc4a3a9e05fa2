"""The docker provider: one container per sandbox, through the engine's interface."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchflow.contracts.errors import (
    HostPressureError,
    PrerequisiteError,
    SandboxError,
    SandboxLostError,
    SandboxStartError,
)
from benchflow.contracts.sandbox import (
    ImageSource,
    Reaped,
    Running,
    SandboxCapabilities,
    SandboxImage,
    SandboxSpec,
)
from benchflow.kernel.ownership import state_dir
from benchflow.sandboxes.docker.containers import Show, configuration
from benchflow.sandboxes.docker.engine import Engine, EngineError
from benchflow.sandboxes.docker.images import Images
from benchflow.sandboxes.docker.labels import JOB, labels, ours, owner_of
from benchflow.sandboxes.docker.limits import EngineLimits
from benchflow.sandboxes.docker.network import DockerNetwork, make_network, same_host
from benchflow.sandboxes.docker.resident import ContainerResident
from benchflow.sandboxes.docker.sandbox import SNAPSHOTS, DockerSandbox
from benchflow.sandboxes.docker.volumes import Volumes
from benchflow.sandboxes.doors import SharedDoors
from benchflow.sandboxes.live import plain, workspace
from benchflow.sandboxes.resident import finished

_THREADS = 16
_ASK_SEC = 5.0


class DockerProvider:
    """Makes and removes containers on the engine that ``DOCKER_HOST`` names. One per process is
    enough; it is safe to share within one event loop."""

    name = "docker"

    def __init__(self, home: Path | None = None, host: str | None = None) -> None:
        self._home = home or state_dir()
        self.engine = Engine(host)
        self.images = Images(self.engine)
        self._volumes = Volumes(self.engine, self._home)
        self._info: dict[str, Any] = {}
        self._limits = EngineLimits({})
        self._on_this_host = False
        self._asked = False
        self._doors = SharedDoors()
        self._sandboxes: set[DockerSandbox] = set()
        self._snapshots: list[str] = []
        self._left: set[str] = set()  # containers that an engine which was away kept
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="docker")
        self._asking = asyncio.Lock()

    # -- what this engine can do -------------------------------------------------------

    def capabilities(self) -> SandboxCapabilities:
        return self._limits.capabilities()

    async def preflight(self) -> None:
        """Reach the engine and learn what it can do, once."""
        await self.engine.connect()
        async with self._asking:
            if self._asked:
                return
            info = await self.engine.json("GET", "info")
            if info.get("OSType", "linux") != "linux":
                raise PrerequisiteError(
                    f"the docker engine at {self.engine.host} runs {info['OSType']} containers",
                    fix="switch it to Linux containers",
                )
            self._info, self._limits = info, EngineLimits(info)
            self._on_this_host = same_host(self.engine.host, info)
            self._asked = True

    async def facts(self) -> dict[str, str]:
        said = self._info
        facts = {
            "engine": self.engine.info.version,
            "api": self.engine.info.api,
            "address": self.engine.host,
            "storage_driver": str(said.get("Driver", "unknown")),
            "machine": str(said.get("Architecture", "unknown")),
        }
        return facts | ({"data_root": str(said["DockerRootDir"])} if self._on_this_host else {})

    # -- images ------------------------------------------------------------------------

    async def check(self, source: ImageSource) -> None:
        await self.images.check(source)

    async def prepare(self, source: ImageSource) -> SandboxImage:
        await self.engine.back()
        return await self.images.prepare(source)

    # -- sandboxes ---------------------------------------------------------------------

    async def create(self, image: SandboxImage, spec: SandboxSpec) -> DockerSandbox:
        """Make, start and set up a container. Raises ``SandboxStartError`` with the reason."""
        await self.preflight()
        await self.engine.back()
        helper, shown = await self._volumes.helper(image.ref), await self._shown(image, spec)
        network = await make_network(spec, on_this_host=self._on_this_host)
        name = f"{plain(spec.name)}-{uuid.uuid4().hex[:8]}"
        resident = ContainerResident(name, lambda: self._why_it_ended(name, spec))
        making = asyncio.ensure_future(self._make(name, image, spec, network, helper, shown))

        async def end() -> None:
            resident.close()
            await network.closing.aclose()
            await asyncio.wait([making])  # what is asked for comes into being, whoever waits
            self._left.add(name)
            await self.engine.remove(f"containers/{name}")
            self._left.discard(name)

        try:
            enforced = await asyncio.shield(making)
            sandbox = await self._start(name, image, spec, network, resident, enforced, end)
        except BaseException as error:
            self._volumes.forget()
            with suppress(SandboxLostError):
                await finished(asyncio.ensure_future(end()))
            if isinstance(error, EngineError):
                raise _start_error(name, error) from error
            raise
        sandbox.on_end = self._sandboxes.discard
        self._sandboxes.add(sandbox)
        return sandbox

    async def _shown(self, image: SandboxImage, spec: SandboxSpec) -> list[Show]:
        """The mounts asked for; an engine that does not see our files gets their content."""
        if self._on_this_host:
            return [("bind", str(mount.source), mount.target) for mount in spec.mounts]
        return [
            ("volume", await self._volumes.holding(mount.source, image.ref), mount.target)
            for mount in spec.mounts
        ]

    async def _make(
        self,
        name: str,
        image: SandboxImage,
        spec: SandboxSpec,
        network: DockerNetwork,
        helper: str,
        shown: list[Show],
    ) -> dict[str, object]:
        """Create the container; returns the limits that are in force."""
        while True:
            limits = self._limits.enforced(spec.limits)
            body = configuration(
                spec,
                image,
                labels=labels("sandbox", self._home, spec.name, spec.job),
                network=network.mode,
                helper=helper,
                shown=[*shown, *(("bind", str(path), target) for path, target in network.binds)],
                limits=limits,
            )
            try:
                await self.engine.json("POST", "containers/create", params={"name": name}, body=body)
                return limits
            except EngineError as error:
                if not (limits["storage_mb"] and self._limits.no_storage(error.message)):
                    raise

    async def _start(
        self,
        name: str,
        image: SandboxImage,
        spec: SandboxSpec,
        network: DockerNetwork,
        resident: ContainerResident,
        limits: dict[str, object],
        remove: Callable[[], Awaitable[None]],
    ) -> DockerSandbox:
        workdir = workspace(spec.workdir or image.workdir)
        await resident.attach(self.engine, name)
        await self.engine.json("POST", f"containers/{name}/start")
        if network.targets:
            found = await self.engine.json("GET", f"containers/{name}/json")
            gateway = found["NetworkSettings"].get("Gateway") or ""
            await network.open(found["Id"], found["State"]["Pid"], gateway, self._doors)
            resident.on_caller = network.callers.come
        plan = {
            "agent": spec.agent_user or "",
            "users": True,
            "workdir": workdir,
            "fresh": not image.ref.startswith(SNAPSHOTS),
            "doors": network.doors,
            "lifetime": spec.lifetime_sec,
        }
        _, _, home = await resident.set_up(plan, spec.setup_timeout)
        told = {"network": spec.network.mode, "users": "range", "base": image.base, "upper": "disk"}
        door = network.way if spec.model_door else None
        return DockerSandbox(
            spec,
            image,
            self.capabilities(),
            resident,
            engine=self.engine,
            container=name,
            workdir=workdir,
            env={**spec.env, **network.env},
            enforced={**limits, **told, "model_door": door, "agent_home": home},
            threads=self._threads,
            remove=remove,
            snapshots=self._snapshots,
        )

    async def _why_it_ended(self, name: str, spec: SandboxSpec) -> str:
        """What the engine knows of a container whose first process has fallen silent."""
        try:
            async with asyncio.timeout(_ASK_SEC):
                await self.engine.json("POST", f"containers/{name}/wait")
                state = (await self.engine.json("GET", f"containers/{name}/json"))["State"]
        except TimeoutError:
            return "the connection to it broke"
        except EngineError as error:
            return "its container was removed" if error.status == 404 else error.message
        except SandboxLostError as error:
            return error.message
        if state.get("OOMKilled"):
            return f"out of memory (the limit is {spec.limits.memory_mb} MB)"
        return f"its first process ended with {state.get('ExitCode')}"

    # -- what there is ------------------------------------------------------------------

    async def running(self) -> list[Running]:
        found: list[Running] = []
        for item in await self._containers():
            owner, name = owner_of(item["Labels"]), item["Names"][0].lstrip("/")
            age, alive = time.time() - item["Created"], owner is not None and owner.alive()
            found.append(Running(self.name, name, item["Labels"][JOB], age, str(owner), alive))
        return found

    async def _containers(self) -> list[dict[str, Any]]:
        params = {"all": True, **ours("sandbox", self._home)}
        return await self.engine.json("GET", "containers/json", params=params)

    async def reap(self, *, older_than: float = 0.0, dry_run: bool = False) -> list[Reaped]:
        """Remove containers, then snapshots, of owners of this state folder that no longer
        live, and what builds have left. ``older_than`` is in seconds."""
        await self.engine.connect()
        found: list[Reaped] = []
        for item in await self._containers():
            name = item["Names"][0].lstrip("/")
            found += await self._reap(f"containers/{name}", name, "sandbox", item, older_than, dry_run)
        for item in await self.engine.json("GET", "images/json", params=ours("snapshot", self._home)):
            name = (item.get("RepoTags") or [item["Id"]])[0]
            found += await self._reap(f"images/{name}", name, "snapshot", item, older_than, dry_run)
        found += await self._volumes.reap(older_than=older_than, dry_run=dry_run)
        return found + await self.images.reap(older_than=older_than, dry_run=dry_run)

    async def _reap(
        self, path: str, name: str, kind: str, item: Mapping[str, Any], older_than: float, dry_run: bool
    ) -> list[Reaped]:
        owner, age = owner_of(item["Labels"]), time.time() - item["Created"]
        if owner is None or owner.alive() or age < older_than:
            return []
        removed = not dry_run and await self.engine.remove(path)
        return [Reaped(self.name, name, kind, age, str(owner), removed)]

    async def close(self) -> None:
        """Tear down what is left of this provider's sandboxes, remove their snapshots, and hang up."""
        ending = [sandbox.teardown() for sandbox in list(self._sandboxes)]
        await asyncio.gather(*ending, return_exceptions=True)
        with suppress(SandboxLostError, EngineError):
            for name in self._left:
                await self.engine.remove(f"containers/{name}")
            for name in reversed(self._snapshots):  # an image stays while another is made of it
                await self.engine.remove(f"images/{name}")
        self._threads.shutdown(wait=False)
        await self.engine.close()


def _start_error(name: str, error: EngineError) -> SandboxError:
    if "no space left" in error.message.lower():
        return HostPressureError(
            f"the disk of the docker engine is full: {error.message}", fix="free space (docker system df)"
        )
    return SandboxStartError(f"{name} did not start: {error.message}")
