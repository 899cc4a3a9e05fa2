"""The live table of a job on a terminal."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from benchflow.contracts.records import Result
from benchflow.jobs.plan import Plan, PlannedJob, PlannedRollout
from benchflow.jobs.progress import PlainReporter, verdict
from benchflow.kernel.events import RolloutEvent

if TYPE_CHECKING:
    from benchflow.jobs.evaluation import EvaluationResult

ROWS = 16
"""Rollouts shown at once; the rest is counted below the table."""


@dataclass(slots=True)
class _Row:
    now: RolloutEvent
    begin: float


class LiveReporter(PlainReporter):
    """Task, phase, tool calls, tokens, cost (or ``?``), running mean reward, time left."""

    def __init__(self, console: Console | None = None) -> None:
        super().__init__()
        self._console = console or Console(stderr=True)
        self._live: Live | None = None
        self._running: dict[str, _Row] = {}
        self._rewards: list[float] = []
        self._unscored = 0
        self._kept = 0
        self._begin = time.monotonic()

    def say(self, text: str) -> None:
        self._console.print(Text(text))

    def started(self, plan: Plan, todo: int, kept: int) -> None:
        super().started(plan, todo, kept)
        self._kept, self._begin = kept, time.monotonic()
        if todo:
            self._live = Live(
                console=self._console, get_renderable=self.table, refresh_per_second=4, transient=True
            )
            self._live.start()

    def event(self, event: RolloutEvent) -> None:
        if event.message:
            self.say(f"{event.rollout}: {event.message}")
        if event.phase != "done" and event.rollout:
            row = self._running.setdefault(event.rollout, _Row(event, time.monotonic()))
            row.now = event

    def retrying(self, planned: PlannedRollout, result: Result, attempt: int, pause: float) -> None:
        self._running.pop(planned.name, None)
        super().retrying(planned, result, attempt, pause)

    def finished(self, job: PlannedJob, planned: PlannedRollout, result: Result) -> None:
        self._running.pop(planned.name, None)
        self._done += 1
        if result.reward is None:
            self._unscored += 1
            self.say(f"{planned.name}: {verdict(result)}")
        else:
            self._rewards.append(result.reward)

    def ended(self, result: EvaluationResult) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def table(self) -> Group:
        """What the screen shows now."""
        table = Table(box=None, pad_edge=False)
        for title in ("task", "trial", "phase", "tools", "tokens", "cost", "time"):
            table.add_column(title, justify="left" if title in ("task", "phase") else "right")
        now = time.monotonic()
        for row in list(self._running.values())[:ROWS]:
            event = row.now
            counts = [event.trial, event.phase, _known(event.tool_calls), _known(event.tokens)]
            cost = "?" if event.cost_usd is None else f"${event.cost_usd:.4f}"
            table.add_row(event.task, *map(str, counts), cost, f"{now - row.begin:.0f}s")
        hidden = len(self._running) - ROWS
        lines = [table, Text(self._status())]
        if hidden > 0:
            lines.insert(1, Text(f"… and {hidden} more running"))
        return Group(*lines)

    def _status(self) -> str:
        mean = f"{sum(self._rewards) / len(self._rewards):.3f}" if self._rewards else "?"
        counts = f"{self._done}/{self._total} finished, {self._unscored} unscored"
        return f"{counts}, mean reward {mean}, {self._eta()} left"

    def _eta(self) -> str:
        here = self._done - self._kept
        if not here:
            return "?"
        seconds = (time.monotonic() - self._begin) / here * (self._total - self._done)
        return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def _known(value: int | None) -> object:
    return "?" if value is None else value
