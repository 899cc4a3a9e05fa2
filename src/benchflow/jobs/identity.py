"""What makes two rollouts comparable, as one digest. Not endpoints, ports, paths or concurrency."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

from benchflow.kernel.storage import dumps

if TYPE_CHECKING:
    from benchflow.jobs.config import EvaluationConfig

SETTINGS = {
    *("agent", "model", "policy_version", "reasoning_effort", "prompt", "train_mode", "max_context"),
    *("sandbox", "local_base", "sandbox_user", "agent_timeout", "agent_idle_timeout", "timeout_clock"),
    *("verify", "hardening", "seed", "base_image_override"),
}
"""Fields of the configuration that change what a rollout is. The task digest covers the rest:
instruction, Dockerfile, verifier and the limits the task asks for."""


def settings_record(config: EvaluationConfig, agent_version: str | None, sandbox: str) -> dict[str, Any]:
    """The comparable settings. ``sandbox`` is the provider that really runs."""
    record = config.model_dump(mode="json", include=SETTINGS)
    record.update(
        agent_version=agent_version,
        sampling=config.all_sampling,
        sandbox=sandbox,
        skill_mode="no-skill",
        loop=None,
        environment_manifest=None,
    )
    return record


def rollout_identity(settings: dict[str, Any], task_name: str, task_digest: str, trial: int) -> str:
    return digest({"settings": settings, "task": task_name, "task_digest": task_digest, "trial": trial})


def digest(record: Any) -> str:
    """Same for equal records, whatever the order of their keys."""
    return hashlib.sha256(dumps(_sorted(record))).hexdigest()[:32]


def _sorted(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _sorted(value[key]) for key in sorted(value, key=str)}
    if isinstance(value, (list, tuple)):
        return [_sorted(item) for item in value]
    return value


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """``name: old -> new`` for each setting that differs, in order of name."""
    return [
        f"{key}: {before.get(key)} -> {after.get(key)}"
        for key in sorted({*before, *after})
        if before.get(key) != after.get(key)
    ]
