"""Runs a plan in its job folders. Holds their locks from the first write to the last."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchflow.contracts.errors import BenchflowError, HostPressureError, UsageError
from benchflow.contracts.records import Result, Summary
from benchflow.jobs import attempts, metrics
from benchflow.jobs.lock import JobLock
from benchflow.jobs.plan import Plan, PlannedJob, PlannedRollout, renamed, reserve, rollout_config
from benchflow.jobs.progress import Reporter
from benchflow.jobs.resume import Continued, reason_to_run
from benchflow.jobs.schedule import JobBudget, Retries, run_bounded
from benchflow.jobs.store import JobStore, SummaryPacer, job_record, latest, read_result, scan_results
from benchflow.kernel.clock import utc_now
from benchflow.kernel.events import RolloutEvent
from benchflow.kernel.planes import Planes
from benchflow.kernel.rollout import Rollout
from benchflow.kernel.storage import write_json

Slot = tuple[PlannedJob, PlannedRollout]


class JobRunner:
    """``open`` -> ``run`` -> ``close``. Keeps one small row per finished rollout in memory."""

    def __init__(
        self, continued: Continued, planes: Planes, probe: dict[str, Any] | None, reporter: Reporter
    ) -> None:
        self.plan: Plan = continued.plan
        self.todo: list[Slot] = []
        self.kept = 0
        self.lost: list[str] = []
        """Rollouts that ended without a record, with the reason."""
        self.broken: str | None = None
        """What makes it pointless to start more: a full disk."""
        self.stopped: str | None = None
        self._continued = continued
        self._planes = planes
        self._probe = probe
        self._reporter = reporter
        self._stores: dict[Path, JobStore] = {}
        self._locks: list[JobLock] = []
        self._rows: dict[Path, dict[str, metrics.Row]] = {}
        self._phases: dict[str, str] = {}
        self._pacer = SummaryPacer()
        self._budget = JobBudget(self.plan.config)
        self._retries = Retries(self.plan.config.retry)
        self._begin = time.monotonic()

    # -- before ---------------------------------------------------------------------

    def open(self) -> None:
        """Make or take over the job folders, write ``job.json``, and decide what runs."""
        if not self._continued.earlier:
            self.plan = renamed(self.plan, self._reserve())
        reasons: dict[str, str] = {}
        for job in self.plan.jobs:
            job.folder.mkdir(parents=True, exist_ok=True)
            self._own(job.folder)
            store = self._stores[job.folder] = JobStore(job.folder, self._planes.redact)
            self._rows[job.folder] = {}
            if job.trial in self._continued.earlier:
                reasons |= self._continue(job, store)
            else:
                store.write_job(job_record(self.plan, job, probe=self._probe))
        for job, planned in self.plan.in_order():
            if planned.name not in self._rows[job.folder]:
                self.todo.append((job, planned))
        if self._continued.earlier:
            self._tell_resume(reasons)

    def _reserve(self) -> str:
        config = self.plan.config
        try:
            return reserve(config, self.plan.job_name, exact=config.job_name is not None)
        except FileExistsError:
            raise UsageError(
                f"--job-name {config.job_name}: that folder exists in {config.jobs_dir}",
                fix="give another name, or leave it out",
            ) from None

    def _own(self, folder: Path) -> None:
        lock = JobLock(folder)
        dead = lock.acquire()
        self._locks.append(lock)
        if dead is not None:
            self._reporter.note(f"{folder}: its owner, {dead}, is gone; taken over")

    def _continue(self, job: PlannedJob, store: JobStore) -> dict[str, str]:
        """Load what is finished. Returns why each of the others runs (again)."""
        for said in store.repair():
            self._reporter.note(f"{job.folder}: {said}")
        # A rollout's own result.json is the truth: deleting its folder asks for it again.
        found = latest(scan_results(job.folder))
        again: dict[str, str] = {}
        for planned in job.rollouts:
            why = reason_to_run(found.get(planned.name))
            if why is None:
                self._rows[job.folder][planned.name] = metrics.read_row(found[planned.name])
                self.kept += 1
            else:
                again[planned.name] = why
        earlier = self._continued.earlier[job.trial].record
        record = job_record(self.plan, job, probe=self._probe, created_at=earlier.get("created_at"))
        resumes = [
            *earlier.get("resumes", []),
            {"at": utc_now(), "kept": len(self._rows[job.folder]), "run": again},
        ]
        store.write_job({**record, "resumes": resumes})
        return again

    def _tell_resume(self, reasons: dict[str, str]) -> None:
        self._reporter.note(
            f"continuing job {self.plan.job_name}: {self.kept} finished, {len(self.todo)} to run"
        )
        if not self.todo:
            self._reporter.note("  nothing is left to run; --new starts another job")
        for _, planned in self.todo[:20]:
            why = reasons.get(planned.name, "new in the plan")
            self._reporter.note(f"  {planned.name}: {why}")
        if len(self.todo) > 20:
            self._reporter.note(f"  … and {len(self.todo) - 20} more")

    def running(self) -> list[str]:
        """``rollout (phase)`` of everything that has not ended."""
        return [f"{name} ({phase})" for name, phase in self._phases.items()]

    # -- during ---------------------------------------------------------------------

    async def run(self) -> None:
        """Run what is to run. Cancelled, it tears down, writes what is true, and re-raises."""
        self._begin = time.monotonic()
        limit = min(self.plan.config.concurrency, max(1, len(self.todo)))
        self.stopped = await run_bounded(self.todo, limit, self._slot, self._stop_reason)

    def _stop_reason(self) -> str | None:
        return self.broken or self._budget.spent()

    async def _slot(self, slot: Slot) -> None:
        """One planned rollout, with its attempts."""
        job, planned = slot
        self._budget.start()
        attempt = 0
        while True:
            result = await self._attempt(job, planned)
            if result is None:
                return
            self._budget.spend(result)
            pause = None if self._stop_reason() else self._retries.pause(result, attempt)
            if pause is None:
                self._finish(job, planned, result)
                return
            attempt += 1
            self._reporter.retrying(planned, result, attempt, pause)
            try:
                await asyncio.sleep(pause)
            except asyncio.CancelledError:
                self._finish(job, planned, result)
                raise

    async def _attempt(self, job: PlannedJob, planned: PlannedRollout) -> Result | None:
        """One attempt; None when it left no record, which is noted."""
        folder = job.folder / planned.name
        try:
            config = rollout_config(self.plan, job, planned, retries=attempts.set_aside(folder))
            rollout = Rollout(
                config, self._planes, task=self.plan.tasks[planned.task], on_event=self._on_event
            )
            return await rollout.run()
        except asyncio.CancelledError:
            result = read_result(folder)
            if result is not None:
                self._finish(job, planned, result)
            raise
        except Exception as error:
            # A fault of the engine or of a plugin outside the rollout's own phases: this one is
            # lost, with its reason, and the job goes on.
            self._lose(job, planned, error)
            return None

    def _on_event(self, event: RolloutEvent) -> None:
        if event.phase == "done":
            self._phases.pop(event.rollout, None)
        elif event.rollout:
            self._phases[event.rollout] = event.phase
        self._reporter.event(event)

    def _finish(self, job: PlannedJob, planned: PlannedRollout, result: Result) -> None:
        """List the result, count it, and show it."""
        self._rows[job.folder][planned.name] = metrics.row_of(result)
        try:
            if result.model and result.outcome != "cancelled":
                self._write_trainer_files(job.folder / planned.name, result)
            self._stores[job.folder].append(result)
            self._refresh_summary(job.folder)
        except OSError as error:
            self._lose(job, planned, error)
        self._reporter.finished(job, planned, result)

    def _write_trainer_files(self, folder: Path, result: Result) -> None:
        from benchflow.training.trainer_files import write_trainer_files  # only with a model

        write_trainer_files(folder, result, self._planes.redact)

    def _lose(self, job: PlannedJob, planned: PlannedRollout, error: Exception) -> None:
        """Note a rollout whose record could not be written; without one it counts as errored."""
        self._rows[job.folder].setdefault(planned.name, self._unrecorded(planned))
        reason = str(error) if isinstance(error, BenchflowError) else f"{type(error).__name__}: {error}"
        self.lost.append(f"{planned.name}: {reason}")
        self._reporter.note(f"{planned.name}: {reason}")
        if isinstance(error, HostPressureError) and self.broken is None:
            self.broken = error.message

    def _unrecorded(self, planned: PlannedRollout) -> metrics.Row:
        return metrics.read_row(
            {
                "task_name": planned.task,
                "agent": self.plan.config.agent or "",
                "model": self.plan.config.model,
                "outcome": "errored",
                "attribution": {"verdict": "mask"},
                "error_category": "no_record",
            }
        )

    def _refresh_summary(self, folder: Path) -> None:
        if self._pacer.due():
            begin = time.monotonic()
            self._stores[folder].write_summary(self.summary_of(folder, final=False))
            self._pacer.wrote(time.monotonic() - begin)

    # -- after ----------------------------------------------------------------------

    def summary_of(self, folder: Path, *, final: bool) -> Summary:
        planned = next(len(job.rollouts) for job in self.plan.jobs if job.folder == folder)
        rows = list(self._rows[folder].values())
        return self._summarise(rows, planned, final=final)

    def overall(self) -> Summary:
        """Over all trials, which is where pass@k lives."""
        return self._summarise(self.rows(), self.plan.rollouts, final=True)

    def _summarise(self, rows: list[metrics.Row], planned: int, *, final: bool) -> Summary:
        return metrics.summarise(
            rows,
            job_name=self.plan.job_name,
            agent=self.plan.config.agent or "",
            model=self.plan.config.model,
            sandbox=self.plan.settings["sandbox"],
            concurrency=self.plan.config.concurrency,
            elapsed_sec=time.monotonic() - self._begin,
            never_started=planned - len(rows) if final else 0,
            final=final,
        )

    def rows(self) -> list[metrics.Row]:
        return [row for rows in self._rows.values() for row in rows.values()]

    def close(self) -> Summary:
        """Write the final summaries and give the jobs up. A full disk is reported, not raised."""
        overall = self.overall()
        self._reporting_full_disk(
            lambda: write_json(
                self.plan.config.jobs_dir / "summary.json",
                overall.model_dump(),
                self._planes.redact,
                sync=False,
            )
        )
        for folder, store in self._stores.items():
            final = self.summary_of(folder, final=True)
            self._reporting_full_disk(lambda store=store, final=final: store.write_summary(final))
            store.close()
        self.release()
        return overall

    def release(self) -> None:
        for lock in self._locks:
            lock.release()

    def _reporting_full_disk(self, write: Callable[[], None]) -> None:
        try:
            write()
        except OSError as error:
            if self.broken is None:  # one full disk fails many writes; once is told
                self.broken = str(error)
                self._reporter.note(self.broken)
