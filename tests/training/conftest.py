"""Job folders as a job writes them, made from the package's own record types."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from benchflow.contracts.records import (
    AgentResult,
    AttributionRecord,
    Call,
    CallMetadata,
    CallRequest,
    CallResponse,
    PolicyVersion,
    Result,
    SandboxFacts,
    TokenCapture,
    TokenCompletion,
)
from benchflow.kernel.storage import LineWriter, write_json

TOOLS = [{"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}]


def make_call(
    index: int,
    messages: list[dict[str, Any]],
    reply: dict[str, Any] | None,
    *,
    prompt: list[int] | None = None,
    completion: list[int] | None = None,
    logprobs: list[float] | None = None,
    status: int = 200,
    purpose: str = "agent",
    finish: str = "stop",
    node: str = "n1",
    version: str | None = "v1",
    rollout: str = "r",
) -> dict[str, Any]:
    """One line of llm_trajectory.jsonl. Without ``prompt`` the tokens were not returned."""
    if completion is not None and logprobs is None:
        logprobs = [-0.5] * len(completion)
    capture = TokenCapture(
        provider="vllm",
        requested=True,
        prompt_token_ids=prompt,
        completions=[TokenCompletion(index=0, token_ids=completion, logprobs=logprobs)],
        unavailable={} if prompt else {"prompt_token_ids": {"reason": "not_returned", "detail": ""}},
    )
    body = None if reply is None else {"choices": [{"index": 0, "message": reply, "finish_reason": finish}]}
    return Call(
        index=index,
        rollout=rollout,
        node_id=node,
        request=CallRequest(
            ts="2026-01-01T00:00:00Z",
            method="POST",
            path="/v1/chat/completions",
            headers={},
            body={"model": "m", "messages": messages, "tools": TOOLS},
        ),
        response=CallResponse(ts="2026-01-01T00:00:01Z", status_code=status, headers={}, body=body),
        duration_ms=5.0,
        metadata=CallMetadata(
            dialect="chat",
            upstream_dialect="chat",
            purpose=purpose,
            policy_version=version,
            finish_reason=finish,
            token_capture=capture,
        ),
    ).model_dump()


def bash_call(name: str, command: str) -> dict[str, Any]:
    function = {"name": "bash", "arguments": f'{{"command": "{command}"}}'}
    return {"role": "assistant", "content": None, "tool_calls": [
        {"id": name, "type": "function", "function": function}
    ]}  # fmt: skip


def two_calls(rollout: str = "r") -> list[dict[str, Any]]:
    """A conversation of one tool call and an answer; the second prompt extends the first."""
    start = [{"role": "system", "content": "You act."}, {"role": "user", "content": "Fit the data."}]
    act = bash_call("c1", "ls")
    result = {"role": "tool", "tool_call_id": "c1", "content": "counts.csv"}
    return [
        make_call(0, start, act, prompt=[1, 2, 3], completion=[4, 5], rollout=rollout, finish="tool_calls"),
        make_call(
            1,
            [*start, act, result],
            {"role": "assistant", "content": "Done."},
            prompt=[1, 2, 3, 4, 5, 6, 7],
            completion=[8, 9],
            rollout=rollout,
        ),
    ]


@dataclass
class JobFolder:
    """Writes rollouts under ``<root>/trial-NN/<job>/`` (or ``<root>`` itself with trial None)."""

    root: Path
    counter: Any = field(default_factory=lambda: count(1))

    def rollout(
        self,
        reward: float | None = 1.0,
        *,
        trial: int = 1,
        task: str = "half-life",
        agent: str = "mini",
        model: str | None = "scripted/half-life",
        job: str = "job",
        group_id: str | None = "group-1",
        error: str | None = None,
        mask: str | None = None,
        outcome: str | None = None,
        calls: Sequence[dict[str, Any]] | None = None,
        finish: bool = True,
        list_it: bool = True,
        name: str | None = None,
        **changes: Any,
    ) -> Path:
        number = next(self.counter)
        name = name or f"{task}__{number:08x}"
        job_dir = self.root / f"trial-{trial:02d}" / job
        folder = job_dir / name
        (folder / "trajectory").mkdir(parents=True, exist_ok=True)
        (folder / "trainer").mkdir(exist_ok=True)
        shown = {"task_name": task, "task_digest": "sha256:1", "agent": agent, "model": model}
        shown |= {"trial": trial, "group_id": group_id, "job": job}
        write_json(folder / "config.json", {"schema_version": 1, "task_path": f"tasks/{task}", **shown})
        log = LineWriter(folder / "trajectory" / "llm_trajectory.jsonl")
        for call in two_calls(name) if calls is None else calls:
            log.append(call)
        log.close()
        if not finish:
            return folder
        verdict = "mask" if mask or reward is None else "score"
        why = "no reward" if reward is None else "verified"
        how = outcome or ("errored" if reward is None else "passed" if reward >= 1 else "failed")
        result = Result(
            **{
                **shown,
                "rollout_name": name,
                "rewards": None if reward is None else {"reward": reward},
                "outcome": how,
                "attribution": AttributionRecord(verdict=verdict, reason=mask or why),
                "agent_result": AgentResult(n_input_tokens=10, n_output_tokens=4, total_tokens=14),
                "policy_version": PolicyVersion(first="v1", last="v1"),
                "error": error and f"the agent met its {error}",
                "error_category": error,
                "sandbox": SandboxFacts(provider="local"),
                "started_at": "2026-01-01T00:00:00Z",
                "finished_at": f"2026-01-01T00:{number // 60:02d}:{number % 60:02d}Z",
                "n_tool_calls": 1,
                **changes,
            }
        )
        write_json(folder / "result.json", result.model_dump())
        if list_it:
            lines = LineWriter(job_dir / "results.jsonl")
            lines.append(result.model_dump())
            lines.close()
        return folder


@pytest.fixture
def jobs(tmp_path: Path) -> JobFolder:
    return JobFolder(tmp_path / "jobs")


@pytest.fixture
def call() -> Callable[..., dict[str, Any]]:
    return make_call


@pytest.fixture
def conversation_calls() -> Callable[..., list[dict[str, Any]]]:
    return two_calls
