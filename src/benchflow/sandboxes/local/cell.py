"""Everything a live sandbox holds on the host, from its lease to its last control group.

A cell is claimed before it is started and removed in the opposite order, the lease last,
so that a crash at any point leaves a lease that names what is left.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from typing import Any

from benchflow.contracts.errors import SandboxStartError
from benchflow.contracts.sandbox import SandboxSpec
from benchflow.sandboxes.local.bwrap import Jail
from benchflow.sandboxes.local.cgroups import Cgroup
from benchflow.sandboxes.local.layers import LayerStore, LocalImage, Upper
from benchflow.sandboxes.local.leases import Lease
from benchflow.sandboxes.local.resident import Resident
from benchflow.sandboxes.local.userns import UserNamespace


@dataclass(slots=True)
class Cell:
    """``plan`` is what the helper's ``setup`` carries out after each start; ``network`` closes
    the doors and proxies opened for it."""

    spec: SandboxSpec
    image: LocalImage
    store: LayerStore
    userns: UserNamespace
    threads: ThreadPoolExecutor
    lease: Lease
    upper: Upper
    cgroup: Cgroup
    jail: Jail
    plan: dict[str, Any]
    network: AsyncExitStack
    enforced: dict[str, object] = field(default_factory=dict[str, object])
    agent: tuple[int, int] = (0, 0)
    _resident: Resident | None = None

    @property
    def resident(self) -> Resident:
        if self._resident is None:
            raise SandboxStartError(f"the sandbox {self.lease.name} is not running")
        return self._resident

    async def start(self) -> None:
        """Start the jail, then let the helper make the file system ready."""
        try:
            async with asyncio.timeout(self.spec.setup_timeout):
                resident = self._resident = await Resident.start(
                    self.lease.name,
                    self.jail,
                    self.userns,
                    self.cgroup,
                    timeout=self.spec.setup_timeout,
                    on_fork=self.lease.started,
                )
                resident.explain = self._why_it_died
                uid, gid, home = await resident.answer("setup", self.plan)
        except TimeoutError as error:
            raise SandboxStartError(
                f"the sandbox {self.lease.name} was not ready after {self.spec.setup_timeout:g} s"
            ) from error
        self.agent = (uid, gid)
        self.enforced["agent_home"] = home

    def _why_it_died(self) -> str:
        if self.cgroup.out_of_memory():
            return f"out of memory (the limit is {self.spec.limits.memory_mb} MB)"
        return ""

    async def restack(self) -> LocalImage:
        """Turn the upper into a layer and go on upon it. Nothing may be running inside."""
        await self.resident.stop()
        loop = asyncio.get_running_loop()
        image = await loop.run_in_executor(self.threads, self._freeze)
        await self.start()
        return image

    def _freeze(self) -> LocalImage:
        layer = self.store.freeze(self.upper)
        self.image = self.store.extend(self.image, layer)
        self.upper = self.store.new_upper(tmpfs=self.upper.tmpfs, lowers=self.image.rootfs.lowers)
        self.jail = replace(self.jail, rootfs=self.image.rootfs, upper=self.upper)
        self.plan = {**self.plan, "fresh": False}
        return self.image

    def copy(self, notes: tuple[str, ...]) -> LocalImage:
        """A layer with the present content as an image; the caller holds everything still."""
        layer = self.store.copy(self.upper)
        return self.store.extend(self.image, layer, notes=(*self.image.notes, *notes))

    async def remove(self) -> None:
        """Leave nothing behind. Idempotent."""
        loop = asyncio.get_running_loop()
        if self._resident is not None:
            if self.cgroup.can_freeze:
                await loop.run_in_executor(self.threads, self._thaw)
            await self._resident.stop()
        await self.network.aclose()
        await loop.run_in_executor(self.threads, self._clean)

    def _thaw(self) -> None:
        try:
            self.cgroup.thaw()
        except FileNotFoundError:
            pass  # removed before: this is a second teardown

    def _clean(self) -> None:
        self.store.discard(self.upper)
        self.cgroup.remove()
        self.lease.release()


def memory_room(megabytes: int) -> bool:
    """Whether the host could hold four times as much in memory."""
    with open("/proc/meminfo") as lines:
        for line in lines:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) >> 10 > 4 * megabytes
    return False
