"""What a container's network policy becomes, and by which way it reaches its model.

A closed container has no network but its own loopback, and so has one with an allowlist: its
proxy, like the model, is a port there that leads to a socket of this host. No network is ever
made for a rollout. The ways, the first that works being taken:

- ``namespace``: we listen in the container's network namespace ourselves. Nothing is mounted,
  nothing runs inside, nobody inside can end it. Needs root on the engine's own host.
- ``socket``: the host's sockets are mounted, and the helper listens and joins.
- ``stream``: the helper listens, and hands everything out over the connection by which it is
  driven. Works with any engine.
- ``bridge``: we listen on the bridge's own address, and the helper leads there. Only for an open
  network, and only when asked for.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

from benchflow.contracts.errors import SandboxStartError, UsageError
from benchflow.contracts.sandbox import DoorWay, SandboxSpec
from benchflow.sandboxes.doors import (
    Callers,
    Door,
    SharedDoors,
    listen_in_namespace,
    may_enter_namespaces,
    to_unix,
)
from benchflow.sandboxes.egress import PROXY_PORT, open_proxy, proxy_env

_PLACE = "/dev/.benchflow/doors"
"""Where sockets are mounted: below /dev, so that no mount point is left in the image."""


@dataclass(slots=True)
class DockerNetwork:
    """``mode`` is the container's NetworkMode; ``env`` and ``binds`` (source, target) go into it
    when it is created. ``open`` comes once it runs, then the helper serves ``doors`` (port,
    target) and hands connections to ``callers``; ``closing`` when it is gone."""

    mode: str
    way: DoorWay
    may_fall_back: bool
    env: dict[str, str] = field(default_factory=dict[str, str])
    binds: list[tuple[Path, str]] = field(default_factory=list[tuple[Path, str]])
    targets: dict[int, Path] = field(default_factory=dict[int, Path])
    doors: list[tuple[int, str]] = field(default_factory=list[tuple[int, str]])
    callers: Callers = field(default_factory=lambda: Callers({}))
    closing: AsyncExitStack = field(default_factory=AsyncExitStack)

    async def open(self, container: str, pid: int, gateway: str, shared: SharedDoors) -> None:
        """Open the ports of a running container as far as that is done from here: its id, its
        first process on this host, the address of this host on its bridge ("" without one).
        Raises ``SandboxStartError``."""
        if self.way == "namespace" and not await self._listen_within(container, pid):
            self.way = "stream"
        if self.way == "stream":
            self.callers = Callers(self.targets)
            self.closing.push_async_callback(self.callers.close)
            self.doors = [(port, "") for port in self.targets]
        elif self.way == "socket":
            self.doors = [(port, f"{_PLACE}/{port}") for port in self.targets]
        elif self.way == "bridge":
            for port, path in self.targets.items():
                shared.open(gateway, port, path)
                self.closing.push_async_callback(shared.close, gateway, port)
            self.doors = [(port, f"{gateway}:{port}") for port in self.targets]

    async def _listen_within(self, container: str, pid: int) -> bool:
        try:
            namespace = _namespace(container, pid)
            try:
                listeners = await listen_in_namespace(namespace, list(self.targets))
            finally:
                os.close(namespace)
        except OSError as error:
            if self.may_fall_back:
                return False
            raise SandboxStartError(
                f"cannot listen in the container's network: {error.strerror or error}",
                fix="leave the choice of the way to the model to us (auto)",
            ) from error
        for listener, path in zip(listeners, self.targets.values(), strict=True):
            self.closing.push_async_callback(Door(listener, to_unix(path)).close)
        return True


async def make_network(spec: SandboxSpec, *, on_this_host: bool) -> DockerNetwork:
    """Open what the policy needs on the host's side; ``closing`` takes it back. ``on_this_host``:
    the engine sees our files and we its processes. Raises ``UsageError`` for a way that is asked
    for and not to be had."""
    door, is_open = spec.model_door, spec.network.mode == "open"
    asked: DoorWay = door.via if door else "auto"
    way = _way(asked, on_this_host=on_this_host, is_open=is_open)
    network = DockerNetwork("bridge" if is_open else "none", way, may_fall_back=asked == "auto")
    try:
        if spec.network.mode == "allowlist":
            network.targets[PROXY_PORT] = await network.closing.enter_async_context(
                open_proxy(spec.network.allowed_hosts)
            )
            network.env |= proxy_env()
        if door is not None:
            network.targets[door.port] = door.socket
    except BaseException:
        await network.closing.aclose()
        raise
    if way == "socket":
        network.binds += [(path, f"{_PLACE}/{port}") for port, path in network.targets.items()]
    return network


def _way(asked: DoorWay, *, on_this_host: bool, is_open: bool) -> DoorWay:
    elsewhere = "" if on_this_host else "the docker engine is on another machine"
    missing: dict[DoorWay, str] = {
        "namespace": elsewhere or ("" if may_enter_namespaces() else "it takes root"),
        "socket": elsewhere,
        "stream": "",
        "bridge": elsewhere or ("" if is_open else "the network is closed"),
    }
    if asked == "auto":
        return next(way for way, why in missing.items() if not why)
    if missing[asked]:
        raise UsageError(
            f"the model cannot be reached by {asked!r}: {missing[asked]}", fix="use auto or stream"
        )
    return asked


def _namespace(container: str, pid: int) -> int:
    """A descriptor of the container's network namespace. Raises ``OSError`` unless the process
    is the container's for certain: behind a forwarded socket the number is another's."""
    namespace = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        if container not in Path(f"/proc/{pid}/cgroup").read_text():
            raise ProcessLookupError(f"process {pid} of this machine is not the container's")
    except BaseException:
        os.close(namespace)
        raise
    return namespace


def same_host(address: str, info: Mapping[str, object]) -> bool:
    """Whether the engine at ``address`` runs on this machine, by what it says of itself (``GET
    /info``): a unix socket may come out of a virtual machine, or from the host of a container."""
    own = os.uname()
    return address.startswith("unix://") and (info.get("Name"), info.get("KernelVersion")) == (
        own.nodename,
        own.release,
    )
