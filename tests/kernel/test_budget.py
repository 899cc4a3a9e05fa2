"""The agent's time over several turns."""

import asyncio

import pytest

from benchflow.contracts.errors import AgentTimeoutError
from benchflow.kernel.budget import AgentBudget


async def test_the_budget_spans_turns_and_cancels_the_last():
    cancelled = asyncio.Event()

    async def forever():
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise

    budget = AgentBudget(0.2)
    assert await budget.run(asyncio.sleep(0.05, "first")) == "first"
    with pytest.raises(AgentTimeoutError, match=r"0\.2 s"):
        await budget.run(forever())
    assert cancelled.is_set()
    with pytest.raises(AgentTimeoutError):
        await budget.run(forever())


async def test_excused_time_extends_the_deadline():
    excused = 0.0
    budget = AgentBudget(0.05, lambda: excused)

    async def waits_for_a_retry():
        nonlocal excused
        await asyncio.sleep(0.01)
        excused = 10.0
        await asyncio.sleep(0.2)
        return "done"

    assert await budget.run(waits_for_a_retry()) == "done"


@pytest.mark.parametrize("limit", [None, 0])
async def test_no_limit_is_no_limit(limit):
    assert await AgentBudget(limit).run(asyncio.sleep(0.02, "ok")) == "ok"


async def test_the_turns_own_failure_is_passed_on():
    async def fails():
        raise ConnectionError("gone")

    with pytest.raises(ConnectionError, match="gone"):
        await AgentBudget(5).run(fails())
