"""``chat``: one row per rollout, the whole main conversation in OpenAI's form."""

from __future__ import annotations

from benchflow.training.calls import conversation, last_agent_call, tools
from benchflow.training.formats import Row, Source
from benchflow.training.rollouts import RolloutRecord


def rows(source: Source) -> list[Row]:
    rollout, last = source.rollout, last_agent_call(source.calls)
    row = {
        **source.named(),
        "messages": conversation(last),
        "tools": tools(last),
        "token_usage": token_usage(rollout),
        "source": {"rollout_path": rollout.path, "call_index": last.get("index")},
    }
    return [row]


def token_usage(rollout: RolloutRecord) -> dict[str, int | None]:
    """Token counts of the whole rollout, null where nobody counted."""
    counts = rollout.result.get("agent_result") or {}
    return {
        "input_tokens": counts.get("n_input_tokens"),
        "output_tokens": counts.get("n_output_tokens"),
        "cache_read_tokens": counts.get("n_cache_read_tokens"),
        "cache_creation_tokens": counts.get("n_cache_creation_tokens"),
        "total_tokens": counts.get("total_tokens"),
    }
