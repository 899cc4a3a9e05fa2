"""Folders of this host on the engine's side: volumes that containers get read-only.

The helper's program always is one, and so are mounts where the engine sees none of our files. Each
is filled once per engine and content, through a container that is never started. An empty
second volume, made last, says that the first one is complete.
"""

from __future__ import annotations

import asyncio
import hashlib
import tarfile
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

from benchflow.contracts.errors import BenchflowError, PrerequisiteError, SandboxStartError
from benchflow.contracts.sandbox import Reaped
from benchflow.sandboxes import runtime
from benchflow.sandboxes.docker.build import batches
from benchflow.sandboxes.docker.engine import Engine, EngineError
from benchflow.sandboxes.docker.labels import KIND, labels, owner_of
from benchflow.sandboxes.tarstream import header
from benchflow.sandboxes.transfer import pack

_PLACE = "/content"
_COMPLETE = "-complete"
_MARKS = {KIND: "volume"}
_STALE_SEC = 7 * 24 * 3600.0
"""Age from which volumes that no container has are removed with the leftovers."""


class Volumes:
    """Makes sure, once, that an engine has a folder's content."""

    def __init__(self, engine: Engine, home: Path) -> None:
        self._engine = engine
        self._home = home
        self._names: dict[Path, str] = {}
        self._making = asyncio.Lock()

    async def helper(self, image: str) -> str:
        """The volume with the helper, into which only root can look. ``image`` is any that the
        engine has. Raises ``PrerequisiteError`` for an engine on another kind of machine."""
        if self._engine.info.machine != runtime.MACHINE:
            raise PrerequisiteError(
                f"the docker engine runs on {self._engine.info.machine}, this program on {runtime.MACHINE}",
                fix="use an engine on the same kind of machine, or run there",
            )
        folder = await asyncio.to_thread(runtime.runtime_dir)
        return await self.holding(folder, image, key=f"helper-{folder.name}", private=True)

    async def holding(self, folder: Path, image: str, *, key: str = "", private: bool = False) -> str:
        """The volume with a folder's content, which ``key`` names (without one its digest)."""
        async with self._making:
            if folder not in self._names:
                name = f"benchflow-{key or await asyncio.to_thread(_digest, folder)}"
                if not await self._complete(name):
                    await self._fill(name, folder, image, private)
                self._names[folder] = name
        return self._names[folder]

    def forget(self) -> None:
        """Look again before the next use: somebody may have removed a volume."""
        self._names.clear()

    async def _complete(self, name: str) -> bool:
        return await self._engine.find(f"volumes/{name}{_COMPLETE}") is not None

    async def _create(self, name: str) -> None:
        await self._engine.json("POST", "volumes/create", body={"Name": name, "Labels": _MARKS})

    async def _fill(self, name: str, folder: Path, image: str, private: bool) -> None:
        """Whoever makes the container fills the volume; others wait, while its maker lives."""
        mount = {"Type": "volume", "Source": name, "Target": _PLACE, "VolumeOptions": {"NoCopy": True}}
        marks = labels("sandbox", self._home, "helper")
        body = {"Image": image, "Cmd": ["-"], "Labels": marks, "HostConfig": {"Mounts": [mount]}}
        filler = f"{name}-filler"
        while not await self._complete(name):
            try:
                await self._create(name)
                await self._engine.json("POST", "containers/create", params={"name": filler}, body=body)
            except EngineError as error:
                if error.status != 409:
                    raise SandboxStartError(f"cannot give the engine {folder}: {error.message}") from error
                await self._wait_for(filler)
                continue
            try:
                await self._send(filler, _packed(folder, private))
                await self._create(f"{name}{_COMPLETE}")
            finally:
                await asyncio.shield(self._engine.remove(f"containers/{filler}"))

    async def _send(self, filler: str, stream: Iterator[bytes]) -> None:
        faults: list[BenchflowError] = []
        path, params = f"containers/{filler}/archive", {"path": _PLACE}
        try:
            async with self._engine.open("PUT", path, params=params, data=batches(stream, faults)):
                pass
        except BenchflowError as error:
            raise (faults or [error])[0] from None

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

    async def reap(self, *, older_than: float, dry_run: bool) -> list[Reaped]:
        """Remove what is a week old and in no container; whoever needs it fills it again."""
        filters = {"label": [f"{KIND}={_MARKS[KIND]}"]}
        found: list[Reaped] = []
        for item in (await self._engine.json("GET", "volumes", params={"filters": filters}))["Volumes"] or []:
            name, age = item["Name"], time.time() - datetime.fromisoformat(item["CreatedAt"]).timestamp()
            if name.endswith(_COMPLETE) or age < max(older_than, _STALE_SEC) or await self._users(name):
                continue
            if not dry_run:
                await self._engine.remove(f"volumes/{name}{_COMPLETE}")  # first, as it vouches for the other
            removed = not dry_run and await self._engine.remove(f"volumes/{name}")
            found.append(Reaped("docker", name, "volume", age, "nobody", removed))
        return found

    async def _users(self, name: str) -> list[Any]:
        params = {"all": True, "filters": {"volume": [name]}}
        return await self._engine.json("GET", "containers/json", params=params)


def _digest(folder: Path) -> str:
    digest = hashlib.sha256()
    for chunk in pack(folder):
        digest.update(chunk)
    return digest.hexdigest()[:32]


def _packed(folder: Path, private: bool) -> Iterator[bytes]:
    """The folder as a tar of root's; ``private``: nobody else can look into it."""
    stream = pack(folder)
    if private:
        next(stream)
        top = tarfile.TarInfo(".")
        top.type, top.mode = tarfile.DIRTYPE, 0o700
        yield header(top)
    yield from stream
