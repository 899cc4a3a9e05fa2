"""Tasks x repeats, laid out as jobs of planned rollouts before anything starts.

one trial      <jobs-dir>/<job>/
--trials N     <jobs-dir>/<agent>/trial-NN/<job>/     each a job of its own, one scheduler
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchflow.contracts.config import RolloutConfig
from benchflow.contracts.task import Task
from benchflow.jobs.identity import digest, rollout_identity
from benchflow.kernel.names import rollout_name, rollout_slug, start_name

if TYPE_CHECKING:
    from benchflow.jobs.config import EvaluationConfig


@dataclass(frozen=True, slots=True)
class PlannedRollout:
    """One rollout that the job will run. ``name`` is its folder in the job and stays the
    same through retries and resumes."""

    name: str
    task: str
    task_path: str
    task_digest: str
    trial: int
    seed: int
    group_id: str
    identity: str

    @classmethod
    def parse(cls, record: dict[str, Any]) -> PlannedRollout:
        return cls(**{key: record[key] for key in cls.__slots__})


@dataclass(frozen=True, slots=True)
class PlannedJob:
    """One folder of rollouts: all tasks, one trial of each."""

    folder: Path
    trial: int
    rollouts: tuple[PlannedRollout, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that will run. ``sweep`` is shared by the jobs that one command started."""

    config: EvaluationConfig
    settings: dict[str, Any]
    sweep: str
    job_name: str
    jobs: tuple[PlannedJob, ...]
    tasks: dict[str, Task] = field(default_factory=dict[str, Task])
    """By task name; names are unique within a plan."""

    @property
    def rollouts(self) -> int:
        return sum(len(job.rollouts) for job in self.jobs)

    def in_order(self) -> Iterator[tuple[PlannedJob, PlannedRollout]]:
        """Members of a group beside each other, so that they start together."""
        for column in zip(*(job.rollouts for job in self.jobs), strict=True):
            yield from zip(self.jobs, column, strict=True)


def job_parent(config: EvaluationConfig, trial: int) -> Path:
    """The folder that holds the jobs of one trial."""
    if config.trials == 1:
        return config.jobs_dir
    return config.jobs_dir / rollout_slug(config.agent or "agent") / f"trial-{trial:02d}"


def make_plan(
    config: EvaluationConfig,
    settings: dict[str, Any],
    tasks: Sequence[Task],
    *,
    sweep: str | None = None,
    job_name: str | None = None,
) -> Plan:
    """Plan every rollout. Nothing is written; the folder names are not reserved yet."""
    sweep = sweep or secrets.token_hex(8)
    name = job_name or config.job_name or start_name()
    jobs = tuple(
        PlannedJob(
            job_parent(config, trial) / name,
            trial,
            tuple(_planned(config, settings, task, trial, sweep) for task in tasks),
        )
        for trial in range(1, config.trials + 1)
    )
    return Plan(config, settings, sweep, name, jobs, {task.name: task for task in tasks})


def _planned(
    config: EvaluationConfig, settings: dict[str, Any], task: Task, trial: int, sweep: str
) -> PlannedRollout:
    group = digest({"sweep": sweep, "settings": settings, "task": task.name, "task_digest": task.digest})
    return PlannedRollout(
        name=rollout_name(task.name),
        task=task.name,
        task_path=str(task.path.resolve()),
        task_digest=task.digest,
        trial=trial,
        seed=config.seed,
        group_id=f"group-{group[:16]}",
        identity=rollout_identity(settings, task.name, task.digest, trial),
    )


def reserve(config: EvaluationConfig, name: str, *, exact: bool) -> str:
    """Make the first job's folder and return the job name that is free in every trial.

    A start time gets ``-2``, ``-3`` … until one is free; an ``exact`` name is only tried once
    and raises ``FileExistsError``.
    """
    first = job_parent(config, 1)
    first.mkdir(parents=True, exist_ok=True)
    attempt = 1
    while True:
        candidate = name if attempt == 1 else f"{name}-{attempt}"
        try:
            if any((job_parent(config, trial) / candidate).exists() for trial in range(2, config.trials + 1)):
                raise FileExistsError(candidate)
            (first / candidate).mkdir()
            return candidate
        except FileExistsError:
            if exact:
                raise
        attempt += 1


def renamed(plan: Plan, name: str) -> Plan:
    """The same plan in folders of another job name."""
    jobs = tuple(replace(job, folder=job.folder.with_name(name)) for job in plan.jobs)
    return replace(plan, job_name=name, jobs=jobs)


_OF_THE_JOB = {"jobs_dir", "sandbox", "seed", "sampling", "train_mode", "max_tokens", "max_cost_usd"}
"""Settings that a rollout has by the same name, with another value or meaning."""


def rollout_config(plan: Plan, job: PlannedJob, planned: PlannedRollout, *, retries: int) -> RolloutConfig:
    """What the kernel is told to run."""
    config = plan.config
    same = RolloutConfig.__dataclass_fields__.keys() & type(plan.config).model_fields.keys() - _OF_THE_JOB
    return RolloutConfig(
        **{name: getattr(config, name) for name in same},
        task_path=plan.tasks[planned.task].path,
        prompts=config.prompt or (None,),
        sandbox=plan.settings["sandbox"],
        rollout_dir=job.folder / planned.name,
        rollout_name=planned.name,
        job=job.folder.name,
        trial=planned.trial,
        group_id=planned.group_id,
        seed=planned.seed,
        sampling=config.all_sampling,
        train_mode=config.train_mode and config.usage_tracking != "off",
        verify_mode=config.verify,
        identity=planned.identity,
        retries=retries,
    )
