"""``tokens``: one row per segment, with the engine's own token ids and log-probabilities."""

from __future__ import annotations

from benchflow.training.calls import Skip
from benchflow.training.formats import Row, Source
from benchflow.training.records import ROW_VERSION


def rows(source: Source) -> list[Row]:
    rollout = source.rollout
    exact = [segment for segment in source.segmented.segments if segment.kind == "tokens"]
    if not exact:
        raise Skip("no_tokens" if source.calls else "no_trajectory")
    return [
        {
            "schema_version": ROW_VERSION,
            "task": rollout.task,
            "rollout": rollout.name,
            "trial": rollout.trial,
            "agent": rollout.agent,
            "model": rollout.model,
            "reward": rollout.score,
            **segment.record(),
            **source.standing_fields(),
        }
        for segment in exact
    ]
