"""Everything that can be wrong is found here, before any folder exists.

``bench doctor`` asks the same functions.
"""

from __future__ import annotations

import asyncio
import errno
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from benchflow.agents import catalog
from benchflow.agents.bundle import BundleStatus, whole
from benchflow.contracts.agent import Agent
from benchflow.contracts.config import RuntimeConfig
from benchflow.contracts.errors import HostPressureError, PrerequisiteError, UsageError
from benchflow.contracts.gateway import ModelSpec
from benchflow.contracts.sandbox import SandboxProvider
from benchflow.contracts.task import Task
from benchflow.jobs.config import EvaluationConfig
from benchflow.kernel import registry
from benchflow.kernel.env import resolve_env
from benchflow.kernel.ownership import state_dir
from benchflow.kernel.planes import Planes, open_planes
from benchflow.kernel.requests import image_source
from benchflow.tasks.discover import find_tasks, load_tasks

SANDBOX_PATIENCE = 30.0
"""Seconds in which a sandbox must say whether it can start: a daemon may be far away, or hang."""

FULL = 256 << 10
"""Bytes of free disk below which not even one rollout can be written."""

SCARCE, FEW_INODES = 1 << 30, 10_000
"""Below these a run starts, and says that it may end early."""


@dataclass(frozen=True, slots=True)
class Checked:
    """A request that can be understood: its tasks, agents and models, and the sandbox to use."""

    tasks: tuple[Task, ...]
    sandbox: str
    agents: tuple[str, ...]
    models: tuple[ModelSpec, ...]
    agent_version: str | None = None
    notes: tuple[str, ...] = ()


async def check(config: EvaluationConfig) -> Checked:
    """Read tasks, agent and sandbox choice. Raises one error that names every problem."""
    if not config.agent:
        raise UsageError("no agent was named", fix="add -a NAME; `bench agent list` shows them")
    agent: Agent = registry.resolve("agent_catalogs", "default")(config.agent)
    tasks = select_tasks(config)
    _check_agent(config, agent, tasks)
    _check_variables(config, tasks)
    asked = config.sandbox if "sandbox" in config.model_fields_set else None
    sandbox, note = await choose_sandbox(asked, tasks)
    models = (model_spec(config),) if agent.capabilities().needs_model else ()
    return Checked(
        tuple(tasks), sandbox, (config.agent,), models, agent.version, notes=(note,) if note else ()
    )


def select_tasks(config: EvaluationConfig) -> list[Task]:
    """The tasks named by paths, folders and globs, after ``include`` and ``exclude``.

    A folder left out by its name is not even read, so that one broken task can be excluded.
    """
    if not config.tasks:
        raise UsageError("no task was named", fix="give a task folder, a folder of tasks, or a glob")
    folders = [path for path in find_tasks(config.tasks) if not _matches(path.name, config.exclude)]
    loaded = load_tasks(folders)
    tasks = [task for task in loaded if not _matches_task(task, config.exclude)]
    if config.include:
        unused = [p for p in config.include if not any(_matches_task(task, (p,)) for task in tasks)]
        if unused:
            raise UsageError(
                f"--include {unused[0]} matches no task", fix=f"tasks here: {_some(t.name for t in tasks)}"
            )
        tasks = [task for task in tasks if _matches_task(task, config.include)]
    if not tasks:
        raise UsageError("no task is left", fix="loosen --include and --exclude")
    seen: dict[str, Task] = {}
    for task in tasks:
        other = seen.setdefault(task.name, task)
        if other is not task:
            raise UsageError(
                f"two tasks are named {task.name!r}: {other.path} and {task.path}",
                fix="rename one, or run them as two jobs",
            )
    return tasks


async def choose_sandbox(asked: str | None, tasks: Sequence[Task]) -> tuple[str, str | None]:
    """The provider to use and, when it is not docker by default, the line that says so.

    Only the *default* choice of docker may fall back to local, and only when every task
    declares that it may run there: a score never depends silently on which daemon was up.
    """
    if asked not in (None, "docker"):
        registry.resolve("sandboxes", asked)
        return asked, None
    problem = await _docker_problem()
    if problem is None:
        return "docker", None
    others = [task.name for task in tasks if task.backend != "local"]
    if asked is not None or others:
        asks = f"; docker is needed for {_some(others)}" if others else ""
        fix = problem.fix or "repair it"
        if "--sandbox local" not in fix:
            fix += ", or use --sandbox local"
        raise PrerequisiteError(f"{problem.message}{asks}", fix=fix)
    return "local", f"{problem.message}; {_some(t.name for t in tasks)} may run locally: sandbox local"


async def _docker_problem() -> PrerequisiteError | None:
    provider: SandboxProvider = registry.resolve("sandboxes", "docker")()
    try:
        await sandbox_ready(provider)
    except PrerequisiteError as error:
        return error
    finally:
        await provider.close()
    return None


async def sandbox_ready(provider: SandboxProvider, patience: float = SANDBOX_PATIENCE) -> None:
    """The provider's own check, in bounded time. Raises ``PrerequisiteError``."""
    try:
        async with asyncio.timeout(patience):
            await provider.preflight()
    except TimeoutError:
        raise PrerequisiteError(
            f"the sandbox {provider.name!r} did not say within {patience:g} s whether it can start",
            fix="restart what it runs on",
        ) from None


def _check_agent(config: EvaluationConfig, agent: Agent, tasks: Sequence[Task]) -> None:
    if agent.capabilities().needs_model and not config.model:
        raise UsageError(
            f"agent {config.agent!r} needs a model", fix="add -m provider/name, e.g. -m scripted/PATH.yaml"
        )
    if config.agent == "oracle":
        without = [task.name for task in tasks if task.oracle is None]
        if without:
            raise UsageError(
                f"no reference solution for the oracle in {_some(without)}", fix="add oracle/solve.sh"
            )
    need = agent.capabilities().min_memory_mb or 0
    small = [task.name for task in tasks if need > (task.limits.memory_mb or need)]
    if small:
        raise UsageError(
            f"agent {config.agent!r} takes {need} MB of memory; {_some(small)} allows less",
            fix="raise the task's memory_mb",
        )


def _check_variables(config: EvaluationConfig, tasks: Sequence[Task]) -> None:
    """Every ``${VAR}`` of the request must have a value now; all missing ones are named."""
    problems: list[str] = []

    def look(template: Mapping[str, str], where: str) -> None:
        try:
            resolve_env(template, where)
        except UsageError as error:
            problems.append(error.message)

    look(config.agent_env, "--agent-env")
    for task in tasks:
        look(task.env, f"task {task.name}")
        look(task.verifier.env, f"the verifier of {task.name}")
        if config.agent == "oracle" and task.oracle is not None:
            look(task.oracle.env, f"the oracle of {task.name}")
    if problems:
        raise UsageError("; ".join(problems), fix="export them first")


async def open_checked(
    config: EvaluationConfig | RuntimeConfig, checked: Checked, say: Callable[[str], None]
) -> tuple[Planes, dict[str, Any] | None]:
    """Open the planes a job shares and prove that its disk has room, its sandbox can start, its
    endpoint answers and its agent is installed. Returns them with what the endpoint said; ``say``
    hears what a user should know. Raises ``PrerequisiteError``."""
    for folder in (Path(config.jobs_dir), state_dir()):
        if scarce := room(folder):
            say(scarce)
    planes = await open_planes(checked.sandbox, with_gateway=bool(checked.models))
    provider, gateway, probe = planes.provider, planes.gateway, None
    try:
        _, secrets = resolve_env(config.agent_env, "--agent-env", given=True)
        planes.redact.add(*secrets)
        await sandbox_ready(provider)
        for agent in checked.agents:
            await agent_fits(agent, provider)
        for spec in checked.models:  # before the images: those may be large, and far away
            assert gateway is not None  # opened for them
            probe = dict(await gateway.probe(spec))
        for task in checked.tasks:
            await provider.check(image_source(task, config.local_base, config.base_image_override))
        for agent in checked.agents:
            agent_whole(await catalog.ensure_bundle(agent, say))
    except BaseException as error:
        await planes.close()
        if isinstance(error, HostPressureError):
            raise PrerequisiteError(error.message, fix=error.fix) from error
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise PrerequisiteError(
                f"the disk of {existing(state_dir())} is full", fix="free space, or set BENCHFLOW_HOME=FOLDER"
            ) from error
        raise
    return planes, probe


async def agent_fits(name: str, provider: SandboxProvider) -> None:
    """Raise ``PrerequisiteError`` when what is installed here for an agent cannot run there."""
    there, here = (await provider.facts()).get("machine", platform.machine()), platform.machine()
    if there != here and catalog.bundle_status(name).needed:
        raise PrerequisiteError(
            f"agent {name} is installed for {here}, and the sandbox {provider.name!r} runs {there}",
            fix=f"run it from a {there} machine",
        )


def agent_whole(status: BundleStatus) -> None:
    """Raise ``PrerequisiteError`` when files of an installed agent are gone or cut short."""
    if status.folder is not None and not whole(status.folder, status.size_bytes):
        raise PrerequisiteError(
            f"agent {status.name} {status.version} is damaged: files are missing in {status.folder}",
            fix=f"bench agent remove {status.name}, then bench agent install {status.name}",
        )


def room(folder: os.PathLike[str]) -> str | None:
    """Raise ``PrerequisiteError`` when the disk of ``folder``, which need not exist, is full;
    return a line when little is left on it, else None."""
    path = existing(folder)
    free, inodes = free_space(path)
    if free is not None and free < FULL:
        raise PrerequisiteError(f"the disk of {path} is full", fix="free space, or choose another folder")
    if inodes == 0:
        raise PrerequisiteError(f"the disk of {path} has no inode left", fix="remove files from it")
    if free is not None and free < SCARCE:
        return f"only {free / 2**20:.0f} MB are free on the disk of {path}"
    if inodes is not None and inodes < FEW_INODES:
        return f"only {inodes} inodes are free on the disk of {path}"
    return None


def free_space(path: str) -> tuple[int | None, int | None]:
    """Bytes and inodes this user may still take on the disk of ``path``; None: not counted there."""
    disk = os.statvfs(path)
    if os.geteuid() == 0:
        blocks, inodes = disk.f_bfree, disk.f_ffree
    else:
        blocks, inodes = disk.f_bavail, disk.f_favail
    return blocks * disk.f_frsize if disk.f_blocks else None, inodes if disk.f_files else None


def existing(folder: os.PathLike[str]) -> str:
    """``folder``, or the nearest one above it that exists."""
    path = os.path.abspath(folder)
    while not os.path.lexists(path):
        path = os.path.dirname(path)
    return path


def model_spec(config: EvaluationConfig) -> ModelSpec:
    return ModelSpec(
        model=config.model or "",
        policy_url=config.policy_url,
        policy_version=config.policy_version,
        sampling=config.all_sampling,
        max_context=config.max_context,
        train_mode=config.train_mode and config.usage_tracking != "off",
    )


def check_writable(folder: os.PathLike[str], name: str = "--jobs-dir") -> None:
    """The folder that ``name`` names can be made and written to; says which part of it cannot."""
    path = existing(folder)
    if not os.path.isdir(path):
        raise UsageError(f"{name} {folder}: {path} is not a folder", fix="choose another folder")
    if not os.access(path, os.W_OK | os.X_OK):
        raise UsageError(f"{name} {folder}: {path} cannot be written to", fix="choose another folder")


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _matches_task(task: Task, patterns: Sequence[str]) -> bool:
    return _matches(task.name, patterns) or _matches(task.path.name, patterns)


def _some(names: Any, most: int = 5) -> str:
    found = list(names)
    more = f" and {len(found) - most} more" if len(found) > most else ""
    return ", ".join(found[:most]) + more
