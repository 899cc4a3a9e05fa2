"""BenchFlow: scored agent rollouts for evaluation, training and monitoring.

Names are loaded when first used, so that ``import benchflow`` costs almost nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

_HOMES = {
    "Agent": "benchflow.jobs.facade",
    "Environment": "benchflow.jobs.facade",
    "RuntimeConfig": "benchflow.contracts.config",
    "run": "benchflow.jobs.facade",
    "Evaluation": "benchflow.jobs.evaluation",
    "EvaluationResult": "benchflow.jobs.evaluation",
    "EvaluationConfig": "benchflow.jobs.config",
    "RetryConfig": "benchflow.jobs.config",
    "Job": "benchflow.jobs.load",
    "load_job": "benchflow.jobs.load",
    "Rollout": "benchflow.kernel.rollout",
    "RolloutEvent": "benchflow.kernel.events",
    "RolloutConfig": "benchflow.contracts.config",
    "Role": "benchflow.contracts.config",
    "Scene": "benchflow.contracts.config",
    "Turn": "benchflow.contracts.config",
    "RolloutResult": "benchflow.contracts.records",
    "ExecResult": "benchflow.contracts.sandbox",
    "Sandbox": "benchflow.contracts.sandbox",
    "SandboxProvider": "benchflow.contracts.sandbox",
    "Task": "benchflow.contracts.task",
    "RewardEvent": "benchflow.contracts.reward",
    "VerifyResult": "benchflow.contracts.reward",
    "BenchflowError": "benchflow.contracts.errors",
    "stream_rollouts": "benchflow.training.stream",
    "load_task": "benchflow.tasks.load",
}

__all__ = [
    "Agent",
    "BenchflowError",
    "Environment",
    "Evaluation",
    "EvaluationConfig",
    "EvaluationResult",
    "ExecResult",
    "Job",
    "RetryConfig",
    "RewardEvent",
    "Role",
    "Rollout",
    "RolloutConfig",
    "RolloutEvent",
    "RolloutResult",
    "RuntimeConfig",
    "Sandbox",
    "SandboxProvider",
    "Scene",
    "Task",
    "Turn",
    "VerifyResult",
    "__version__",
    "load_job",
    "load_task",
    "run",
    "stream_rollouts",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("benchflow")
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'benchflow' has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__


if TYPE_CHECKING:
    __version__: str
    from benchflow.contracts.config import Role as Role
    from benchflow.contracts.config import RolloutConfig as RolloutConfig
    from benchflow.contracts.config import RuntimeConfig as RuntimeConfig
    from benchflow.contracts.config import Scene as Scene
    from benchflow.contracts.config import Turn as Turn
    from benchflow.contracts.errors import BenchflowError as BenchflowError
    from benchflow.contracts.records import RolloutResult as RolloutResult
    from benchflow.contracts.reward import RewardEvent as RewardEvent
    from benchflow.contracts.reward import VerifyResult as VerifyResult
    from benchflow.contracts.sandbox import ExecResult as ExecResult
    from benchflow.contracts.sandbox import Sandbox as Sandbox
    from benchflow.contracts.sandbox import SandboxProvider as SandboxProvider
    from benchflow.contracts.task import Task as Task
    from benchflow.jobs.config import EvaluationConfig as EvaluationConfig
    from benchflow.jobs.config import RetryConfig as RetryConfig
    from benchflow.jobs.evaluation import Evaluation as Evaluation
    from benchflow.jobs.evaluation import EvaluationResult as EvaluationResult
    from benchflow.jobs.facade import Agent as Agent
    from benchflow.jobs.facade import Environment as Environment
    from benchflow.jobs.facade import run as run
    from benchflow.jobs.load import Job as Job
    from benchflow.jobs.load import load_job as load_job
    from benchflow.kernel.events import RolloutEvent as RolloutEvent
    from benchflow.kernel.rollout import Rollout as Rollout
    from benchflow.tasks.load import load_task as load_task
    from benchflow.training.stream import stream_rollouts as stream_rollouts
