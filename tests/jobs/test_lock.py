"""One owner per job folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest

from benchflow.contracts.errors import OwnedElsewhereError
from benchflow.jobs.lock import JobLock, owner_of
from benchflow.kernel.ownership import Owner


def write_owner(folder, owner: Owner) -> None:
    (folder / "owner.lock").write_text(json.dumps(owner.record()))


@pytest.fixture
def someone_alive():
    """A live process that is not us."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    from benchflow.kernel.ownership import process_start

    start = process_start(process.pid)
    assert start is not None
    yield replace(Owner.current(), pid=process.pid, start=start)
    process.communicate()


def test_a_live_owner_is_respected(tmp_path, someone_alive):
    write_owner(tmp_path, someone_alive)
    with pytest.raises(OwnedElsewhereError, match=f"owned by pid {someone_alive.pid}") as raised:
        JobLock(tmp_path).acquire()
    assert raised.value.exit_code == 3
    assert owner_of(tmp_path) == someone_alive


def test_a_dead_owner_is_taken_over(tmp_path):
    dead = replace(Owner.current(), pid=os.getpid(), start=1)
    write_owner(tmp_path, dead)
    lock = JobLock(tmp_path)
    assert lock.acquire() == dead
    assert owner_of(tmp_path) == Owner.current()
    lock.release()
    assert owner_of(tmp_path) is None


def test_an_owner_on_another_host_counts_as_alive(tmp_path):
    write_owner(tmp_path, replace(Owner.current(), pid=1, host="elsewhere"))
    with pytest.raises(OwnedElsewhereError, match="elsewhere"):
        JobLock(tmp_path).acquire()


def test_the_same_process_is_refused_too(tmp_path):
    first = JobLock(tmp_path)
    first.acquire()
    with pytest.raises(OwnedElsewhereError):
        JobLock(tmp_path).acquire()
    first.release()
    second = JobLock(tmp_path)
    assert second.acquire() is None
    second.release()


@pytest.mark.parametrize("content", ["", "{", '{"pid": 1}', "null", "\0\0\0"])
def test_a_lock_cut_by_a_crash_owns_nothing(tmp_path, content):
    (tmp_path / "owner.lock").write_text(content)
    lock = JobLock(tmp_path)
    assert lock.acquire() is None
    lock.release()


def test_of_many_that_race_for_a_dead_owners_job_one_wins(tmp_path):
    write_owner(tmp_path, replace(Owner.current(), start=1))
    program = (
        "import sys\nfrom pathlib import Path\nfrom benchflow.contracts.errors import OwnedElsewhereError\n"
        "from benchflow.jobs.lock import JobLock\nsys.stdin.readline()\n"
        "try:\n    JobLock(Path(sys.argv[1])).acquire(); print('won', flush=True)\n"
        "except OwnedElsewhereError:\n    print('lost', flush=True)\nsys.stdin.readline()\n"
    )
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(tmp_path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(4)
    ]
    for racer in racers:
        racer.stdin.write("go\n")
        racer.stdin.flush()
    said = [racer.stdout.readline().strip() for racer in racers]
    for racer in racers:
        racer.communicate("end\n")
    assert sorted(said) == ["lost", "lost", "lost", "won"]
