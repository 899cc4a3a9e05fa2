"""One command in a throw-away sandbox: how a Dockerfile's RUN is carried out."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from benchflow.contracts.sandbox import ExecResult, Limits
from benchflow.sandboxes.commands import Commands, Request
from benchflow.sandboxes.local.bwrap import Jail
from benchflow.sandboxes.local.cgroups import cgroup_host
from benchflow.sandboxes.local.layers import LayerStore, Rootfs, Upper, store_root
from benchflow.sandboxes.local.leases import Lease
from benchflow.sandboxes.local.network import lent_files
from benchflow.sandboxes.local.resident import JailResident, Start
from benchflow.sandboxes.local.userns import user_namespace

_START_TIMEOUT = 120.0
_OUTPUT_KEPT = 1 << 18


async def run_once(
    rootfs: Rootfs,
    upper: Upper,
    argv: Sequence[str],
    *,
    env: Mapping[str, str],
    cwd: str,
    user: str | None,
    extra_ro_binds: Sequence[tuple[Path, str]] = (),
    timeout: float | None = None,
    on_output: Callable[[bytes], None] = lambda data: None,
) -> ExecResult:
    """Run ``argv`` on ``rootfs`` with the host's network, its writes landing in ``upper``, and
    remove everything but the upper. Output goes to ``on_output`` as it comes; the result
    keeps a bounded part."""
    name = f"run-{uuid.uuid4().hex[:12]}"
    binds = (*extra_ro_binds, *lent_files(rootfs, resolver=True))
    jail = Jail(rootfs, upper, open_network=True, binds=binds)
    host = cgroup_host()
    lease = Lease.take(LayerStore(store_root()).lease_folder, name, "", host.folders(name), [])
    cgroup = host.create(name, Limits())
    resident: JailResident | None = None
    try:
        resident, _ = await JailResident.start(
            name, lambda: Start(jail, cgroup, lease.started), user_namespace(), timeout=_START_TIMEOUT
        )
        commands = Commands(resident)
        request = Request([os.fspath(part) for part in argv], cwd, user, high=env)
        try:
            return await commands.run(request, timeout=timeout, limit=_OUTPUT_KEPT, on_output=on_output)
        finally:
            commands.close()
    finally:
        if resident is not None:
            await resident.stop()
        cgroup.remove()
        lease.release()
