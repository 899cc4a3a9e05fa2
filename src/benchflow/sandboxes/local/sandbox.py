"""A live local sandbox: the contract's ``Sandbox`` on top of a helper in a jail."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import replace

from benchflow.contracts.errors import HardeningError, SandboxError, SandboxLostError
from benchflow.contracts.sandbox import SandboxCapabilities, SandboxImage, SandboxSpec
from benchflow.sandboxes.commands import Commands
from benchflow.sandboxes.live import LiveSandbox
from benchflow.sandboxes.local.cell import Cell

_STOP, _CONTINUE = 19, 18
_ROOM_DEADLINE = 10.0


class LocalSandbox(LiveSandbox):
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
        super().__init__(
            spec,
            image,
            capabilities,
            cell.resident,
            workdir=workdir,
            env=env,
            enforced=cell.enforced,
            threads=cell.threads,
        )
        self._cell = cell
        self.shares_loopback = spec.network.mode == "open"

    async def _kill_otherwise(self, user: str | None, error: SandboxError) -> int:
        if await self._in_thread(self._cell.kill_frozen, user):
            return await self._proved_gone(user)
        return await super()._kill_otherwise(user, error)

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

    async def _frozen(self) -> SandboxImage:
        self._commands.close()
        image = await self._cell.restack()
        self._commands = Commands(self._cell.resident)
        return self._public(image)

    async def _copied(self, *notes: str) -> SandboxImage:
        return self._public(await self._in_thread(self._cell.copy, notes))

    def _public(self, image) -> SandboxImage:
        return replace(image.public(), workdir=self.workdir)

    async def _remove(self) -> None:
        await self._cell.remove()
