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
from benchflow.jobs.progress import Reporter, retry_line, start_line, verdict
from benchflow.kernel.events import RolloutEvent

if TYPE_CHECKING:
    from benchflow.jobs.evaluation import EvaluationResult

ROWS = 16
"""Rollouts shown at once; the rest is counted below the table."""


@dataclass(slots=True)
class _Row:
    task: str
    trial: int
    begin: float
    phase: str = ""
    tool_calls: int | None = None
    tokens: int | None = None
    cost: float | None = None


class LiveReporter(Reporter):
    """Task, phase, tool calls, tokens, cost (or ``?``), running mean reward, time left."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._live: Live | None = None
        self._running: dict[str, _Row] = {}
        self._rewards: list[float] = []
        self._unscored = 0
        self._done = 0
        self._kept = 0
        self._total = 0
        self._begin = time.monotonic()

    def note(self, text: str) -> None:
        self._print(text)

    def started(self, plan: Plan, todo: int, kept: int) -> None:
        self._kept, self._total, self._begin = kept, todo + kept, time.monotonic()
        self._print(start_line(plan, todo))
        if todo:
            live = Live(
                console=self._console, get_renderable=self.table, refresh_per_second=4, transient=True
            )
            live.start()
            self._live = live

    def event(self, event: RolloutEvent) -> None:
        if event.message:
            self._print(f"{event.rollout}: {event.message}")
        if event.phase == "done" or not event.rollout:
            return
        row = self._running.get(event.rollout)
        if row is None:
            row = self._running[event.rollout] = _Row(event.task, event.trial, time.monotonic())
        row.phase, row.tool_calls, row.tokens = event.phase, event.tool_calls, event.tokens
        row.cost = event.cost_usd

    def retrying(self, planned: PlannedRollout, result: Result, attempt: int, pause: float) -> None:
        self._running.pop(planned.name, None)
        self._print(retry_line(planned, result, attempt, pause))

    def finished(self, job: PlannedJob, planned: PlannedRollout, result: Result) -> None:
        self._running.pop(planned.name, None)
        self._done += 1
        if result.reward is None:
            self._unscored += 1
            self._print(f"{planned.name}: {verdict(result)}")
        else:
            self._rewards.append(result.reward)

    def ended(self, result: EvaluationResult) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _print(self, text: str) -> None:
        self._console.print(Text(text))

    def table(self) -> Group:
        """What the screen shows now."""
        table = Table(box=None, pad_edge=False)
        for title in ("task", "trial", "phase", "tools", "tokens", "cost", "time"):
            table.add_column(title, justify="left" if title in ("task", "phase") else "right")
        now = time.monotonic()
        for row in list(self._running.values())[:ROWS]:
            table.add_row(
                row.task,
                str(row.trial),
                row.phase,
                _known(row.tool_calls),
                _known(row.tokens),
                "?" if row.cost is None else f"${row.cost:.4f}",
                f"{now - row.begin:.0f}s",
            )
        hidden = len(self._running) - ROWS
        lines = [table, Text(self._status())]
        if hidden > 0:
            lines.insert(1, Text(f"… and {hidden} more running"))
        return Group(*lines)

    def _status(self) -> str:
        mean = f"{sum(self._rewards) / len(self._rewards):.3f}" if self._rewards else "?"
        finished = self._done + self._kept
        counts = f"{finished}/{self._total} finished, {self._unscored} unscored"
        return f"{counts}, mean reward {mean}, {self._eta()} left"

    def _eta(self) -> str:
        if not self._done:
            return "?"
        left = self._total - self._kept - self._done
        seconds = (time.monotonic() - self._begin) / self._done * left
        return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def _known(value: int | None) -> str:
    return "?" if value is None else str(value)
