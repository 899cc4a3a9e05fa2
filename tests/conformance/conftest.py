"""One suite for every sandbox provider, written against the contract alone.

A provider joins by a name in ``PROVIDERS`` and, in ``REMAINS``, a function that lists what
it keeps on the host per sandbox. The image needs sh, coreutils and python3.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from benchflow.contracts.errors import PrerequisiteError
from benchflow.contracts.sandbox import (
    ImageSource,
    Sandbox,
    SandboxImage,
    SandboxProvider,
    SandboxSpec,
)
from benchflow.kernel.ownership import state_dir
from benchflow.kernel.registry import resolve

PROVIDERS = ("local", "docker")

Create = Callable[..., Awaitable[Sandbox]]


def _local_remains() -> set[str]:
    """Uppers, snapshot layers, leases, mounts and control groups of local sandboxes."""
    from benchflow.sandboxes.local.layers import LayerStore, store_root

    store = LayerStore(store_root())
    places = [place for place in (store.root, store.tmpfs_root) if place]
    found = {str(path) for place in places for path in (place / "uppers").iterdir()}
    found |= {str(path) for path in store.lease_folder.glob("*")}
    mounts = Path("/proc/self/mountinfo").read_text()
    found |= {line for line in mounts.splitlines() if str(store.root) in line}
    for root, folders, _ in os.walk("/sys/fs/cgroup"):
        found |= {os.path.join(root, name) for name in folders if LABEL in name}
    return found


LABEL = f"conformance-{os.getpid()}-"
"""Name of this test worker's sandboxes: control groups are shared by all workers of the host."""


def _docker_remains() -> set[str]:
    """Containers and snapshots of this worker."""
    home = f"label=benchflow.home={state_dir()}"
    found: set[str] = set()
    for listing in (["ps", "--all", "--no-trunc"], ["images", "--all", "--no-trunc"]):
        done = subprocess.run(
            ["docker", *listing, "--quiet", "--filter", home], capture_output=True, text=True, check=True
        )
        found |= set(done.stdout.split())
    return found


REMAINS: dict[str, Callable[[], set[str]]] = {"local": _local_remains, "docker": _docker_remains}


@pytest.fixture(scope="session", autouse=True)
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A state folder of its own for the whole suite."""
    place = tmp_path_factory.mktemp("home")
    before = os.environ.get("BENCHFLOW_HOME")
    os.environ["BENCHFLOW_HOME"] = str(place)
    yield place
    from benchflow.sandboxes.local.layers import LayerStore, store_root

    memory = LayerStore(store_root()).tmpfs_root
    if memory is not None:
        shutil.rmtree(memory)
    if before is None:
        del os.environ["BENCHFLOW_HOME"]
    else:
        os.environ["BENCHFLOW_HOME"] = before


@pytest.fixture(params=PROVIDERS)
async def provider(
    request: pytest.FixtureRequest, require: Callable[[object, str], None]
) -> AsyncIterator[SandboxProvider]:
    made: SandboxProvider = resolve("sandboxes", request.param)()
    missing = ""
    try:
        await made.preflight()
    except PrerequisiteError as error:
        missing = str(error)
    require(not missing, f"{request.param}: {missing}")
    yield made
    await made.close()


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> ImageSource:
    """An image without WORKDIR (C64)."""
    context = tmp_path_factory.mktemp("environment")
    dockerfile = context / "Dockerfile"
    dockerfile.write_text("FROM debian:12\nENV FROM_IMAGE=image\nRUN echo built >/etc/built\n")
    return ImageSource("conformance", context, dockerfile, local_base="host")


@pytest.fixture
async def image(provider: SandboxProvider, source: ImageSource) -> SandboxImage:
    return await provider.prepare(source)


@pytest.fixture
async def create(provider: SandboxProvider, image: SandboxImage) -> AsyncIterator[Create]:
    """Make sandboxes from the image, or from ``of``; they are torn down at the end."""
    made: list[Sandbox] = []

    async def create(*, of: SandboxImage | None = None, **spec: object) -> Sandbox:
        sandbox = await provider.create(of or image, SandboxSpec(name=LABEL, **spec))  # type: ignore[arg-type]
        made.append(sandbox)
        return sandbox

    yield create
    for sandbox in made:
        await sandbox.teardown()


@pytest.fixture
async def sandbox(create: Create) -> Sandbox:
    return await create()


@pytest.fixture
def label() -> str:
    return LABEL


@pytest.fixture
def remains(provider: SandboxProvider) -> Callable[[], set[str]]:
    """What the provider keeps on the host right now."""
    return REMAINS[provider.name]


@pytest.fixture
def marker() -> str:
    """A word found in no other process: a length of sleep."""
    return f"9{uuid.uuid4().int % 10**8}.25"


@pytest.fixture
def on_host() -> Callable[[str], list[int]]:
    """Pids of the host's processes with a word in their command line."""

    def find(word: str) -> list[int]:
        found: list[int] = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    line = (entry / "cmdline").read_bytes()
                except OSError:
                    continue
                if word.encode() in line:
                    found.append(int(entry.name))
        return found

    return find


@pytest.fixture
def inside() -> Callable[[Sandbox, str], Awaitable[list[str]]]:
    """Command lines in the sandbox that contain a word, the search's own left out."""
    script = (
        "import os,sys\n"
        "for pid in os.listdir('/proc'):\n"
        "    if pid.isdigit() and int(pid) != os.getpid():\n"
        "        try: line = open(f'/proc/{pid}/cmdline','rb').read()\n"
        "        except OSError: continue\n"
        "        if sys.stdin.read(0) == '' and WORD in line: print(line.replace(b'\\0', b' ').decode())\n"
    )

    async def find(sandbox: Sandbox, word: str) -> list[str]:
        program = script.replace("WORD", f"bytes({list(word.encode())})")
        result = await sandbox.exec(["python3", "-c", program])
        assert result.ok, result.err
        return result.out.splitlines()

    return find


@pytest.fixture
def doomed(
    home: Path, source: ImageSource, provider: SandboxProvider
) -> Iterator[Callable[[str], subprocess.Popen[str]]]:
    """Start a process that makes a sandbox, runs ``sleep WORD`` in it, and waits to be killed."""
    started: list[subprocess.Popen[str]] = []
    program = Path(__file__).with_name("owner_process.py")

    def start(word: str) -> subprocess.Popen[str]:
        request = json.dumps([provider.name, str(source.context), word, LABEL])
        process = subprocess.Popen(
            [sys.executable, str(program), request], stdout=subprocess.PIPE, text=True, env={**os.environ}
        )
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "running\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()
        if process.stdout:
            process.stdout.close()
