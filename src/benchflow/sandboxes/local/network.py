"""What a sandbox's network policy becomes: doors, proxy variables, and files lent."""

from __future__ import annotations

import os
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

from benchflow.contracts.errors import UsageError
from benchflow.contracts.sandbox import ModelDoor, SandboxSpec
from benchflow.sandboxes.doors import Callers, SharedDoors
from benchflow.sandboxes.egress import PROXY_PORT, open_proxy, proxy_env
from benchflow.sandboxes.local.bwrap import DOORS
from benchflow.sandboxes.local.layers import Rootfs
from benchflow.sandboxes.local.merge import View

_BUNDLES = (
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/cert.pem",
)


@dataclass(slots=True)
class Network:
    """``doors`` are ``(port, socket path inside)`` for the helper to serve; it hands out the
    connections of those without a path to ``callers``. ``sockets`` are files of the host to
    remove afterwards."""

    open: bool
    binds: list[tuple[Path, str]] = field(default_factory=list[tuple[Path, str]])
    doors: list[tuple[int, str]] = field(default_factory=list[tuple[int, str]])
    callers: Callers = field(default_factory=lambda: Callers({}))
    model_way: str | None = None
    env: dict[str, str] = field(default_factory=dict[str, str])
    sockets: list[Path] = field(default_factory=list[Path])
    closing: AsyncExitStack = field(default_factory=AsyncExitStack)


async def make_network(spec: SandboxSpec, rootfs: Rootfs, shared: SharedDoors) -> Network:
    """Open what the policy needs on the host's side. ``Network.closing`` takes it back."""
    network = Network(spec.network.mode == "open")
    try:
        if network.open:
            network.binds += lent_files(rootfs, resolver=True)
        if spec.network.mode == "allowlist":
            path = await network.closing.enter_async_context(open_proxy(spec.network.allowed_hosts))
            network.sockets += [path, path.parent]
            network.binds += lent_files(rootfs, resolver=False)
            network.env |= proxy_env()
            _add_door(network, PROXY_PORT, path, "proxy")
        if spec.model_door is not None:
            _add_model(network, spec.model_door, shared)
    except BaseException:
        await network.closing.aclose()
        raise
    return network


def _add_model(network: Network, door: ModelDoor, shared: SharedDoors) -> None:
    network.model_way = way(door, network.open)
    if network.model_way == "bridge":
        shared.open("127.0.0.1", door.port, door.socket)
        network.closing.push_async_callback(shared.close, "127.0.0.1", door.port)
    elif network.model_way == "stream":
        network.callers = Callers({door.port: door.socket})
        network.closing.push_async_callback(network.callers.close)
        network.doors.append((door.port, ""))
    else:
        _add_door(network, door.port, door.socket, "model")


def _add_door(network: Network, port: int, path: Path, name: str) -> None:
    network.binds.append((path, f"{DOORS}/{name}"))
    network.doors.append((port, f"{DOORS}/{name}"))


def way(door: ModelDoor, shares_host: bool) -> str:
    """The helper serves a closed sandbox's doors; an open one has the host's own loopback."""
    fits = ("bridge",) if shares_host else ("socket", "stream")
    if door.via not in ("auto", *fits):
        network = "open" if shares_host else "closed"
        raise UsageError(
            f"a local sandbox with {network} network does not reach its model by {door.via!r}",
            fix=f"use auto or {' or '.join(fits)}",
        )
    return fits[0] if door.via == "auto" else door.via


def lent_files(rootfs: Rootfs, *, resolver: bool) -> list[tuple[Path, str]]:
    """The machine's resolver settings, and its certificates when the image has none, as
    read-only binds: nothing of them enters a layer."""
    view = View(rootfs.lowers, rootfs.binds)
    lent: list[tuple[Path, str]] = []
    if resolver and os.path.exists("/etc/resolv.conf"):
        lent.append((Path("/etc/resolv.conf").resolve(), view.resolve("/etc/resolv.conf")))
    if all(view.find(view.resolve(place)) is None for place in _BUNDLES):
        bundle = next((place for place in _BUNDLES if os.path.exists(place)), None)
        if bundle is not None:
            lent.append((Path(bundle).resolve(), view.resolve(_BUNDLES[0])))
    return lent
