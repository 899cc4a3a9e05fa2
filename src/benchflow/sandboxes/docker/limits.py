"""Which limits an engine can enforce, by what it says of itself (``GET /info``)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchflow.contracts.sandbox import Limits, SandboxCapabilities

_CONTROLS = {"memory_limit": "MemoryLimit", "cpu_limit": "CpuCfsQuota", "pids_limit": "PidsLimit"}
_SIZED_DRIVERS = ("btrfs", "zfs", "devicemapper", "windowsfilter")


class EngineLimits:
    """Before the engine has been asked (an empty ``info``), everything counts as enforced."""

    def __init__(self, info: Mapping[str, Any]) -> None:
        self._can = {flag: info.get(name) is not False for flag, name in _CONTROLS.items()}
        self._cpus = info.get("NCPU")
        driver = str(info.get("Driver", ""))
        backing = dict(info.get("DriverStatus") or ()).get("Backing Filesystem")
        self._storage = driver in _SIZED_DRIVERS or (driver == "overlay2" and backing == "xfs")
        self._why_no_storage = f"{driver or 'its storage driver'} on {backing or 'this disk'} has no quotas"

    def no_storage(self, refusal: str) -> bool:
        """Whether the engine refused a limit of storage; it is asked for no more then."""
        refused = self._storage and ("storage-opt" in refusal or "pquota" in refusal)
        if refused:
            self._storage, self._why_no_storage = False, refusal
        return refused

    def enforced(self, limits: Limits) -> dict[str, object]:
        """What of ``limits`` holds; None for what is not limited. An engine refuses more
        processors than it has."""
        can = self._can
        cpus = limits.cpus and min(limits.cpus, float(self._cpus or limits.cpus))
        return {
            "memory_mb": limits.memory_mb if can["memory_limit"] else None,
            "cpus": cpus if can["cpu_limit"] else None,
            "pids": limits.pids if can["pids_limit"] else None,
            "storage_mb": limits.storage_mb if self._storage else None,
        }

    def capabilities(self) -> SandboxCapabilities:
        why = {
            flag: "the kernel of the docker engine does not support it"
            for flag, can in self._can.items()
            if not can
        }
        if not self._storage:
            why["storage_limit"] = f"the size of the writable layer is not limited: {self._why_no_storage}"
        why["services"] = "one container per sandbox: compose tasks are not run"
        why["gpu"] = "no devices are passed in"
        return SandboxCapabilities(
            snapshot=True,
            fork=True,
            pause=True,
            network_none=True,
            network_allowlist=True,
            network_open=True,
            multiple_users=True,
            storage_limit=self._storage,
            writable_system=True,
            why=why,
            **self._can,
        )
