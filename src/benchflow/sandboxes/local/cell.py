"""Everything a live sandbox holds on the host, from its lease to its last control group.

A cell is claimed before it is started and removed in the opposite order, the lease last,
so that a crash at any point leaves a lease that names what is left.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from benchflow.contracts.errors import HostPressureError, SandboxError, SandboxStartError
from benchflow.contracts.sandbox import SandboxSpec
from benchflow.sandboxes.local.bwrap import Jail
from benchflow.sandboxes.local.cgroups import Cgroup, cgroup_host
from benchflow.sandboxes.local.layers import LayerStore, LocalImage, Upper
from benchflow.sandboxes.local.leases import Lease, real_uid
from benchflow.sandboxes.local.network import Network
from benchflow.sandboxes.local.resident import JailResident, Start
from benchflow.sandboxes.local.userns import UserNamespace
from benchflow.sandboxes.resident import finished

TMPFS_STORAGE_MB = 1024
"""Up to this declared storage, writes stay in memory (when the host has room)."""
_SHM_MB = 64

T = TypeVar("T")


@dataclass(slots=True)
class Cell:
    """``binds`` are shown read-only; ``plan`` is what the helper carries out when it starts;
    ``network`` takes back the doors and proxies opened for this sandbox."""

    name: str
    spec: SandboxSpec
    image: LocalImage
    store: LayerStore
    userns: UserNamespace
    threads: ThreadPoolExecutor
    lease_folder: Path
    binds: tuple[tuple[Path, str], ...]
    plan: dict[str, Any]
    network: Network
    enforced: dict[str, object] = field(default_factory=dict[str, object])
    agent: tuple[int, int] = (0, 0)
    _lease: Lease | None = None
    _upper: Upper | None = None
    _cgroup: Cgroup | None = None
    _resident: JailResident | None = None

    @property
    def resident(self) -> JailResident:
        if self._resident is None:
            raise SandboxStartError(f"the sandbox {self.name} is not running")
        return self._resident

    @property
    def cgroup(self) -> Cgroup:
        if self._cgroup is None:
            raise SandboxStartError(f"the sandbox {self.name} has not been started")
        return self._cgroup

    async def start(self) -> None:
        self._resident, (uid, gid, home) = await JailResident.start(
            self.name, self._claim, self.userns, plan=self.plan, timeout=self.spec.setup_timeout
        )
        self._resident.explain = self._why_it_died
        self._resident.on_caller = self.network.callers.come
        self.agent = (uid, gid)
        self.enforced["agent_home"] = home

    def _claim(self) -> Start:
        """Take the lease, then what it names: control groups and an upper."""
        try:
            if self._lease is None:
                host = cgroup_host()
                sockets = self.network.sockets
                job, folders = self.spec.job, host.folders(self.name)
                self._lease = Lease.take(self.lease_folder, self.name, job, folders, sockets)
                self._cgroup = host.create(self.name, self.spec.limits)
            if self._upper is None:
                tmpfs = in_memory(self.spec)
                self._upper = self.store.new_upper(tmpfs=tmpfs, lowers=self.image.rootfs.lowers)
        except SandboxError:
            raise
        except OSError as error:
            raise HostPressureError(
                f"cannot make a sandbox: {error}", fix="free space or processes"
            ) from error
        self.enforced |= {
            **dict.fromkeys(("memory_mb", "cpus", "pids", "storage_mb")),
            **self.cgroup.enforced,
            "network": self.spec.network.mode,
            "model_door": self.network.model_way,
            "users": "range" if self.userns.multiple else "single",
            "base": self.image.base,
            "upper": "tmpfs" if self._upper.tmpfs else "disk",
        }
        shm = min(_SHM_MB, (self.spec.limits.memory_mb or 2 * _SHM_MB) // 2) << 20
        jail = Jail(self.image.rootfs, self._upper, self.network.open, self.binds, shm_bytes=shm)
        return Start(jail, self._cgroup, self._lease.started)

    def _why_it_died(self) -> str:
        if self.cgroup.out_of_memory():
            return f"out of memory (the limit is {self.spec.limits.memory_mb} MB)"
        return ""

    def kill_frozen(self, user: str | None) -> bool:
        """Kill the commands of ``user`` (the agent, a number, or None for all) from the host,
        for when the sandbox is so full of processes that its helper cannot fork. False when
        this host, or that user's name, does not allow it."""
        if not self.cgroup.can_freeze or os.geteuid() != 0:
            return False
        if user is None:
            uid = None
        elif user == self.spec.agent_user or user.isdigit():
            uid = self.agent[0] if user == self.spec.agent_user else int(user)
        else:
            return False
        own = self.resident.own_pids()
        self.cgroup.kill_frozen(lambda pid: pid not in own and uid in (None, real_uid(pid)))
        return True

    async def restack(self) -> LocalImage:
        """Turn the upper into a layer and go on upon it. Nothing may be running inside."""
        self.resident.close()
        image = await self._in_thread(self._freeze)
        await self.start()
        return image

    def _freeze(self) -> LocalImage:
        self.resident.reap()
        assert self._upper is not None
        self.image = self.store.extend(self.image, self.store.freeze(self._upper))
        self._upper = None
        self.plan = {**self.plan, "fresh": False}
        return self.image

    def copy(self, notes: tuple[str, ...]) -> LocalImage:
        """A layer with the present content as an image; the caller holds everything still."""
        assert self._upper is not None
        layer = self.store.copy(self._upper)
        return self.store.extend(self.image, layer, notes=(*self.image.notes, *notes))

    async def remove(self) -> None:
        """Leave nothing behind. Idempotent; a cancellation is raised when it is done."""
        if self._resident is not None:
            self._resident.close()
        await self.network.closing.aclose()
        await self._in_thread(self._remove)

    def _remove(self) -> None:
        if self._resident is not None:
            if self._cgroup is not None:
                self._cgroup.thaw()  # a frozen process does not die
            self._resident.reap()
        if self._upper is not None:
            self.store.discard(self._upper)
        if self._cgroup is not None:
            self._cgroup.remove()
        if self._lease is not None:
            self._lease.release()
        self._resident = self._upper = self._cgroup = self._lease = None

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await finished(asyncio.get_running_loop().run_in_executor(self.threads, work))


def in_memory(spec: SandboxSpec) -> bool:
    """Whether writes stay in memory: little storage is declared and the host has room."""
    storage = spec.limits.storage_mb
    return storage is not None and storage <= TMPFS_STORAGE_MB and memory_room(storage)


def memory_room(megabytes: int) -> bool:
    """Whether the host could hold four times as much in memory."""
    with open("/proc/meminfo") as lines:
        for line in lines:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) >> 10 > 4 * megabytes
    return False
