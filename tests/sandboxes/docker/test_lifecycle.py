"""What is ours and what is not: interrupts, dead owners, neighbours, an engine that restarts."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from benchflow.contracts.sandbox import SandboxImage, SandboxSpec
from benchflow.sandboxes.docker.engine import EngineError
from benchflow.sandboxes.docker.provider import DockerProvider

BASE = "debian:bookworm-slim"
OVERRIDE = ("--base-image-override", f"debian:12-slim={BASE}")
HELLO = Path(__file__).parents[3] / "examples" / "tasks" / "hello"

Listed = Callable[[], Awaitable[set[str]]]
Bench = Callable[..., "subprocess.Popen[str]"]


async def settled(provider: DockerProvider, listed: Listed) -> set[str]:
    """What is left after reaping. What the engine was asked for before its owner died may still
    come into being, so reap until two looks in a row agree."""
    before: set[str] | None = None
    while True:
        await provider.reap()
        await asyncio.sleep(0.3)  # a request that was under way
        now = await listed()
        if now == before:
            return now
        before = now


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
@pytest.mark.parametrize("after", [0.0, 0.02, 0.06, 0.15, 0.4])
async def test_an_end_at_any_moment_of_a_start_leaves_nothing(
    provider: DockerProvider, image: SandboxImage, listed: Listed, number: int, after: float
) -> None:
    """C24: while the container is created, started and set up."""
    before = await listed()
    program = str(Path(__file__).with_name("owner.py"))
    owner = subprocess.Popen(
        [sys.executable, program, BASE, "doomed", "100"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert owner.stdout is not None
    assert await asyncio.to_thread(owner.stdout.readline) == b"ready\n"
    await asyncio.sleep(after)  # chooses the moment
    owner.send_signal(number)
    await asyncio.to_thread(owner.wait, 60)
    owner.stdout.close()
    if number == signal.SIGINT:
        assert await listed() == before, "an interrupted owner cleans up itself"
    assert await settled(provider, listed) == before


async def test_what_is_not_ours_stays(provider: DockerProvider, image: SandboxImage) -> None:
    """Foreign containers, networks, volumes and images; also a look-alike, and another home's."""
    engine = provider.engine
    dead = {"pid": 999999999, "start": 1, "boot": "x", "host": os.uname().nodename}
    look_alikes: list[dict[str, str]] = [
        {},
        {"benchflow.kind": "sandbox"},
        {"benchflow.kind": "sandbox", "benchflow.home": os.environ["BENCHFLOW_HOME"]},
        {"benchflow.kind": "sandbox", "benchflow.home": "/other", "benchflow.owner": json.dumps(dead)},
    ]
    made = [
        (
            await engine.json(
                "POST",
                "containers/create",
                body={"Image": image.ref, "Cmd": ["sleep", "9"], "Labels": labels},
            )
        )["Id"]
        for labels in look_alikes
    ]
    network = (await engine.json("POST", "networks/create", body={"Name": f"foreign-{os.getpid()}"}))["Id"]
    volume = (await engine.json("POST", "volumes/create", body={"Name": f"foreign-{os.getpid()}"}))["Name"]
    try:
        sandbox = await provider.create(image, SandboxSpec("test"))
        await sandbox.teardown()
        assert await provider.reap() == []
        for path in (
            *(f"containers/{item}/json" for item in made),
            f"networks/{network}",
            f"volumes/{volume}",
        ):
            await engine.json("GET", path)
        await engine.json("GET", f"images/{BASE}/json")
    finally:
        for item in made:
            await engine.json("DELETE", f"containers/{item}", params={"force": True})
        await engine.json("DELETE", f"networks/{network}")
        await engine.json("DELETE", f"volumes/{volume}")


async def test_no_network_is_made_and_a_look_alike_of_a_dead_owner_is_reaped(
    provider: DockerProvider, image: SandboxImage
) -> None:
    engine = provider.engine

    async def networks() -> set[str]:
        """Without those of another worker's test."""
        found = await engine.json("GET", "networks")
        return {item["Name"] for item in found if not item["Name"].startswith("foreign-")}

    before = await networks()
    sandbox = await provider.create(image, SandboxSpec("test"))
    assert await networks() == before
    await sandbox.teardown()
    dead = json.dumps({"pid": 999999999, "start": 1, "boot": "x", "host": os.uname().nodename})
    labels = {
        "benchflow.kind": "sandbox",
        "benchflow.home": os.environ["BENCHFLOW_HOME"],
        "benchflow.owner": dead,
    }
    body = {"Image": image.ref, "Cmd": ["sleep", "9"], "Labels": labels}
    made = (await engine.json("POST", "containers/create", body=body))["Id"]
    (reaped,) = await provider.reap()
    assert reaped.removed and reaped.kind == "sandbox"
    with pytest.raises(EngineError):
        await engine.json("GET", f"containers/{made}/json")


async def test_two_jobs_at_once_do_not_meet(
    provider: DockerProvider, bench: Bench, listed: Listed, tmp_path: Path
) -> None:
    """No ``docker`` program is on their path, so none is started either."""
    before = await listed()
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("env", "sh"):
        (folder / name).symlink_to(shutil.which(name) or "/bin/sh")
    run = ("run", str(HELLO), "-a", "oracle", "--sandbox", "docker", "--trials", "2", *OVERRIDE)
    jobs = [bench(*run, "-o", str(tmp_path / name), PATH=str(folder)) for name in ("one", "two")]
    for job in jobs:
        said, _ = await asyncio.to_thread(job.communicate, timeout=120)
        assert job.returncode == 0, said
        assert "passed 2" in said
    assert await listed() == before


@pytest.fixture
def second_engine(require: Callable[[object, str], None], tmp_path: Path) -> Iterator[Callable[[], str]]:
    """Start, or restart, an engine of the test's own, with the base image in it."""
    require(os.geteuid() == 0 and shutil.which("dockerd"), "an engine of its own needs root and dockerd")
    place = Path(f"/tmp/benchflow-engine-{os.getpid()}")
    host = f"unix://{place}/sock"
    running: list[subprocess.Popen[bytes]] = []
    env = {**os.environ, "DOCKER_HOST": host}

    def stop() -> None:
        while running:
            running[-1].send_signal(signal.SIGTERM)
            running.pop().wait(60)

    def start() -> str:
        stop()
        place.mkdir(exist_ok=True)
        roots = ["--data-root", f"{place}/data", "--exec-root", f"{place}/exec"]
        apart = ["--bridge=none", "--iptables=false", "--pidfile", f"{place}/pid"]
        with (place / "log").open("ab") as log:
            argv = ["unshare", "--net", "dockerd", "--host", host, *roots, *apart]  # docker0 is another's
            running.append(subprocess.Popen(argv, stderr=log))
        deadline = time.monotonic() + 60
        while subprocess.run(["docker", "version"], env=env, capture_output=True).returncode:
            assert time.monotonic() < deadline and running[-1].poll() is None, (place / "log").read_text()
            time.sleep(0.1)
        if subprocess.run(["docker", "image", "inspect", BASE], env=env, capture_output=True).returncode:
            with subprocess.Popen(["docker", "save", BASE], stdout=subprocess.PIPE) as saved:
                subprocess.run(["docker", "load", "--quiet"], stdin=saved.stdout, env=env, check=True)
        return host

    yield start
    stop()
    shutil.rmtree(place, ignore_errors=True)


@pytest.mark.slow
async def test_a_job_lives_through_a_restart_of_the_engine(
    second_engine: Callable[[], str], bench: Bench, tmp_path: Path
) -> None:
    """The rollout that was under way is masked and run again; nothing is lost or left."""
    task = tmp_path / "slow"
    shutil.copytree(HELLO, task)
    mark = f"{os.getpid() + 70000}.5"
    solve = next(path for path in task.rglob("solve.sh"))
    solve.write_text(f"{solve.read_text().rstrip()}\nsleep {mark}\n")
    host = second_engine()
    jobs = tmp_path / "jobs"
    run = ("run", str(task), "-a", "oracle", "--sandbox", "docker", "--max-retries", "3", "-o", str(jobs))
    job = bench(*run, *OVERRIDE, DOCKER_HOST=host)
    while not any(mark.encode() in line for line in _command_lines()):
        assert job.poll() is None, job.communicate()[0]
        await asyncio.sleep(0.05)
    solve.write_text(solve.read_text().replace(f"sleep {mark}", "true"))
    await asyncio.to_thread(second_engine)
    said, _ = await asyncio.to_thread(job.communicate, timeout=180)
    assert job.returncode == 0, said
    assert "passed 1" in said
    assert "sandbox_lost" in said, said
    results = [json.loads(path.read_text()) for path in jobs.rglob("result.json")]
    assert [item["rewards"]["reward"] for item in results if item.get("rewards")] != []
    env = {**os.environ, "DOCKER_HOST": host}
    left = subprocess.run(["docker", "ps", "-aq"], env=env, capture_output=True, text=True, check=True)
    assert left.stdout == ""


def _command_lines() -> list[bytes]:
    found: list[bytes] = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                found.append((entry / "cmdline").read_bytes())
            except OSError:
                continue
    return found
