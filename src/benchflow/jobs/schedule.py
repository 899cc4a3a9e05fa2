"""Running planned rollouts: a bounded number at once, retries by class, budgets."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import TypeVar

from benchflow.contracts.errors import RolloutError
from benchflow.contracts.records import Result
from benchflow.jobs.config import EvaluationConfig, RetryConfig

T = TypeVar("T")


async def run_bounded(
    items: Iterable[T], limit: int, work: Callable[[T], Awaitable[None]], stop: Callable[[], str | None]
) -> str | None:
    """Call ``work`` on each item in order, ``limit`` at once. When ``stop()`` gives a reason,
    nothing more is started, what runs is finished, and the reason is returned.

    An error or a cancellation cancels what runs and waits for it before it is raised.
    """
    queue = iter(items)
    reason: list[str] = []

    async def take() -> None:
        for item in queue:
            why = stop()
            if why is not None:
                reason.append(why)
                return
            await work(item)

    workers = [asyncio.create_task(take()) for _ in range(limit)]
    try:
        await asyncio.wait(workers, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        for running in workers:
            running.cancel()  # once: a second cancellation would hit a teardown half-way
        await _settle(workers)
    failures = [error for worker in workers if not worker.cancelled() and (error := worker.exception())]
    if failures:
        raise failures[0]
    return reason[0] if reason else None


async def _settle(workers: list[asyncio.Task[None]]) -> None:
    """Wait until every worker has ended, also when we are cancelled again meanwhile."""
    while any(not worker.done() for worker in workers):
        try:
            await asyncio.wait(workers)
        except asyncio.CancelledError:
            continue


def categories(retryable: bool = True) -> frozenset[str]:
    """Stable names of the failures that another attempt may cure."""
    return frozenset(cls.category for cls in _tree(RolloutError) if cls.retryable is retryable)


def _tree(cls: type[RolloutError]) -> Iterator[type[RolloutError]]:
    yield cls
    for child in cls.__subclasses__():
        yield from _tree(child)


class Retries:
    """Whether a result deserves another attempt, and the pause before it."""

    def __init__(self, config: RetryConfig, rng: Callable[[], float] = random.random) -> None:
        self._config = config
        self._rng = rng
        self._curable = categories()

    def pause(self, result: Result, attempt: int) -> float | None:
        """Seconds to wait before attempt ``attempt + 1``; None when this result stands. A
        score always stands."""
        if result.reward is not None or result.outcome == "cancelled":
            return None
        if attempt >= self._config.max_retries:
            return None
        category = result.error_category or result.verifier_error_category
        if category not in self._curable:
            return None
        return self._config.wait(attempt, self._rng())


class JobBudget:
    """What the user allows a job to use. Spent is counted as rollouts finish, so a job may
    pass a limit by what runs at that moment."""

    def __init__(self, config: EvaluationConfig) -> None:
        self._config = config
        self._begin = time.monotonic()
        self._started = 0
        self._tokens = 0
        self._cost = 0.0
        self._unknown: str | None = None

    def start(self) -> None:
        self._started += 1

    def spend(self, result: Result) -> None:
        """Count a finished attempt. An amount that is limited but unknown stops the job: a
        limit that cannot be checked cannot be kept."""
        counts = result.agent_result
        if result.model is None:
            return
        if counts.total_tokens is None and self._config.max_tokens is not None:
            self._unknown = f"--max-tokens: the token count of {result.rollout_name} is unknown"
        if counts.cost_usd is None and self._config.max_cost_usd is not None:
            self._unknown = f"--max-cost-usd: the cost of {result.rollout_name} is unknown"
        self._tokens += counts.total_tokens or 0
        self._cost += counts.cost_usd or 0.0

    def spent(self) -> str | None:
        """The budget that is used up, in words; None while there is room."""
        config = self._config
        if self._unknown:
            return self._unknown
        if config.max_rollouts is not None and self._started >= config.max_rollouts:
            return f"--max-rollouts {config.max_rollouts} reached"
        if config.max_seconds is not None and time.monotonic() - self._begin >= config.max_seconds:
            return f"--max-seconds {config.max_seconds:g} reached"
        if config.max_tokens is not None and self._tokens >= config.max_tokens:
            return f"--max-tokens {config.max_tokens} reached ({self._tokens} used)"
        if config.max_cost_usd is not None and self._cost >= config.max_cost_usd:
            return f"--max-cost-usd {config.max_cost_usd:g} reached ({self._cost:.4f} spent)"
        return None
