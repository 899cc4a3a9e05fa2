"""What the engine is asked for: the whole configuration of one container."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from benchflow.contracts.sandbox import SandboxImage, SandboxSpec
from benchflow.sandboxes.docker import helper

_STOP_SIGNAL = "SIGKILL"
"""For ``docker stop``: the helper is process 1, which no other signal ends."""
_SHM_MB = 64


def configuration(
    spec: SandboxSpec,
    image: SandboxImage,
    *,
    labels: Mapping[str, str],
    network: str,
    binds: Iterable[tuple[Path, str]],
    volume: str,
    limits: Mapping[str, object],
) -> dict[str, Any]:
    """The body of ``POST /containers/create``: everything a sandbox is, so that one made from a
    snapshot gets it all again. The image's entrypoint, user and health check are not used."""
    mounts = [{"Type": "volume", "Source": volume, "Target": helper.PLACE, "ReadOnly": True}]
    mounts += [
        {"Type": "bind", "Source": str(source), "Target": target, "ReadOnly": True}
        for source, target in binds
    ]
    host: dict[str, Any] = {
        "NetworkMode": network,
        "Mounts": mounts,
        "SecurityOpt": ["no-new-privileges:true"],
        "Privileged": False,
        "LogConfig": {"Type": "none"},
        "RestartPolicy": {"Name": "no"},
        "IpcMode": "private",
    }
    if memory := limits["memory_mb"]:
        host["Memory"] = host["MemorySwap"] = int(str(memory)) << 20
        host["ShmSize"] = min(_SHM_MB, int(str(memory)) // 2) << 20
    if cpus := limits["cpus"]:
        host["NanoCpus"] = int(float(str(cpus)) * 1e9)
    if pids := limits["pids"]:
        host["PidsLimit"] = pids
    if storage := limits["storage_mb"]:
        host["StorageOpt"] = {"size": f"{storage}M"}
    return {
        "Image": image.ref,
        "Hostname": "sandbox",
        "Entrypoint": helper.command(),
        "Cmd": [],
        "User": "0:0",
        "WorkingDir": "/",
        "Healthcheck": {"Test": ["NONE"]},
        "StopSignal": _STOP_SIGNAL,
        "Labels": dict(labels),
        "OpenStdin": True,
        "StdinOnce": True,
        "AttachStdin": True,
        "AttachStdout": True,
        "AttachStderr": True,
        "Tty": False,
        "HostConfig": host,
    }
