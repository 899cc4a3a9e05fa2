"""A live container: the contract's ``Sandbox`` on top of a helper that is its first process."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

from benchflow.contracts.sandbox import SandboxImage
from benchflow.sandboxes.docker.engine import Engine
from benchflow.sandboxes.docker.labels import KIND
from benchflow.sandboxes.live import LiveSandbox

SNAPSHOTS = "benchflow/snapshot"


class DockerSandbox(LiveSandbox):
    """Made by ``DockerProvider.create``. ``container`` is the engine's id for it."""

    def __init__(
        self,
        *parts: Any,
        engine: Engine,
        container: str,
        remove: Callable[[], Awaitable[None]],
        snapshots: list[str],
        **more: Any,
    ) -> None:
        """``parts`` and ``more`` as for ``LiveSandbox``; ``snapshots`` gets what is taken."""
        super().__init__(*parts, **more)
        self._snapshots = snapshots
        self.container = container
        self._engine = engine
        self._remove_all = remove

    async def _stand_still(self) -> None:
        self.resident.check()
        await self._engine.json("POST", f"containers/{self.container}/pause")

    async def _go_on(self) -> None:
        self.resident.check()
        await self._engine.json("POST", f"containers/{self.container}/unpause")

    async def snapshot(self) -> SandboxImage:
        """The file system as an image of the engine, with the container's labels. Nothing
        inside runs while it is taken."""
        async with self._lifecycle, self._closed_gate():
            self.resident.check()
            params = {"container": self.container, "pause": not self._paused}
            made = await self._engine.json(
                "POST", "commit", params=params, body={"Labels": {KIND: "snapshot"}}
            )
            digest, tag = made["Id"], made["Id"].removeprefix("sha256:")[:32]
            await self._engine.json("POST", f"images/{digest}/tag", params={"repo": SNAPSHOTS, "tag": tag})
        self._snapshots.append(f"{SNAPSHOTS}:{tag}")
        return replace(self.image, ref=f"{SNAPSHOTS}:{tag}", digest=digest, workdir=self.workdir)

    async def _remove(self) -> None:
        await self._remove_all()
