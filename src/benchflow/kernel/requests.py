"""From a task and a config to what each plane is asked for."""

from __future__ import annotations

from benchflow.contracts.config import RolloutConfig
from benchflow.contracts.gateway import ModelSpec
from benchflow.contracts.sandbox import ImageSource
from benchflow.contracts.task import Task

DEFAULT_WORKSPACE = "/app"


def image_source(task: Task, local_base: str | None, base_override: tuple[str, ...] = ()) -> ImageSource:
    """What decides the task's image. ``local_base`` and ``base_override`` are what the user
    said about it, if anything."""
    return ImageSource(
        name=task.name,
        context=task.environment_dir,
        dockerfile=task.dockerfile,
        docker_image=task.docker_image,
        local_base=local_base or task.local_base,
        build_timeout=task.build_timeout_sec,
        base_override=base_override,
    )


def model_spec(config: RolloutConfig, model: str) -> ModelSpec:
    """What the rollout may call, with its budgets."""
    return ModelSpec(
        model=model,
        policy_url=config.policy_url,
        policy_version=config.policy_version,
        sampling=config.sampling,
        max_context=config.max_context,
        max_tokens=config.max_tokens,
        max_calls=config.max_calls,
        max_cost_usd=config.max_cost_usd,
        train_mode=config.train_mode,
    )


def workspace(task: Task, image_workdir: str | None) -> str:
    """The agent's folder: never ``/``, which nobody may snapshot or re-own."""
    declared = task.workdir or image_workdir
    return declared if declared and declared.rstrip("/") else DEFAULT_WORKSPACE


def agent_user(task: Task, config: RolloutConfig) -> str | None:
    """The agent's user inside; ``None`` is root, which only ``sandbox_user=None`` asks for."""
    return config.sandbox_user and (task.agent_user or "agent")
