"""What observers of a running rollout are told."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RolloutEvent:
    """Where a rollout stands. Counts are ``None`` while unknown.

    ``phase`` is one of setup, image, start, install, connect, agent, disconnect, verify, done.
    """

    rollout: str
    task: str
    trial: int
    phase: str
    tool_calls: int | None = None
    tokens: int | None = None
    cost_usd: float | None = None
    reward: float | None = None
    message: str | None = None
