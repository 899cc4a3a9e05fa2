"""How many run at once, what is tried again, and when nothing more is started."""

from __future__ import annotations

import asyncio

import pytest

from benchflow.contracts.errors import BudgetError, EndpointError, RewardFileError, SandboxStartError
from benchflow.contracts.records import AgentResult
from benchflow.jobs.config import EvaluationConfig, RetryConfig
from benchflow.jobs.schedule import JobBudget, Retries, run_bounded


async def test_never_more_than_the_limit_run_at_once_and_each_runs_once():
    running, most, done = 0, 0, []

    async def work(item: int) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        done.append(item)
        running -= 1

    assert await run_bounded(range(50), 7, work, lambda: None) is None
    assert (most, sorted(done)) == (7, list(range(50)))


async def test_a_reason_to_stop_lets_what_runs_finish():
    done: list[int] = []

    async def work(item: int) -> None:
        await asyncio.sleep(0)
        done.append(item)

    assert await run_bounded(range(50), 4, work, lambda: "enough" if done else None) == "enough"
    assert done == [0, 1, 2, 3]


async def test_cancelling_waits_until_everything_has_ended():
    ended: list[int] = []
    started = asyncio.Event()

    async def work(item: int) -> None:
        try:
            started.set()
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.append(item)

    job = asyncio.create_task(run_bounded(range(9), 3, work, lambda: None))
    await started.wait()
    job.cancel()
    await asyncio.sleep(0)
    job.cancel()
    with pytest.raises(asyncio.CancelledError):
        await job
    assert ended == [0, 1, 2]


async def test_an_error_stops_the_others_and_is_raised():
    cancelled: list[int] = []

    async def work(item: int) -> None:
        if item == 1:
            raise KeyError("engine fault")
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(item)
            raise

    with pytest.raises(KeyError):
        await run_bounded(range(5), 2, work, lambda: None)
    assert cancelled == [0]


@pytest.mark.parametrize(
    ("error", "again"),
    [(EndpointError, True), (SandboxStartError, True), (RewardFileError, False), (BudgetError, False)],
)
def test_only_failures_that_another_attempt_may_cure_are_tried_again(make_result, error, again):
    retries = Retries(RetryConfig(max_retries=1), rng=lambda: 0.0)
    result = make_result(reward=None, error="x", error_category=error.category)
    assert (retries.pause(result, 0) is not None) is again
    assert retries.pause(result, 1) is None


def test_a_score_is_never_tried_again(make_result):
    retries = Retries(RetryConfig())
    assert retries.pause(make_result(reward=0.0, error_category="endpoint"), 0) is None
    assert retries.pause(make_result(reward=None, outcome="cancelled", error_category="cancelled"), 0) is None


def used(tokens: int | None, cost: float | None) -> AgentResult:
    return AgentResult(total_tokens=tokens, cost_usd=cost)


def test_budgets_are_spent_by_what_finished(make_result):
    budget = JobBudget(EvaluationConfig(max_tokens=100, max_cost_usd=1.0))
    budget.spend(make_result(agent_result=used(60, 0.1)))
    assert budget.spent() is None
    budget.spend(make_result(agent_result=used(60, 0.1)))
    assert budget.spent() == "--max-tokens 100 reached (120 used)"


@pytest.mark.parametrize("limit", [{"max_tokens": 5}, {"max_cost_usd": 5.0}])
def test_a_budget_that_cannot_be_checked_stops_the_job(make_result, limit):
    budget = JobBudget(EvaluationConfig(**limit))
    budget.spend(make_result(agent_result=used(None, None)))
    assert "unknown" in budget.spent()


def test_an_agent_without_a_model_spends_nothing(make_result):
    budget = JobBudget(EvaluationConfig(max_tokens=5))
    budget.spend(make_result(model=None, agent_result=used(None, None)))
    assert budget.spent() is None
