"""Signals in every phase: the exit code tells, the records are true, nothing is left (C22, C24)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from benchflow.jobs.load import load_job
from benchflow.kernel.ownership import state_dir
from benchflow.kernel.storage import read_json
from benchflow.sandboxes.local.layers import LayerStore, store_root

HANG = "exec python3 -c 'import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600); \"{mark}\"'"
"""Ignores SIGTERM; the mark makes it known on the host."""

PHASES = ("image", "agent", "verify")


class Running:
    """A ``bench run`` in the background, with its lines as they come."""

    def __init__(self, task: Path, jobs: Path, mark: str, *options: str) -> None:
        self.mark = mark
        self.jobs = jobs
        self.lines: list[str] = []
        argv = ["run", str(task), "-a", "oracle", "--sandbox", "local", "-o", str(jobs), *options]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "benchflow.cli.main", *argv],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def until(self, words: str) -> None:
        """Read its progress until a line holds ``words``."""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line.rstrip())
            if words in line:
                return
        raise AssertionError(f"{words!r} was never said: {self.lines}")

    def until_inside(self) -> None:
        """Wait until the marked process runs in the sandbox."""
        deadline = time.monotonic() + 60
        while not marked(self.mark):
            assert time.monotonic() < deadline and self.process.poll() is None, self.lines
            time.sleep(0.01)

    def send(self, number: int) -> None:
        self.process.send_signal(number)

    def press_ctrl_c(self) -> None:
        """As a terminal does it: to every process of the group, sandboxes included."""
        os.killpg(self.process.pid, signal.SIGINT)

    def ended(self) -> int:
        assert self.process.stderr is not None
        self.lines += [line.rstrip() for line in self.process.stderr]
        self.process.stderr.close()
        return self.process.wait(timeout=60)


def marked(mark: str) -> list[int]:
    """Processes of this host whose command line holds ``mark``."""
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if mark.encode() in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


def leases(mark: str) -> list[str]:
    """Leases of sandboxes of the marked task."""
    return [path.name for path in LayerStore(store_root()).lease_folder.glob("*.json") if mark in path.name]


def mounts(mark: str) -> list[str]:
    return [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if mark in line]


@pytest.fixture
def hang(make_task, tmp_path) -> Iterator[Callable[..., Running]]:
    """Start a run that hangs inside the named phase and return it once it is there."""
    started: list[Running] = []

    def start(phase: str, *options: str) -> Running:
        mark = f"hang-{phase}-{os.getpid()}-{tmp_path.name[-12:].replace('_', '-')}".lower()
        command = HANG.format(mark=mark)
        where = {
            "image": {"build": f"RUN {command}"},
            "agent": {"solve": command},
            "verify": {"test": command},
        }
        task = make_task(mark, **where[phase])
        running = Running(task, tmp_path / "jobs", mark, *options)
        started.append(running)
        running.until(f": {phase}")
        running.until_inside()
        return running

    yield start
    for running in started:
        if running.process.poll() is None:
            running.process.kill()
            running.ended()


@pytest.fixture
def bench() -> Callable[..., int]:
    """``bench …`` to its end; returns the exit code."""

    def call(*argv: str) -> int:
        command = [sys.executable, "-m", "benchflow.cli.main", *argv]
        return subprocess.run(command, capture_output=True, timeout=60).returncode

    return call


def only_job(jobs: Path) -> Path:
    (folder,) = [path.parent for path in jobs.glob("*/job.json")]
    return folder


@pytest.mark.parametrize(
    ("phase", "number", "code"),
    [*((phase, signal.SIGINT, 130) for phase in PHASES), ("agent", signal.SIGTERM, 143)],
)
def test_one_signal_stops_in_good_order(hang, phase, number, code):
    running = hang(phase)
    running.send(number)
    assert running.ended() == code
    assert not marked(running.mark) and not leases(running.mark) and not mounts(running.mark)
    folder = only_job(running.jobs)
    summary = read_json(folder / "summary.json")
    assert (summary["final"], summary["cancelled"], summary["total"]) == (True, 1, 1)
    assert [result.outcome for result in load_job(folder).rollouts] == ["cancelled"]
    assert not (folder / "owner.lock").exists()
    assert any(line.endswith(f"continue with: bench eval resume {folder}") for line in running.lines)


@pytest.mark.parametrize("phase", ["image", "agent"])
def test_ctrl_c_that_reaches_the_sandbox_too_is_still_a_cancellation(hang, phase):
    running = hang(phase)
    running.press_ctrl_c()
    assert running.ended() == 130
    assert not marked(running.mark) and not leases(running.mark)
    assert [result.outcome for result in load_job(running.jobs).rollouts] == ["cancelled"]


@pytest.mark.parametrize("phase", PHASES)
def test_a_killed_run_is_cleaned_up_by_hand(hang, phase, bench):
    """C24"""
    running = hang(phase)
    running.send(signal.SIGKILL)
    running.ended()
    assert bench("sandbox", "cleanup") == 0
    assert not marked(running.mark) and not leases(running.mark) and not mounts(running.mark)
    assert bench("sandbox", "cleanup", "--dry-run") == 0


def test_a_killed_run_is_cleaned_up_by_the_next_command(hang, make_task, tmp_path):
    """C24"""
    running = hang("agent")
    running.send(signal.SIGKILL)
    assert running.ended() == -signal.SIGKILL
    assert not (only_job(running.jobs) / "summary.json").exists()
    next_run = Running(make_task("easy"), tmp_path / "next", "none")
    assert next_run.ended() == 0, next_run.lines
    assert not marked(running.mark) and not leases(running.mark) and not mounts(running.mark)


def test_one_task_in_several_processes_at_the_same_time(make_task, tmp_path):
    """C26: each has a job, a sandbox and a result of its own; the image is built once and right."""
    task = make_task(
        "same", build="RUN sleep 0.5; echo 1 > /etc/built", test="cp /etc/built /logs/verifier/reward.txt"
    )
    runs = [Running(task, tmp_path / "jobs", "none", "--trials", "2") for _ in range(3)]
    assert [run.ended() for run in runs] == [0, 0, 0], [run.lines for run in runs]
    results = [read_json(path) for path in (tmp_path / "jobs").rglob("result.json")]
    assert [result["rewards"] for result in results] == [{"reward": 1.0}] * 6
    assert len({result["rollout_name"] for result in results}) == 6
    assert len(list((tmp_path / "jobs").rglob("job.json"))) == 6


def test_a_killed_run_leaves_the_trajectory_up_to_its_last_event(make_task, tmp_path, bench):
    """C50"""
    script = tmp_path / "script.yaml"
    script.write_text("actions: [{run: echo one}, {stream: {text: tick, every: 0.01}}]")
    options = ("-a", "scripted", "--agent-env", f"BENCHFLOW_SCRIPT={script}")
    running = Running(make_task("easy"), tmp_path / "jobs", "none", *options)
    running.until(": agent")
    deadline = time.monotonic() + 60
    while not any(b"tick" in path.read_bytes() for path in running.jobs.rglob("acp_trajectory.jsonl")):
        assert time.monotonic() < deadline and running.process.poll() is None, running.lines
        time.sleep(0.01)
    running.send(signal.SIGKILL)
    running.ended()
    assert bench("sandbox", "cleanup") == 0
    (path,) = running.jobs.rglob("acp_trajectory.jsonl")
    events = [json.loads(line) for line in path.read_bytes().splitlines()]
    assert [event["seq"] for event in events] == list(range(len(events)))
    assert {"user_message", "tool_call", "agent_message"} <= {event["kind"] for event in events}
    assert not list(running.jobs.rglob("result.json"))


def test_a_killed_job_is_continued_by_the_same_command(hang, make_task):
    running = hang("agent")
    running.send(signal.SIGKILL)
    running.ended()
    again = Running(make_task(running.mark, solve=HANG.format(mark=running.mark)), running.jobs, running.mark)
    again.until("taken over")
    again.until("never finished")
    again.until_inside()
    again.send(signal.SIGINT)
    assert again.ended() == 130


def test_a_second_owner_is_refused(hang):
    running = hang("agent")
    second = Running(running.jobs.parent / "tasks" / running.mark, running.jobs, running.mark)
    assert second.ended() == 3
    (line,) = [line for line in second.lines if line.startswith("error: ")]
    assert f"is owned by pid {running.process.pid}" in line
    running.send(signal.SIGINT)
    assert running.ended() == 130


def test_a_second_signal_says_what_is_left_and_orphans_nothing(hang):
    running = hang("agent")
    running.send(signal.SIGINT)
    running.until("stopping")
    running.send(signal.SIGINT)
    assert running.ended() == 130
    assert not marked(running.mark) and not leases(running.mark)
    assert [result.outcome for result in load_job(running.jobs).rollouts] == ["cancelled"]


def test_an_interrupted_job_ends_the_rest_as_never_started(hang, make_task, tmp_path):
    running = hang("agent", "-j", "1", "--trials", "3")
    running.send(signal.SIGINT)
    assert running.ended() == 130
    summary = read_json(running.jobs / "summary.json")
    assert (summary["cancelled"], summary["total"]) == (3, 3)
    assert summary["error_categories"] == {"cancelled": 1, "never_started": 2}


def test_a_signal_before_anything_started_leaves_no_folder(make_task, tmp_path):
    running = Running(make_task("easy"), tmp_path / "jobs", "none")
    running.send(signal.SIGINT)
    assert running.ended() in (130, -signal.SIGINT)
    assert not list((tmp_path / "jobs").glob("*/*/result.json"))


STUBBORN = """
import asyncio, sys
from benchflow.jobs.interrupts import Interrupts

async def main():
    interrupts = Interrupts(leftovers=lambda: ["hello__1 (agent)"])
    with interrupts.watching():
        print("ready", flush=True)
        try:
            await asyncio.Event().wait()
        finally:
            while True:
                try:
                    await asyncio.Event().wait()
                except asyncio.CancelledError:
                    pass

asyncio.run(main())
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_the_third_signal_leaves_at_once_and_names_what_it_leaves(number, code):
    process = subprocess.Popen(
        [sys.executable, "-c", STUBBORN], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout and process.stderr
    assert process.stdout.readline() == "ready\n"
    said: list[str] = []
    for _ in range(3):
        process.send_signal(number)
        said.append(process.stderr.readline())
    assert process.wait(timeout=30) == code
    assert "stopping" in said[0]
    assert "still being removed: hello__1 (agent)" in said[1]
    assert "left behind: hello__1 (agent)" in said[2] and "bench sandbox cleanup" in said[2]
    process.stdout.close()
    process.stderr.close()


LATE = """
import asyncio, time
from benchflow.jobs.interrupts import Interrupts

async def main():
    interrupts = Interrupts(leftovers=list)
    try:
        with interrupts.watching():
            print("ready", flush=True)
            await asyncio.Event().wait()
    except asyncio.CancelledError:
        print("ended", flush=True)
        time.sleep(600)

asyncio.run(main())
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_after_the_end_keeps_the_exit_code(number, code):
    """C22: the second of two quick ones finds everything torn down already."""
    process = subprocess.Popen([sys.executable, "-c", LATE], stdout=subprocess.PIPE, text=True)
    assert process.stdout
    for said in ("ready\n", "ended\n"):
        assert process.stdout.readline() == said
        process.send_signal(number)
    assert process.wait(timeout=30) == code
    process.stdout.close()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_signal_at_any_moment_leaves_nothing_after_cleanup(make_task, tmp_path, bench, number):
    """Thirty moments spread over a job of eight rollouts: starting, running, verifying, tearing down."""
    task = make_task("swept-away")
    for moment in range(30):
        jobs = tmp_path / f"jobs-{moment}"
        running = Running(task, jobs, "swept-away", "--trials", "8", "-j", "4")
        running.until(": start")
        time.sleep(moment * 0.04)
        running.send(number)
        # -2 is the shell's 130: the job had ended, and its interpreter was on its way out.
        assert running.ended() in ({-9, 0} if number == signal.SIGKILL else {130, 0, -2})
        assert bench("sandbox", "cleanup") == 0
        assert leases("swept-away") == []
        assert mounts(str(state_dir())) == []
        assert list((state_dir() / "local" / "uppers").iterdir()) == []
        for path in jobs.rglob("result.json"):
            record = read_json(path)
            assert record["outcome"] in ("passed", "cancelled"), record
    groups = Path("/sys/fs/cgroup").rglob("swept-away*")
    assert [str(path) for path in groups] == []
