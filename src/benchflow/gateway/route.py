"""One rollout's access to its model: its key, its limits, its counts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from benchflow.contracts.gateway import ModelSpec, RouteTotals
from benchflow.gateway.capture import CallLog
from benchflow.gateway.purpose import AUXILIARY
from benchflow.gateway.upstream import Upstream

_CLEARED_BY_SUCCESS = ("endpoint", "endpoint_rejected", "context_limit")
"""A later success proves that the agent got past these; a spent budget or a full disk stays."""


@dataclass(slots=True)
class Stopwatch:
    """Wall time during which at least one of several overlapping activities was on."""

    total: float = 0.0
    _running: int = 0
    _since: float = 0.0

    def __enter__(self) -> None:
        if self._running == 0:
            self._since = time.monotonic()
        self._running += 1

    def __exit__(self, *_: object) -> None:
        self._running -= 1
        if self._running == 0:
            self.total += time.monotonic() - self._since

    def read(self) -> float:
        return self.total + (time.monotonic() - self._since if self._running else 0.0)


class Stoppable(Protocol):
    """A call in flight."""

    task: asyncio.Task[Any]

    async def stop(self, reason: str) -> None:
        """Break it off; it is recorded with the reason."""
        ...


@dataclass(slots=True)
class Counts:
    calls: int = 0
    failed: int = 0
    answered: int = 0
    exact: int = 0
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cache_read_tokens: int | None = None
    cost_usd: float | None = None
    unpriced: int = 0
    version_first: str | None = None
    version_last: str | None = None

    def add_usage(self, usage: dict[str, Any]) -> None:
        details = usage.get("prompt_tokens_details")
        cached = details.get("cached_tokens") if isinstance(details, dict) else None
        self.prompt_tokens = _plus(self.prompt_tokens, usage.get("prompt_tokens"))
        self.completion_tokens = _plus(self.completion_tokens, usage.get("completion_tokens"))
        self.cache_read_tokens = _plus(self.cache_read_tokens, cached)

    @property
    def tokens(self) -> int:
        return (self.prompt_tokens or 0) + (self.completion_tokens or 0)

    @property
    def capture(self) -> str:
        if not self.answered:
            return "none"
        if not self.exact:
            return "text"
        return "tokens" if self.exact == self.answered else "partial"


def _plus(total: int | None, more: object) -> int | None:
    """A count that is none (text, a negative number) leaves the total as it was."""
    if isinstance(more, bool) or not isinstance(more, int) or more < 0:
        return total
    return (total or 0) + more


@dataclass(slots=True, eq=False)
class Route:
    """Implements ``contracts.gateway.ModelRoute``."""

    key: str
    model: str
    socket: Path
    rollout: str
    spec: ModelSpec
    upstream: Upstream
    log: CallLog
    seed: int
    """Stands for (job seed, task, trial): the same rollout draws the same, its siblings differ."""
    node_id: str
    on_close: Callable[[Route], Awaitable[None]]
    inside_port: int
    closed: bool = False
    failure: tuple[str, str] | None = None
    policy_version: str | None = None
    seen_tools: bool = False
    counts: Counts = field(default_factory=Counts)
    waiting: Stopwatch = field(default_factory=Stopwatch)
    retrying: Stopwatch = field(default_factory=Stopwatch)
    in_flight: set[Stoppable] = field(default_factory=set)
    _final: RouteTotals | None = None

    @property
    def inside_url(self) -> str:
        return f"http://127.0.0.1:{self.inside_port}{self.host_path}"

    @property
    def host_path(self) -> str:
        return f"/r/{self.key}"

    def set_node(self, node_id: str) -> None:
        self.node_id = node_id

    def fail(self, category: str, message: str, purpose: str) -> None:
        """An auxiliary call's failure says nothing about the rollout, unless it is a budget."""
        self.counts.failed += 1
        if category in _CLEARED_BY_SUCCESS and purpose in AUXILIARY:
            return
        if self.failure is None or self.failure[0] in _CLEARED_BY_SUCCESS:
            self.failure = (category, message)

    def succeed(self, purpose: str) -> None:
        if purpose not in AUXILIARY and self.failure and self.failure[0] in _CLEARED_BY_SUCCESS:
            self.failure = None

    def spent(self) -> str | None:
        """Which budget is used up, in words, or None."""
        spec, counts = self.spec, self.counts
        if spec.max_calls is not None and counts.calls >= spec.max_calls:
            return f"the budget of {spec.max_calls} model calls is spent"
        if spec.max_tokens is not None and counts.tokens >= spec.max_tokens:
            return f"the budget of {spec.max_tokens} tokens is spent ({counts.tokens} used)"
        if spec.max_cost_usd is not None:
            if counts.unpriced:
                return f"a cost budget is set, but calls to {spec.model} have no known price"
            if (counts.cost_usd or 0.0) >= spec.max_cost_usd:
                return f"the budget of {spec.max_cost_usd} USD is spent ({counts.cost_usd:.4f} used)"
        return None

    def count_cost(self, cost: float | None) -> None:
        if cost is None:
            self.counts.unpriced += 1
        else:
            self.counts.cost_usd = (self.counts.cost_usd or 0.0) + cost

    def count_version(self, version: str | None) -> None:
        if version is not None:
            self.counts.version_first = self.counts.version_first or version
            self.counts.version_last = version

    def totals(self) -> RouteTotals:
        if self._final is not None:
            return self._final
        counts = self.counts
        priced = counts.cost_usd is not None and not counts.unpriced
        return RouteTotals(
            calls=counts.calls,
            failed_calls=counts.failed,
            answered_calls=counts.answered,
            prompt_tokens=counts.prompt_tokens,
            completion_tokens=counts.completion_tokens,
            cache_read_tokens=counts.cache_read_tokens,
            cost_usd=counts.cost_usd if priced else None,
            cost_reason=None if priced else cost_reason(self),
            model_wait_sec=round(self.waiting.read(), 6),
            retry_wait_sec=round(self.retrying.read(), 6),
            policy_version_first=counts.version_first,
            policy_version_last=counts.version_last,
            token_capture=counts.capture,
            failure=self.failure,
        )

    async def close(self) -> RouteTotals:
        if self._final is None:
            self.closed = True
            await self.on_close(self)
            self._final = self.totals()
        return self._final


def cost_reason(route: Route) -> str:
    """Why the cost of a call is unknown."""
    return "self-hosted" if route.upstream.target.policy else f"no price for {route.spec.model}"
