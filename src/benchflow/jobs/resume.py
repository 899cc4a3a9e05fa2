"""Continuing a job: the same command again, or ``bench eval resume JOB``.

A planned rollout is told by its identity, never by its place in the input. Finished
rollouts stay, scores of 0 included; missing, cancelled and unscored ones run again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from benchflow.contracts.errors import UsageError
from benchflow.contracts.task import Task
from benchflow.jobs.config import EvaluationConfig, make_config, parse_pairs
from benchflow.jobs.identity import differences
from benchflow.jobs.load import current_records
from benchflow.jobs.plan import Plan, PlannedJob, PlannedRollout, job_parent, make_plan
from benchflow.jobs.store import planned_rollouts, read_job


@dataclass(frozen=True, slots=True)
class Earlier:
    """An earlier job of one trial, as its ``job.json`` tells."""

    folder: Path
    trial: int
    record: dict[str, Any]

    @property
    def created_at(self) -> str:
        return str(self.record.get("created_at") or "")


@dataclass(frozen=True, slots=True)
class Continued:
    """The plan to run: of an earlier job (``earlier`` by trial), or of a new one with the
    reason why the latest job there was not continued."""

    plan: Plan
    earlier: dict[int, Earlier]
    why_new: str | None = None


def find(
    config: EvaluationConfig, settings: dict[str, Any], tasks: Sequence[Task], *, began: float
) -> Continued:
    """The latest matching job, or a new plan. Jobs created after ``began`` (epoch seconds)
    are not earlier ones: commands started together do not continue each other.

    A job matches when everything it planned is planned again, unchanged, and nothing else is
    (the same TASKS may have grown). Naming a job that exists and does not match is a
    ``UsageError``.
    """
    fresh = make_plan(config, settings, tasks)
    if config.new:
        return Continued(fresh, {})
    why_new: str | None = None
    for name, jobs in _candidates(config, began):
        mismatch = _mismatch(fresh, jobs)
        if mismatch is None:
            return Continued(_continue(fresh, name, jobs), {job.trial: job for job in jobs})
        if config.job_name is not None:
            raise UsageError(
                f"job {name} is another one: {mismatch}", fix="give another --job-name, or leave it out"
            )
        why_new = why_new or f"a new job, since {name} is another one: {mismatch}"
    return Continued(fresh, {}, why_new)


def reason_to_run(result: Mapping[str, Any] | None) -> str | None:
    """Why a planned rollout has to run (again), from the fields of its ``result.json``; None
    when it is finished."""
    if result is None:
        return "never finished"
    if result["outcome"] == "cancelled":
        return "was cancelled"
    if (result.get("rewards") or {}).get("reward") is None:
        category = result.get("error_category") or result.get("verifier_error_category")
        return f"ended unscored ({category or 'no reward'})"
    return None


def count_finished(continued: Continued) -> int:
    """How many planned rollouts an earlier job has finished already."""
    finished = 0
    for job in continued.plan.jobs:
        earlier = continued.earlier.get(job.trial)
        found = {r["rollout_name"]: r for r in current_records(earlier.folder)} if earlier else {}
        finished += sum(reason_to_run(found.get(planned.name)) is None for planned in job.rollouts)
    return finished


def config_of_job(folder: Path, given: dict[str, Any]) -> EvaluationConfig:
    """The configuration that continues the job in ``folder``. Values of environment
    variables are not on disk: they come from ``given`` or from this process."""
    job = read_job(folder)
    trials = int(job.get("trials") or 1)
    root = folder.resolve().parents[0 if trials == 1 else 2]
    stored = {key: value for key, value in job["config"].items() if value is not None}
    names = stored.pop("agent_env", [])
    for answered in ("max_retries", "include", "exclude"):
        stored.pop(answered, None)
    stored.update(
        tasks=[planned.task_path for planned in planned_rollouts(job)],
        sandbox=job["sandbox"],
        jobs_dir=str(root),
        job_name=folder.resolve().name,
        trials=trials,
        new=False,
    )
    asked = parse_pairs(given.pop("agent_env", []), "--agent-env", from_env=True)
    known = parse_pairs([name for name in names if name not in asked], "--agent-env", from_env=True)
    return make_config({**stored, **given, "agent_env": {**known, **asked}})


def _candidates(config: EvaluationConfig, began: float) -> Iterable[tuple[str, list[Earlier]]]:
    """Earlier jobs by name over all trials, latest first."""
    by_name: dict[str, list[Earlier]] = {}
    for trial in range(1, config.trials + 1):
        parent = job_parent(config, trial)
        if not parent.is_dir():
            continue
        for folder in parent.iterdir():
            if config.job_name not in (None, folder.name) or not (folder / "job.json").is_file():
                continue
            try:
                job = Earlier(folder, trial, read_job(folder))
            except UsageError:
                continue  # an unreadable or newer job is nobody's to continue
            if _epoch(job.created_at) < began:
                by_name.setdefault(folder.name, []).append(job)
    return sorted(by_name.items(), key=lambda item: max(job.created_at for job in item[1]), reverse=True)


def _mismatch(fresh: Plan, jobs: Sequence[Earlier]) -> str | None:
    """What keeps these jobs from being continued by this plan; None when they match."""
    wanted = {job.trial: {planned.identity for planned in job.rollouts} for job in fresh.jobs}
    digests = {task.name: task.digest for task in fresh.tasks.values()}
    for job in jobs:
        before = planned_rollouts(job.record)
        known = {planned.identity for planned in before}
        same_words = (job.record.get("config") or {}).get("tasks") == list(fresh.config.tasks)
        if known == wanted[job.trial] or (same_words and known < wanted[job.trial]):
            continue
        changed = differences(job.record.get("settings") or {}, fresh.settings)
        if changed:
            return ", ".join(changed[:4])
        gone = [planned.task for planned in before if planned.task not in digests]
        edited = [p.task for p in before if p.task in digests and digests[p.task] != p.task_digest]
        if edited:
            return f"task {edited[0]} was edited"
        return f"it also ran task {gone[0]}" if gone else "it ran fewer tasks"
    return None


def _continue(fresh: Plan, name: str, jobs: Sequence[Earlier]) -> Plan:
    """``fresh`` in the folders of the earlier jobs; what they planned keeps its name and group."""
    sweep = str(jobs[0].record.get("sweep") or fresh.sweep)
    plan = make_plan(fresh.config, fresh.settings, list(fresh.tasks.values()), sweep=sweep, job_name=name)
    known = {job.trial: {p.identity: p for p in planned_rollouts(job.record)} for job in jobs}
    merged = tuple(
        PlannedJob(
            job.folder, job.trial, tuple(_kept(planned, known.get(job.trial, {})) for planned in job.rollouts)
        )
        for job in plan.jobs
    )
    return replace(plan, jobs=merged)


def _kept(planned: PlannedRollout, known: dict[str, PlannedRollout]) -> PlannedRollout:
    earlier = known.get(planned.identity)
    return replace(planned, name=earlier.name, group_id=earlier.group_id) if earlier else planned


def _epoch(stamp: str) -> float:
    try:
        return datetime.fromisoformat(stamp).timestamp()
    except ValueError:
        return 0.0
