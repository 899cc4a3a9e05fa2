"""The helper's program on the engine's side: a volume that every container gets read-only.

It is filled once per engine and version of the helper, through a container that is never
started. An empty second volume, made last, says that the first one is complete.
"""

from __future__ import annotations

import asyncio
import io
import platform
import tarfile
from pathlib import Path

from benchflow.contracts.errors import PrerequisiteError, SandboxStartError
from benchflow.sandboxes import runtime
from benchflow.sandboxes.docker.engine import Engine, EngineError
from benchflow.sandboxes.docker.labels import KIND, labels, owner_of

PLACE = "/dev/.benchflow/helper"
"""Where it is mounted: below /dev, so that no mount point is left in the image."""
_MACHINES = {"x86_64": "amd64", "aarch64": "arm64"}


def command() -> list[str]:
    """What a container runs: the helper, by its own loader."""
    loader = runtime.loader_path()
    _, option, library, python, *rest = runtime.argv("import container; container.main()")
    return [f"{PLACE}/lib/{loader.name}", option, f"{PLACE}/{library}", f"{PLACE}/{python}", *rest]


class HelperVolume:
    """Makes sure, once, that an engine has the helper."""

    def __init__(self, engine: Engine, home: Path) -> None:
        self._engine = engine
        self._home = home
        self._name = ""
        self._making = asyncio.Lock()

    async def name(self, image: str) -> str:
        """The volume's name. ``image`` is any that the engine has. Raises ``PrerequisiteError``
        for an engine on another kind of machine."""
        async with self._making:
            if not self._name:
                machine = _MACHINES.get(platform.machine(), platform.machine())
                if self._engine.info.machine != machine:
                    raise PrerequisiteError(
                        f"the docker engine runs on {self._engine.info.machine}, this program on {machine}",
                        fix="use an engine on the same kind of machine, or run there",
                    )
                folder = await asyncio.to_thread(runtime.runtime_dir)
                name = f"benchflow-helper-{folder.name}"
                if not await self._complete(name):
                    await self._fill(name, folder, image)
                self._name = name
        return self._name

    async def _complete(self, name: str) -> bool:
        try:
            await self._engine.json("GET", f"volumes/{name}-complete")
        except EngineError as error:
            if error.status == 404:
                return False
            raise
        return True

    async def _fill(self, name: str, folder: Path, image: str) -> None:
        """Whoever makes the container fills the volume; others wait, while its maker lives."""
        mount = {"Type": "volume", "Source": name, "Target": "/helper", "VolumeOptions": {"NoCopy": True}}
        marks = labels("sandbox", self._home, "helper")
        body = {"Image": image, "Cmd": ["-"], "Labels": marks, "HostConfig": {"Mounts": [mount]}}
        data = await asyncio.to_thread(_packed, folder)
        while not await self._complete(name):
            try:
                made = await self._engine.json(
                    "POST", "containers/create", params={"name": f"{name}-filler"}, body=body
                )
            except EngineError as error:
                if error.status != 409:
                    raise SandboxStartError(f"cannot give the engine its helper: {error.message}") from error
                await self._wait_for(f"{name}-filler")
                continue
            try:
                path = f"containers/{made['Id']}/archive"
                async with self._engine.open("PUT", path, params={"path": "/helper"}, data=data):
                    pass
                done = {"Name": f"{name}-complete", "Labels": {KIND: "helper"}}
                await self._engine.json("POST", "volumes/create", body=done)
            finally:
                await asyncio.shield(self._engine.remove(f"containers/{made['Id']}"))

    async def _wait_for(self, filler: str) -> None:
        try:
            found = await self._engine.json("GET", f"containers/{filler}/json")
        except EngineError:
            return  # it is done
        owner = owner_of(found["Config"]["Labels"] or {})
        if owner is None or owner.alive():
            await asyncio.sleep(0.2)
        else:
            await self._engine.remove(f"containers/{filler}")


def _packed(folder: Path) -> bytes:
    """The runtime as a tar of root's that nobody else can look into."""

    def owned(info: tarfile.TarInfo) -> tarfile.TarInfo:
        info.uid = info.gid = 0
        info.uname = info.gname = ""
        info.mode = 0o700
        return info

    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as tar:
        tar.add(folder, ".", filter=owned)
    return stream.getvalue()
