"""What the engine is asked for: the whole configuration of one container."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from benchflow.contracts.sandbox import SandboxImage, SandboxSpec
from benchflow.sandboxes import runtime

_HELPER = "/dev/.benchflow/helper"
"""Where the helper is mounted: below /dev, so that no mount point is left in the image."""
_STOP_SIGNAL = "SIGKILL"
"""For ``docker stop``: the helper is process 1, which no other signal ends."""
_SHM_MB = 64
Show = tuple[str, str, str]
"""Something shown read-only: ``bind`` or ``volume``, its source, and its place inside."""


def configuration(
    spec: SandboxSpec,
    image: SandboxImage,
    *,
    labels: Mapping[str, str],
    network: str,
    helper: str,
    shown: Iterable[Show],
    limits: Mapping[str, object],
) -> dict[str, Any]:
    """The body of ``POST /containers/create``: everything a sandbox is, so that one made from a
    snapshot gets it all again. ``helper`` is the volume with its program. The image's
    entrypoint, user and health check are not used."""
    mounts = [
        {"Type": kind, "Source": source, "Target": target, "ReadOnly": True}
        for kind, source, target in [("volume", helper, _HELPER), *shown]
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
        "Entrypoint": _command(),
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


def _command() -> list[str]:
    """What a container runs: the helper, by its own loader."""
    loader = runtime.loader_path()
    _, option, library, python, *rest = runtime.argv("import container; container.main()")
    return [f"{_HELPER}/lib/{loader.name}", option, f"{_HELPER}/{library}", f"{_HELPER}/{python}", *rest]
