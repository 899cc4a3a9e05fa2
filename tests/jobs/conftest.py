"""Results, job folders and small tasks that really run in the local sandbox."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from benchflow.contracts.records import AttributionRecord, Result, SandboxFacts
from benchflow.jobs.config import EvaluationConfig, RetryConfig
from benchflow.jobs.evaluation import Evaluation, EvaluationResult
from benchflow.jobs.progress import Reporter
from benchflow.kernel.storage import LineWriter, write_json

MakeResult = Callable[..., Result]

TASK = """---
schema_version: "1.3"
agent:
  timeout_sec: 60
verifier:
  timeout_sec: 60
environment:
  network_mode: no-network
benchflow:
  runtime_policy:
    backend: local
    local_base: host
---
Write /app/answer.
"""

SCORE = "cat /app/answer 2>/dev/null || echo 0"


@pytest.fixture
def make_task(tmp_path) -> Callable[..., Path]:
    """``make_task("name")``: oracle scores 1, nop 0. Give ``solve``, ``test`` or ``build``
    (shell lines) to make it behave otherwise."""

    def make(
        name: str = "easy", *, solve: str = "echo 1 > /app/answer", test: str = "", build: str = ""
    ) -> Path:
        task = tmp_path / "tasks" / name
        files = {
            "task.md": TASK,
            "environment/Dockerfile": f"FROM debian:12-slim\nWORKDIR /app\n{build}\n",
            "oracle/solve.sh": f"#!/bin/sh\n{solve}\n",
            "verifier/test.sh": f"#!/bin/sh\n{test or f'({SCORE}) > /logs/verifier/reward.txt'}\n",
        }
        for relative, text in files.items():
            path = task / relative
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            path.chmod(0o755)
        return task

    return make


@pytest.fixture
def evaluate(tmp_path) -> Callable[..., Awaitable[EvaluationResult]]:
    """Run a job with the oracle in the local sandbox, under ``tmp_path/jobs``."""

    async def run(*tasks: Path, reporter: Reporter | None = None, **fields) -> EvaluationResult:
        wanted = {"agent": "oracle", "sandbox": "local", "retry": RetryConfig(min_wait_sec=0)} | fields
        paths = [str(task) for task in tasks] or [str(tmp_path / "tasks")]
        config = EvaluationConfig(**wanted)
        return await Evaluation(paths, tmp_path / "jobs", config, reporter=reporter).run()

    return run


@pytest.fixture
def make_result() -> MakeResult:
    """``make_result("task", 1.0)``: a finished rollout; ``None`` is one without a score."""

    def make(task: str = "hello", reward: float | None = 1.0, **fields) -> Result:
        outcome = "errored" if reward is None else "passed" if reward >= 1 else "failed"
        verdict = "mask" if reward is None else "score"
        defaults = {
            "task_name": task,
            "task_digest": "sha256:0",
            "rollout_name": f"{task}__0000000{fields.get('trial', 1)}",
            "agent": "mini",
            "model": "vllm/m",
            "rewards": None if reward is None else {"reward": reward},
            "outcome": outcome,
            "attribution": AttributionRecord(verdict=verdict, reason="test"),
            "sandbox": SandboxFacts(provider="local"),
            "started_at": "2026-01-01T00:00:00.000+00:00",
            "finished_at": "2026-01-01T00:00:01.000+00:00",
        }
        return Result(**(defaults | fields))

    return make


@pytest.fixture
def write_job_folder() -> Callable[[Path, list[Result]], Path]:
    """Write rollout folders and ``results.jsonl`` as a job leaves them."""

    def write(folder: Path, results: list[Result]) -> Path:
        folder.mkdir(parents=True)
        lines = LineWriter(folder / "results.jsonl")
        for result in results:
            (folder / result.rollout_name).mkdir()
            write_json(folder / result.rollout_name / "result.json", result.model_dump())
            lines.append(result.model_dump())
        lines.close()
        return folder

    return write
