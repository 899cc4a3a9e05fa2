"""The model calls of one rollout, as the training side looks at them."""

from __future__ import annotations

from typing import Any

Call = dict[str, Any]
"""One line of ``llm_trajectory.jsonl``, whole; the shape is ``contracts.records.Call``."""


def succeeded(call: Call) -> bool:
    response = call.get("response") or {}
    status = response.get("status_code")
    return isinstance(status, int) and 200 <= status < 300 and not metadata(call).get("error")


def metadata(call: Call) -> dict[str, Any]:
    return call.get("metadata") or {}


def is_agents(call: Call) -> bool:
    """True for calls of the agent's own conversation: not a sub-agent's, and not titles,
    summaries and other helpers around it."""
    return metadata(call).get("purpose", "agent") == "agent"


def finish_reason(call: Call) -> str | None:
    return metadata(call).get("finish_reason")
