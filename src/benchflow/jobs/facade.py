"""``bf.run``: one rollout, in the three forms of the public API.

    result = await bf.run(RolloutConfig(…))
    result = await bf.run(bf.Agent("mini", model=…), bf.Environment.from_task("tasks/x"), RuntimeConfig(…))
    result = await bf.run("mini", task_path="tasks/x", model=…, config=RuntimeConfig(…))

``Agent`` and ``Environment`` here are configuration, not the contracts of the planes.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, fields
from pathlib import Path

from benchflow.contracts.config import RolloutConfig, RuntimeConfig
from benchflow.contracts.errors import UsageError
from benchflow.contracts.records import Result
from benchflow.contracts.task import Task
from benchflow.jobs import preflight
from benchflow.jobs.preflight import Checked
from benchflow.jobs.store import JobStore
from benchflow.kernel import registry
from benchflow.kernel.files import rollout_folder
from benchflow.kernel.planes import Planes
from benchflow.kernel.requests import model_spec
from benchflow.kernel.rollout import Rollout


@dataclass(frozen=True, slots=True)
class Agent:
    """Who acts: a registered agent's name, with its model."""

    name: str
    model: str | None = None
    reasoning_effort: str | None = None


@dataclass(frozen=True, slots=True)
class Environment:
    """Where it acts: a task in a sandbox."""

    task_path: Path
    sandbox: str | None = None

    @classmethod
    def from_task(cls, task_path: str | os.PathLike[str], *, sandbox: str | None = None) -> Environment:
        return cls(Path(task_path), sandbox)


async def run(
    subject: RolloutConfig | Agent | str,
    environment: Environment | None = None,
    config: RuntimeConfig | None = None,
    *,
    task_path: str | os.PathLike[str] | None = None,
    model: str | None = None,
) -> Result:
    """Run one rollout to its scored end. A failed rollout is a result, not an exception;
    ``UsageError`` and ``PrerequisiteError`` are raised before anything is written."""
    return await _run_one(_rollout_config(subject, environment, config, task_path, model))


def _rollout_config(
    subject: RolloutConfig | Agent | str,
    environment: Environment | None,
    config: RuntimeConfig | None,
    task_path: str | os.PathLike[str] | None,
    model: str | None,
) -> RolloutConfig:
    if isinstance(subject, RolloutConfig):
        if environment is not None or config is not None or task_path is not None or model is not None:
            raise UsageError("bf.run(RolloutConfig) takes nothing else", fix="set it in the RolloutConfig")
        return subject
    if isinstance(subject, str):
        if task_path is None:
            raise UsageError("bf.run(agent name) needs task_path=…")
        subject, environment = Agent(subject, model), Environment.from_task(task_path)
    elif environment is None:
        raise UsageError("bf.run(agent) needs an environment", fix="pass bf.Environment.from_task(path)")
    given = config or RuntimeConfig()
    settings = {item.name: getattr(given, item.name) for item in fields(RuntimeConfig)}
    if environment.sandbox is not None:
        settings |= {"sandbox": environment.sandbox, "environment": None}
    return RolloutConfig(
        task_path=environment.task_path,
        agent=subject.name,
        model=subject.model,
        reasoning_effort=subject.reasoning_effort,
        **settings,
    )


async def _run_one(config: RolloutConfig) -> Result:
    task: Task = registry.resolve("task_loaders", "default")(Path(config.task_path))
    sandbox, note = await preflight.choose_sandbox(config.sandbox or config.environment, [task])
    if note:
        print(note, file=sys.stderr)
    config = config.with_(sandbox=sandbox, environment=None)
    models = {role.model: model_spec(config, role.model) for role in config.roles if role.model}
    agents = tuple(dict.fromkeys(role.agent for role in config.roles))
    checked = Checked((task,), sandbox, agents, tuple(models.values()))
    planes, _ = await preflight.open_checked(config, checked, lambda line: print(line, file=sys.stderr))
    try:
        await planes.provider.reap()
        return await _in_own_job(config, task, planes)
    finally:
        await planes.close()


async def _in_own_job(config: RolloutConfig, task: Task, planes: Planes) -> Result:
    """Run in a job folder of its own, unless the caller named the rollout's folder."""
    if config.rollout_dir is not None:
        result = await Rollout(config, planes, task=task).run()
        result.rollout_path = str(config.rollout_dir)
        return result
    folder = rollout_folder(config, task)
    config = config.with_(job=folder.parent.name, rollout_dir=folder)
    result = await Rollout(config, planes, task=task).run()
    store = JobStore(folder.parent, planes.redact)
    store.append(result)
    store.close()
    result.rollout_path = str(folder)
    return result
