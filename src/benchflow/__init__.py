"""BenchFlow: scored agent rollouts for evaluation, training and monitoring.

Names are loaded when first used, so that ``import benchflow`` costs almost nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

_HOMES = {
    "Agent": "benchflow.jobs.facade",
    "Environment": "benchflow.jobs.facade",
    "RuntimeConfig": "benchflow.jobs.facade",
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

__all__ = sorted([*_HOMES, "__version__"])


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
    from benchflow.contracts.config import Role, RolloutConfig, Scene, Turn
    from benchflow.kernel.rollout import Rollout
