"""``tokens``: one row per segment, with the engine's own token ids and log-probabilities."""

from __future__ import annotations

from benchflow.training.calls import Skip
from benchflow.training.formats import Row, Source


def rows(source: Source) -> list[Row]:
    exact = [segment for segment in source.segmented.segments if segment.kind == "tokens"]
    if not exact:
        raise Skip("no_tokens" if source.calls else "no_trajectory")
    return [{**source.named(), **segment.record()} for segment in exact]
