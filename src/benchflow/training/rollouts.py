"""Reading one rollout: who ran what, how it ended, and what a trainer may count."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchflow.contracts.records import RESULT_VERSION, check_version
from benchflow.gateway.calls import load_calls
from benchflow.training.calls import succeeded
from benchflow.training.discover import Found, planned, read_dict

UNFINISHED = "result missing"
CUT = "result cut short"
FOREIGN = "result not of a rollout"


@dataclass(slots=True)
class RolloutRecord:
    """``result`` is the content of ``result.json``; it is empty, and ``problem`` says why,
    when that file is missing or cut. Identity then comes from ``config.json``, the job's plan or
    the name."""

    path: str
    job_dir: str
    result: dict[str, Any] = field(default_factory=dict[str, Any])
    config: dict[str, Any] = field(default_factory=dict[str, Any])
    problem: str | None = None

    @property
    def name(self) -> str:
        return os.path.basename(self.path)

    @property
    def task(self) -> str:
        return self._identity("task_name") or self.name.rpartition("__")[0] or self.name

    @property
    def task_digest(self) -> str | None:
        return self._identity("task_digest")

    @property
    def agent(self) -> str | None:
        return self._identity("agent")

    @property
    def model(self) -> str | None:
        return self._identity("model")

    @property
    def job(self) -> str:
        return self._identity("job") or os.path.basename(self.job_dir)

    @property
    def trial(self) -> int:
        trial = self._identity("trial")
        return trial if isinstance(trial, int) else 1

    @property
    def group_id(self) -> str | None:
        return self._identity("group_id")

    @property
    def branch(self) -> str | None:
        """``<fork>`` of a branch child at ``<rollout>/branches/<fork>/<label>``."""
        head, fork = os.path.split(os.path.dirname(os.path.abspath(self.path)))
        return fork if os.path.basename(head) == "branches" else None

    @property
    def policy_version(self) -> dict[str, str | None]:
        version = self.result.get("policy_version") or {}
        return {"first": version.get("first"), "last": version.get("last")}

    @property
    def outcome(self) -> str:
        """As recorded; a result made elsewhere may only have rewards."""
        recorded = self.result.get("outcome")
        if recorded:
            return recorded
        return "unscored" if self.reward is None else "passed" if self.reward >= 1 else "failed"

    @property
    def reward(self) -> float | None:
        """What the verifier said; None when it said nothing."""
        return number((self.result.get("rewards") or {}).get("reward"))

    @property
    def masked(self) -> bool:
        return (self.result.get("attribution") or {}).get("verdict") == "mask"

    @property
    def score(self) -> float | None:
        """The reward when a trainer may count it."""
        return None if self.masked or self.outcome == "cancelled" else self.reward

    @property
    def error(self) -> str | None:
        """Category of what ended the rollout early; the message when it has no category."""
        return self.result.get("error_category") or self.result.get("error")

    @property
    def finished_at(self) -> str:
        return self.result.get("finished_at") or ""

    @property
    def calls_path(self) -> Path:
        return Path(self.path, "trajectory", "llm_trajectory.jsonl")

    def _identity(self, name: str) -> Any:
        value = self.result.get(name)
        return self.config.get(name) if value is None else value


def read_rollout(found: Found) -> RolloutRecord:
    """Read ``result.json``. A newer schema than ours raises ``UsageError``."""
    rollout = RolloutRecord(found.path, found.job_dir)
    path = os.path.join(found.path, "result.json")
    record = read_dict(path)
    if record is not None and ("outcome" in record or "rewards" in record) and _is_result(record):
        check_version(record, RESULT_VERSION, path)
        rollout.result = record
        return rollout
    unread = CUT if os.path.exists(path) else UNFINISHED
    rollout.problem = unread if record is None else FOREIGN
    rollout.config = read_dict(os.path.join(found.path, "config.json")) or planned(found)
    return rollout


_NAMES = ("task_name", "task_digest", "rollout_name", "agent", "model", "group_id", "outcome")


def _is_result(record: dict[str, Any]) -> bool:
    """The names are text and the rewards an object, where they are given."""
    named = all(record.get(name) is None or isinstance(record[name], str) for name in _NAMES)
    return named and isinstance(record.get("rewards") or {}, dict)


NEEDS_NO_MODEL = frozenset({"oracle", "nop", "scripted"})


def reached_model(rollout: RolloutRecord) -> bool:
    """False when a rollout that has a model made no call, or every call failed. Agents that
    need no model, and rollouts without one, have nothing to reach."""
    if rollout.model is None or rollout.agent in NEEDS_NO_MODEL:
        return True
    counted = (rollout.result.get("agent_result") or {}).get("usage_details") or {}
    calls, failed = counted.get("calls"), counted.get("failed_calls")
    if isinstance(calls, int) and isinstance(failed, int) and calls > failed:
        return True
    return any(succeeded(call) for call in load_calls(rollout.calls_path))


def number(value: Any) -> float | None:
    """A finite number, else None (``true`` is not a number)."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return float(value)
