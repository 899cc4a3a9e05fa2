"""``bench sandbox``, as a user types it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

OWNER = Path(__file__).parents[1] / "conformance" / "owner_process.py"


@pytest.fixture
def sandbox(
    bench: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> Iterator[Callable[..., str]]:
    """Run ``bench sandbox …`` in a state folder of its own; returns stdout and checks the exit code."""
    home = tmp_path / "home"

    def call(*arguments: object, code: int = 0) -> str:
        done = bench("sandbox", *arguments, env={"BENCHFLOW_HOME": str(home)})
        assert done.returncode == code, done.stderr
        if code:
            assert done.stderr.startswith("error: ")
            assert done.stderr.count("\n") == 1
            return done.stderr
        return done.stdout

    yield call
    from benchflow.sandboxes.local.layers import LayerStore

    memory = LayerStore(home / "local").tmpfs_root
    if memory is not None:
        shutil.rmtree(memory)


@pytest.fixture
def rootfs(tmp_path: Path) -> Path:
    (tmp_path / "rootfs/usr/bin").mkdir(parents=True)
    (tmp_path / "rootfs/usr/bin/tool").write_text("tool")
    return tmp_path / "rootfs"


def test_importing_listing_and_removing_a_base(sandbox: Callable[..., str], rootfs: Path) -> None:
    assert sandbox("image", "list") == "no imported bases\n"
    assert sandbox("image", "import", "debian:12", rootfs).startswith("imported debian:12 (")
    (listed,) = json.loads(sandbox("image", "list", "--json"))
    assert (listed["name"], listed["source"]) == ("debian:12", str(rootfs))
    assert sandbox("image", "list").splitlines()[1].startswith("debian:12 ")
    assert sandbox("image", "remove", "debian:12") == "removed debian:12\n"
    assert json.loads(sandbox("image", "list", "--json")) == []


def test_mistakes_are_one_line(sandbox: Callable[..., str], tmp_path: Path) -> None:
    assert "nothing-here" in sandbox("image", "import", "debian:12", tmp_path / "nothing-here", code=2)
    assert "debian:13" in sandbox("image", "remove", "debian:13", code=2)
    assert "--max-age" in sandbox("cleanup", "--max-age", "soon", code=2)


def test_an_idle_machine_has_nothing_to_list_or_clean(sandbox: Callable[..., str]) -> None:
    assert sandbox("list") == "no sandboxes\n"
    assert json.loads(sandbox("list", "--json")) == []
    assert sandbox("cleanup", "--dry-run") == "nothing to remove\n"
    assert json.loads(sandbox("cleanup", "--json")) == []


def test_cleanup_after_a_killed_run(sandbox: Callable[..., str], tmp_path: Path) -> None:
    context = tmp_path / "environment"
    context.mkdir()
    (context / "Dockerfile").write_text("FROM debian:12\n")
    request = json.dumps(["local", str(context), "98761234.5", "killed-"])
    with subprocess.Popen(
        [sys.executable, str(OWNER), request],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "BENCHFLOW_HOME": str(tmp_path / "home")},
    ) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "running\n"
        (live,) = json.loads(sandbox("list", "--json"))
        assert live["alive"]
        assert sandbox("cleanup") == "nothing to remove\n"
        owner.send_signal(signal.SIGKILL)
        owner.wait()
    assert "(gone)" in sandbox("list")
    assert sandbox("cleanup", "--max-age", "60") == "nothing to remove\n"
    planned = sandbox("cleanup", "--dry-run")
    assert planned.startswith("would remove\n")
    assert live["name"] in planned
    removed = json.loads(sandbox("cleanup", "--json"))
    assert all(item["removed"] for item in removed)
    assert live["name"] in [item["name"] for item in removed]
    assert sandbox("cleanup") == "nothing to remove\n"
    assert sandbox("list") == "no sandboxes\n"
