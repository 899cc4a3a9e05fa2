"""What a sandbox's network policy becomes: doors, proxy variables, and files lent."""

from __future__ import annotations

import os
import shutil
import tempfile
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

from benchflow.contracts.sandbox import SandboxSpec
from benchflow.sandboxes.local.bwrap import DOORS
from benchflow.sandboxes.local.doors import HostDoors
from benchflow.sandboxes.local.egress import EgressProxy
from benchflow.sandboxes.local.layers import Rootfs
from benchflow.sandboxes.local.merge import View

PROXY_PORT = 3128
_BUNDLES = (
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/cert.pem",
)


@dataclass(slots=True)
class Network:
    """``doors`` are ``(port, socket path inside)`` for the helper to serve; ``sockets`` are
    files of the host to remove afterwards."""

    open: bool
    binds: list[tuple[Path, str]] = field(default_factory=list[tuple[Path, str]])
    doors: list[tuple[int, str]] = field(default_factory=list[tuple[int, str]])
    env: dict[str, str] = field(default_factory=dict[str, str])
    sockets: list[Path] = field(default_factory=list[Path])
    closing: AsyncExitStack = field(default_factory=AsyncExitStack)


async def make_network(spec: SandboxSpec, rootfs: Rootfs, host_doors: HostDoors) -> Network:
    """Open what the policy needs on the host's side. ``Network.closing`` takes it back."""
    network = Network(spec.network.mode == "open")
    try:
        if network.open:
            network.binds += lent_files(rootfs, resolver=True)
        if spec.network.mode == "allowlist":
            await _add_proxy(network, spec, rootfs)
        if spec.model_door is not None:
            await _add_model(network, spec.model_door.port, spec.model_door.socket, host_doors)
    except BaseException:
        await network.closing.aclose()
        raise
    return network


async def _add_model(network: Network, port: int, path: Path, host_doors: HostDoors) -> None:
    if network.open:
        await host_doors.open(port, path)
        network.closing.push_async_callback(host_doors.close, port)
        return
    network.binds.append((path, f"{DOORS}/model"))
    network.doors.append((port, f"{DOORS}/model"))


async def _add_proxy(network: Network, spec: SandboxSpec, rootfs: Rootfs) -> None:
    folder = Path(tempfile.mkdtemp(prefix="benchflow-egress-"))  # short: socket paths are limited
    network.closing.callback(shutil.rmtree, folder, True)
    path = folder / "proxy"
    proxy = EgressProxy(spec.network.allowed_hosts)
    await proxy.start(path)
    network.closing.push_async_callback(proxy.close)
    network.sockets += [path, folder]
    network.binds += [(path, f"{DOORS}/proxy"), *lent_files(rootfs, resolver=False)]
    network.doors.append((PROXY_PORT, f"{DOORS}/proxy"))
    url = f"http://127.0.0.1:{PROXY_PORT}"
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        network.env[name] = url
    network.env["no_proxy"] = network.env["NO_PROXY"] = "127.0.0.1,localhost"


def lent_files(rootfs: Rootfs, *, resolver: bool) -> list[tuple[Path, str]]:
    """The machine's resolver settings, and its certificates when the image has none, as
    read-only binds: nothing of them enters a layer."""
    view = View(rootfs.lowers, rootfs.binds.ro)
    lent: list[tuple[Path, str]] = []
    if resolver and os.path.exists("/etc/resolv.conf"):
        lent.append((Path("/etc/resolv.conf").resolve(), view.resolve("/etc/resolv.conf")))
    if all(view.find(view.resolve(place)) is None for place in _BUNDLES):
        bundle = next((place for place in _BUNDLES if os.path.exists(place)), None)
        if bundle is not None:
            lent.append((Path(bundle).resolve(), view.resolve(_BUNDLES[0])))
    return lent
