"""The front door of a job: ``await Evaluation(tasks_dir=…, config=…).run()``."""

from __future__ import annotations

import asyncio
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchflow.contracts.records import Result, Summary
from benchflow.jobs import preflight
from benchflow.jobs.config import EvaluationConfig, RetryConfig
from benchflow.jobs.identity import settings_record
from benchflow.jobs.plan import Plan
from benchflow.jobs.preflight import Checked
from benchflow.jobs.progress import Reporter
from benchflow.jobs.resume import Continued, count_finished, find
from benchflow.jobs.runner import JobRunner
from benchflow.kernel.planes import Planes

__all__ = ["Evaluation", "EvaluationConfig", "EvaluationResult", "RetryConfig"]

OK, UNSCORED, GATE = 0, 1, 4


@dataclass(frozen=True, slots=True)
class EvaluationResult:
    """How a job ended. ``summary`` is over all trials; ``jobs`` are the folders, one per trial."""

    summary: Summary
    jobs: tuple[Path, ...]
    exit_code: int
    stopped: str | None = None
    """Why rollouts were left unstarted: a budget, or a full disk."""
    lost: tuple[str, ...] = ()
    gates: tuple[str, ...] = ()
    """Each gate that was asked for and not met."""
    plan: Plan | None = field(default=None, repr=False, compare=False)

    @property
    def total(self) -> int:
        return self.summary.total

    @property
    def passed(self) -> int:
        return self.summary.passed

    @property
    def failed(self) -> int:
        return self.summary.failed

    @property
    def errored(self) -> int:
        return self.summary.errored + self.summary.verifier_errored

    @property
    def score(self) -> float | None:
        return self.summary.score

    @property
    def mean_reward(self) -> float | None:
        return self.summary.mean_reward

    @property
    def rollouts(self) -> list[Result]:
        """Every result, read from disk."""
        from benchflow.jobs.load import load_job

        return [result for folder in self.jobs for result in load_job(folder).rollouts]


class Evaluation:
    """A set of rollouts run together: tasks x trials of one agent and model.

    ``tasks_dir`` and ``jobs_dir`` override the fields of ``config``. Raises ``UsageError``
    and ``PrerequisiteError`` before any folder is made.
    """

    def __init__(
        self,
        tasks_dir: str | os.PathLike[str] | list[str] | None = None,
        jobs_dir: str | os.PathLike[str] | None = None,
        config: EvaluationConfig | None = None,
        *,
        reporter: Reporter | None = None,
        began: float | None = None,
    ) -> None:
        changes: dict[str, Any] = {}
        if tasks_dir is not None:
            paths = tasks_dir if isinstance(tasks_dir, (list, tuple)) else [tasks_dir]
            changes["tasks"] = tuple(os.fspath(path) for path in paths)
        if jobs_dir is not None:
            changes["jobs_dir"] = Path(jobs_dir)
        self.config = (config or EvaluationConfig()).model_copy(update=changes)
        self.reporter = reporter or Reporter()
        self.result: EvaluationResult | None = None
        """How it ended; set also when it was interrupted after its folders were made."""
        self._began = began
        self._runner: JobRunner | None = None

    def running(self) -> list[str]:
        """Rollouts whose sandbox may still exist, with the phase they are in."""
        return self._runner.running() if self._runner else []

    async def run(self) -> EvaluationResult:
        """Plan, run, aggregate. Cancelled, it tears down, writes what is true, and re-raises."""
        began = self._began or time.time()
        checked = await preflight.check(self.config)
        preflight.check_writable(self.config.jobs_dir)
        continued = self._plan(checked, began)
        planes, probe = await preflight.open_checked(self.config, checked, self.reporter.note)
        for note in (*checked.notes, continued.why_new):
            if note:
                self.reporter.note(note)
        try:
            return await self._run(continued, planes, probe)
        finally:
            await planes.close()

    async def plan(self) -> tuple[Plan, tuple[str, ...], int]:
        """What ``run`` would do, the notes it would print, and how many of the planned rollouts
        are finished already; nothing is written or started."""
        checked = await preflight.check(self.config)
        continued = self._plan(checked, time.time())
        finished = count_finished(continued)
        going_on = f"continuing job {continued.plan.job_name}: {finished} finished"
        notes = (*checked.notes, continued.why_new, going_on if continued.earlier else None)
        return continued.plan, tuple(note for note in notes if note), finished

    def _plan(self, checked: Checked, began: float) -> Continued:
        settings = settings_record(self.config, checked.agent_version, checked.sandbox)
        return find(self.config, settings, checked.tasks, began=began)

    async def _run(
        self, continued: Continued, planes: Planes, probe: dict[str, Any] | None
    ) -> EvaluationResult:
        config = self.config
        for leftover in await planes.provider.reap():
            self.reporter.note(f"removed a leftover of a dead run: {leftover.kind} {leftover.name}")
        planes.image_gate = asyncio.Semaphore(config.build_concurrency or config.concurrency)
        planes.verify_gate = asyncio.Semaphore(config.concurrency)
        runner = self._runner = JobRunner(continued, planes, probe, self.reporter)
        try:
            runner.open()
        except BaseException:
            runner.release()
            raise
        self.reporter.started(runner.plan, len(runner.todo), runner.kept)
        try:
            await runner.run()
        finally:
            summary = runner.close()
            self.result = self._result(runner, summary)
            self.reporter.ended(self.result)
        return self.result

    def _result(self, runner: JobRunner, summary: Summary) -> EvaluationResult:
        gates = tuple(self._unmet(summary))
        faults = summary.errored + summary.verifier_errored + summary.unscored
        if self.config.usage_tracking == "required" and self.config.model:
            faults += sum(1 for row in runner.rows() if row.input_tokens is None)
        faults += len(runner.lost) + (runner.broken is not None)
        code = GATE if gates else UNSCORED if faults else OK
        folders = tuple(job.folder for job in runner.plan.jobs)
        return EvaluationResult(
            summary, folders, code, runner.stopped or runner.broken, tuple(runner.lost), gates, runner.plan
        )

    def _unmet(self, summary: Summary) -> list[str]:
        config, unmet = self.config, []
        if config.fail_under is not None and (
            summary.mean_reward is None or summary.mean_reward < config.fail_under
        ):
            unmet.append(f"--fail-under {config.fail_under:g}: the mean reward is {summary.mean_reward}")
        for kind in config.fail_on:
            count = getattr(summary, kind)
            if count:
                unmet.append(f"--fail-on {kind}: {count}")
        return unmet
