"""The agent's time, shared by all turns of a rollout."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from benchflow.contracts.errors import AgentTimeoutError

T = TypeVar("T")


class AgentBudget:
    """Wall-clock seconds an agent may use in total; ``None`` or 0 is no cap.

    ``not_counted`` returns the seconds so far that are not the agent's fault (the
    gateway's own retries, under the ``work`` clock); they extend the deadline.
    """

    def __init__(self, limit: float | None, not_counted: Callable[[], float] = lambda: 0.0) -> None:
        self.limit = limit or None
        self._not_counted = not_counted
        self._used = 0.0

    async def run(self, turn: Awaitable[T]) -> T:
        """Await one turn; raise ``AgentTimeoutError`` once the budget is gone. The turn is
        cancelled, and has let go of everything, before this returns or raises."""
        running = asyncio.ensure_future(turn)
        begin, excused = time.monotonic(), self._not_counted()

        def used() -> float:
            return self._used + time.monotonic() - begin - (self._not_counted() - excused)

        try:
            while not running.done():
                left = None if self.limit is None else self.limit - used()
                if left is not None and left <= 0:
                    break
                await asyncio.wait({running}, timeout=left)
            if running.done():
                return running.result()
        finally:
            self._used = used()
            await _stop(running)
        raise AgentTimeoutError(f"the agent did not finish within {self.limit:g} s")


async def _stop(running: asyncio.Future[Any]) -> None:
    """Cancel a turn and wait until it has let go; its own failure no longer matters."""
    if running.done():
        return
    running.cancel()
    await asyncio.wait({running})
    if not running.cancelled():
        running.exception()
