"""Results and job folders for tests about reading, counting and continuing jobs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from benchflow.contracts.records import AttributionRecord, Result, SandboxFacts
from benchflow.kernel.storage import LineWriter, write_json

MakeResult = Callable[..., Result]


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
