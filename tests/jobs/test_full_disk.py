"""A full disk: what was finished stays whole, nothing half-written looks finished, exit 1."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchflow.contracts.errors import HostPressureError
from benchflow.jobs.load import load_job
from benchflow.sandboxes.runtime import runtime_dir

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small tmpfs needs root"),
]


@pytest.fixture
def small_disk(tmp_path) -> Iterator[Path]:
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=400k", "none", folder], check=False)
    if mounted.returncode:
        pytest.skip("this host does not let root mount a tmpfs")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def test_the_job_ends_with_what_it_has(make_task, small_disk):
    make = [sys.executable, "-m", "benchflow.cli.main", "run", str(make_task("easy"))]
    options = ["-a", "oracle", "--sandbox", "local", "-j", "2", "--max-retries", "0", "--trials", "40"]
    done = subprocess.run(
        [*make, *options, "-o", str(small_disk / "jobs")], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 1, done.stderr
    assert "disk full" in done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    finished = [json.loads(path.read_bytes()) for path in small_disk.rglob("result.json")]
    assert finished and len(finished) < 40
    scored = [result for result in finished if result["outcome"] == "passed"]
    assert scored
    assert all(result["rewards"] == {"reward": 1.0} for result in scored)
    assert not [path for path in small_disk.rglob(".result.json*")]
    assert sum(reward == 1.0 for reward in load_job(small_disk / "jobs").rewards) == len(scored)


def test_a_state_folder_without_room_stops_a_run_before_it_begins(make_task, small_disk, tmp_path):
    make = [sys.executable, "-m", "benchflow.cli.main", "run", str(make_task("easy"))]
    options = ["-a", "oracle", "--sandbox", "local", "-o", str(tmp_path / "jobs")]
    env = {**os.environ, "BENCHFLOW_HOME": str(small_disk / "home")}
    done = subprocess.run([*make, *options], capture_output=True, text=True, timeout=120, env=env)
    assert done.returncode == 3 and not (tmp_path / "jobs").exists()
    error = done.stderr.splitlines()[-1]
    assert error.startswith(f"error: the disk of {small_disk}") and "BENCHFLOW_HOME" in error


def test_a_state_folder_without_room_for_the_helper_is_named(small_disk, monkeypatch):
    monkeypatch.setenv("BENCHFLOW_HOME", str(small_disk / "home"))
    with pytest.raises(HostPressureError, match=f"{small_disk}.*No space left on device") as caught:
        runtime_dir()
    assert "BENCHFLOW_HOME" in (caught.value.fix or "")
    assert list((small_disk / "home" / "runtime").iterdir()) == []
