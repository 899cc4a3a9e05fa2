"""Harness time of rollouts, many at once, and questions about many of them.

    python benchmarks/jobs.py [--many 500] [--listed 100000]

1. One oracle rollout of `hello` with its image ready: wall and CPU of the engine's process,
   without the time of the sandbox's own commands.
2. 64 of them: rollouts per second.
3. `--many` concurrent `mini` rollouts of three model calls against the scripted model: none
   lost, and memory that stays flat.
4. `bench eval list` and `metrics` over `--listed` rollouts, with a warm index, as whole processes.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchflow.contracts.records import AttributionRecord, Result, SandboxFacts
from benchflow.jobs.config import EvaluationConfig
from benchflow.jobs.evaluation import Evaluation, EvaluationResult
from benchflow.jobs.foreground import run_async
from benchflow.jobs.progress import Reporter
from benchflow.jobs.views import list_records
from benchflow.kernel.storage import LineWriter, write_json

ROOT = Path(__file__).parents[1]
HELLO = ROOT / "examples" / "tasks" / "hello"

POLICY = """\
model: three-calls
turns:
  - {say: First., run: "true"}
  - {say: Second., run: "echo 'Hello, world!' > /app/hello.txt"}
  - {say: Done.}
"""

missed: list[str] = []


def line(name: str, value: str, budget: str, ok: bool) -> None:
    print(f"{name:44} {value:>22}   budget {budget:18} {'ok' if ok else 'MISSED'}", flush=True)
    if not ok:
        missed.append(name)


async def job(folder: Path, reporter: Reporter | None = None, **fields) -> EvaluationResult:
    config = EvaluationConfig(**({"agent": "oracle", "sandbox": "local", "new": True} | fields))
    return await Evaluation(HELLO, folder, config, reporter=reporter).run()


def cpu() -> float:
    return (
        resource.getrusage(resource.RUSAGE_SELF).ru_utime + resource.getrusage(resource.RUSAGE_SELF).ru_stime
    )


def rss_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


async def one_rollout(folder: Path) -> None:
    await job(folder)  # image, byte code and page cache are ready
    walls, cpus = [], []
    for _ in range(9):
        begin, used = time.perf_counter(), cpu()
        ended = await job(folder)
        cpus.append(1000 * (cpu() - used))
        walls.append(1000 * (time.perf_counter() - begin))
        assert ended.passed == 1
    wall, used = statistics.median(walls), statistics.median(cpus)
    line("one oracle rollout, whole job: wall", f"{wall:.0f} ms", "<= 150 ms", wall <= 150)
    line("one oracle rollout, whole job: CPU of ours", f"{used:.0f} ms", "<= 60 ms", used <= 60)


async def sixty_four(folder: Path) -> None:
    begin = time.perf_counter()
    ended = await job(folder, trials=64, concurrency=8)
    rate = 64 / (time.perf_counter() - begin)
    assert ended.passed == 64
    line("64 oracle rollouts, -j 8", f"{rate:.1f} rollouts/s", ">= 20 rollouts/s", rate >= 20)


class Memory(Reporter):
    """Resident memory after each tenth of the rollouts."""

    def __init__(self, every: int) -> None:
        self.samples: list[float] = []
        self._every = every
        self._done = 0

    def finished(self, job, planned, result) -> None:
        self._done += 1
        if self._done % self._every == 0:
            self.samples.append(rss_mb())


async def many(folder: Path, count: int, rounds: int = 3) -> None:
    policy = folder / "policy.yaml"
    policy.write_text(POLICY)
    peaks: list[float] = []
    for number in range(rounds):
        memory = Memory(max(1, count // 10))
        begin = time.perf_counter()
        ended = await job(
            folder / f"round-{number}",
            memory,
            agent="mini",
            model=f"scripted/{policy}",
            trials=count,
            concurrency=count,
            max_retries=0,
            agent_timeout=0,
        )
        took = time.perf_counter() - begin
        calls = sum((result.agent_result.usage_details or {}).get("calls", 0) for result in ended.rollouts)
        lost = count - ended.passed
        peaks.append(max(memory.samples))
        name = f"{count} concurrent mini rollouts, round {number + 1}"
        line(name, f"{lost} lost, {calls} calls", "0 lost, 3 calls each", lost == 0 and calls == 3 * count)
        print(f"  {took:.1f} s, resident MB by tenths: {' '.join(f'{s:.0f}' for s in memory.samples)}")
    grown = peaks[-1] - peaks[1]
    line("memory, last round over the second", f"{grown:+.1f} MB", "<= 10 % growth", grown <= 0.1 * peaks[1])


def listed(folder: Path, count: int) -> None:
    per_job = 1000
    for number in range(max(1, count // per_job)):
        job_folder = folder / f"job-{number:04d}"
        job_folder.mkdir(parents=True)
        write_json(
            job_folder / "job.json", {"schema_version": 1, "agent": "mini", "rollouts": []}, sync=False
        )
        lines = LineWriter(job_folder / "results.jsonl")
        for index in range(per_job):
            lines.append(_result(number, index).model_dump())
        lines.close()
    begin = time.perf_counter()
    list_records(folder)
    print(f"  reading {count} rollouts into the index: {time.perf_counter() - begin:.1f} s, once")
    for name in ("list", "metrics"):
        command = [sys.executable, "-m", "benchflow.cli.main", "eval", name, str(folder)]
        took = statistics.median(whole_process(command) for _ in range(5))
        line(f"bench eval {name} over {count} rollouts, warm", f"{took:.2f} s", "<= 1 s", took <= 1)


def whole_process(command: list[str]) -> float:
    """Seconds from its start to its end."""
    begin = time.perf_counter()
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - begin


def _result(number: int, index: int) -> Result:
    reward = (index % 3) / 2
    return Result(
        task_name=f"task-{index % 100}",
        task_digest="sha256:0",
        rollout_name=f"task-{index % 100}__{index:08x}",
        agent="mini",
        model="vllm/m",
        rewards={"reward": reward},
        outcome="passed" if reward == 1 else "failed",
        attribution=AttributionRecord(verdict="score", reason="verified"),
        sandbox=SandboxFacts(provider="local"),
        started_at="2026-01-01T00:00:00+00:00",
        finished_at="2026-01-01T00:00:01+00:00",
        job=f"job-{number}",
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--many", type=int, default=500)
    parser.add_argument("--listed", type=int, default=100_000)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="benchflow-bench-") as temporary:
        folder = Path(temporary)

        async def live() -> None:
            await one_rollout(folder / "one")
            await sixty_four(folder / "sixty-four")
            await asyncio.to_thread((folder / "many").mkdir)
            await many(folder / "many", asked.many)

        run_async(live)
        listed(folder / "listed", asked.listed)
    print("missed: " + ", ".join(missed) if missed else "every budget is met")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
