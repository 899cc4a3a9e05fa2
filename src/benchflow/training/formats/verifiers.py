"""``verifiers``: prompt, completion and reward; also the rollout's own trainer file.

``is_completed`` says that the rollout came to an end of its own or at a limit;
``is_truncated`` that a limit ended it: tokens of the last answer, context, turns, time or
budget. Neither changes the reward.
"""

from __future__ import annotations

from hashlib import sha256
from typing import Any

from benchflow.training.calls import Call, conversation, finish_reason, last_agent_call, split_prompt, tools
from benchflow.training.formats import Row, Source
from benchflow.training.formats.chat import token_usage
from benchflow.training.rollouts import RolloutRecord, number

LIMITS = frozenset({"timeout", "idle_timeout", "context_limit", "budget", "max_tokens", "max_turn_requests"})


def rows(source: Source) -> list[Row]:
    rollout, last = source.rollout, last_agent_call(source.calls)
    prompt, completion = split_prompt(conversation(last))
    row = {
        **source.standing(),
        "example_id": example_id(rollout),
        "prompt": prompt,
        "completion": completion,
        "metrics": _metrics(rollout),
        "is_completed": _completed(rollout),
        "is_truncated": _truncated(rollout, last),
        "info": _info(rollout, last),
    }
    return [row]


def example_id(rollout: RolloutRecord) -> int:
    """A number that all rollouts of one version of a task share."""
    name = f"{rollout.task}\0{rollout.task_digest}".encode()
    return int.from_bytes(sha256(name).digest()[:4]) >> 1


def _metrics(rollout: RolloutRecord) -> dict[str, float]:
    items = {name: number(value) for name, value in (rollout.result.get("rewards") or {}).items()}
    items["n_tool_calls"] = number(rollout.result.get("n_tool_calls"))
    return {name: value for name, value in items.items() if value is not None}


def _completed(rollout: RolloutRecord) -> bool:
    error = rollout.error
    return rollout.outcome != "cancelled" and (error is None or error in LIMITS)


def _truncated(rollout: RolloutRecord, last: Call) -> bool:
    if finish_reason(last) == "length":
        return True
    return rollout.error in LIMITS or rollout.result.get("stop_reason") in LIMITS


def _info(rollout: RolloutRecord, last: Call) -> dict[str, Any]:
    return {
        "task_id": rollout.task,
        "task_digest": rollout.task_digest,
        "environment": (rollout.result.get("sandbox") or {}).get("provider"),
        "agent": rollout.agent,
        "model": rollout.model,
        "rollout": rollout.name,
        "trial": rollout.trial,
        "job": rollout.job,
        "group_id": rollout.group_id,
        "policy_version": rollout.policy_version,
        "stop_reason": rollout.result.get("stop_reason"),
        "error": rollout.error,
        "masked": rollout.masked,
        "tools": tools(last),
        "token_usage": token_usage(rollout),
        "source": {"rollout_path": rollout.path, "call_index": last.get("index")},
    }
