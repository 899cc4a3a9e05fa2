"""What a running job tells its user. ``Reporter`` itself is the silent one."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, TextIO

from benchflow.contracts.records import Result
from benchflow.jobs.plan import Plan, PlannedJob, PlannedRollout
from benchflow.kernel.events import RolloutEvent

if TYPE_CHECKING:
    from benchflow.jobs.evaluation import EvaluationResult


class Reporter:
    """Says nothing. Override what you want to hear; a reporter never fails a job."""

    def note(self, text: str) -> None:
        """One line the user should see."""

    def started(self, plan: Plan, todo: int, kept: int) -> None:
        """The job's folders exist and ``todo`` rollouts will run; ``kept`` are finished already."""

    def event(self, event: RolloutEvent) -> None:
        """A rollout entered a phase or did something."""

    def retrying(self, planned: PlannedRollout, result: Result, attempt: int, pause: float) -> None:
        """An attempt failed for a reason that another may cure."""

    def finished(self, job: PlannedJob, planned: PlannedRollout, result: Result) -> None:
        """A rollout's result is on disk."""

    def ended(self, result: EvaluationResult) -> None:
        """The job is over, also when it was interrupted."""


class PlainReporter(Reporter):
    """One line per event, for logs and pipes. A reader that goes away silences it."""

    SHOWN = frozenset({"image", "start", "agent", "verify"})

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream: TextIO | None = stream or sys.stderr
        self._last: dict[str, str] = {}
        self._total = 0
        self._done = 0

    def say(self, text: str) -> None:
        try:
            if self._stream is not None:
                self._stream.write(text + "\n")
                self._stream.flush()
        except (BrokenPipeError, ValueError):
            self._stream = None  # nobody reads any more

    def note(self, text: str) -> None:
        self.say(text)

    def started(self, plan: Plan, todo: int, kept: int) -> None:
        self._total, self._done = todo + kept, kept
        self.say(start_line(plan, todo))

    def event(self, event: RolloutEvent) -> None:
        if event.message:
            self.say(f"{event.rollout}: {event.message}")
        elif event.phase in self.SHOWN and self._last.get(event.rollout) != event.phase:
            self._last[event.rollout] = event.phase
            self.say(f"{event.rollout}: {event.phase}")

    def retrying(self, planned: PlannedRollout, result: Result, attempt: int, pause: float) -> None:
        self.say(retry_line(planned, result, attempt, pause))

    def finished(self, job: PlannedJob, planned: PlannedRollout, result: Result) -> None:
        self._last.pop(planned.name, None)
        self._done += 1
        self.say(f"[{self._done}/{self._total}] {planned.name}: {verdict(result)}")


def start_line(plan: Plan, todo: int) -> str:
    config = plan.config
    model = f" {config.model}" if config.model else ""
    trials = f" x {config.trials} trials" if config.trials > 1 else ""
    return (
        f"job {plan.job_name}: {len(plan.tasks)} task(s){trials}, {config.agent}{model}, "
        f"sandbox {plan.settings['sandbox']}, {todo} to run, {config.concurrency} at once"
    )


def retry_line(planned: PlannedRollout, result: Result, attempt: int, pause: float) -> str:
    category = result.error_category or result.verifier_error_category
    return f"{planned.name}: {category}; attempt {attempt + 1} in {pause:.1f} s"


def verdict(result: Result) -> str:
    """One rollout's end in a few words."""
    category = result.error_category or result.verifier_error_category
    if result.reward is not None:
        return f"reward {result.reward:.4g}" + (f" ({category})" if category else "")
    return without_score(result)


def without_score(result: Result) -> str:
    """Why there is no reward, on one line; the whole of it is in ``result.json``."""
    reason = " ".join((result.error or result.verifier_error or "").split())
    return result.outcome + (f": {reason[:300]}" if reason else "")


def make_reporter(*, quiet: bool, interactive: bool | None = None) -> Reporter:
    """Live on a terminal, plain lines elsewhere, silent when asked."""
    if quiet:
        return Reporter()
    if sys.stderr.isatty() if interactive is None else interactive:
        from benchflow.jobs.live import LiveReporter

        return LiveReporter()
    return PlainReporter()
