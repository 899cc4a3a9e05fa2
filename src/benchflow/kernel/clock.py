"""Phase times of one rollout: exclusive, monotonic, adding up to the total."""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import contextmanager
from datetime import UTC, datetime

from benchflow.contracts.records import Timing


def utc_now() -> str:
    """ISO 8601 in UTC with milliseconds and a zone."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


class Clock:
    """``measure(phase)`` adds to that phase; whatever no phase covers becomes ``other``."""

    def __init__(self) -> None:
        self.started_at = utc_now()
        self._start = time.monotonic()
        self._spent: dict[str, float] = {}

    @contextmanager
    def measure(self, phase: str) -> Generator[None]:
        begin = time.monotonic()
        try:
            yield
        finally:
            self._spent[phase] = self._spent.get(phase, 0.0) + time.monotonic() - begin

    def timing(self, *, model_wait: float | None) -> Timing:
        total = time.monotonic() - self._start
        phases = {phase: seconds for phase, seconds in self._spent.items() if phase != "other"}
        other = max(0.0, total - sum(phases.values()))
        phases = {phase: round(seconds, 6) for phase, seconds in phases.items()}
        wait = None if model_wait is None else round(model_wait, 6)
        return Timing(**phases, model_wait=wait, other=round(other, 6), total=round(total, 6))
