"""From what happened to what is written: outcome, attribution, records."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from benchflow.contracts.agent import Agent, Usage
from benchflow.contracts.config import RolloutConfig
from benchflow.contracts.errors import BenchflowError, RolloutCancelled, RolloutError
from benchflow.contracts.gateway import RouteTotals
from benchflow.contracts.records import (
    AgentResult,
    AttributionRecord,
    FinalMetrics,
    Outcome,
    PolicyVersion,
    Result,
    SandboxFacts,
)
from benchflow.contracts.reward import VerifyResult
from benchflow.contracts.sandbox import Sandbox
from benchflow.contracts.task import Task
from benchflow.kernel.clock import Clock, utc_now
from benchflow.kernel.requests import agent_user

if TYPE_CHECKING:
    from benchflow.kernel.rollout import Rollout

PASS_REWARD = 1.0
"""A rollout passed when its reward reaches this; the reward itself is kept as it is."""


def outcome_of(error: BenchflowError | None, verdict: VerifyResult | None) -> Outcome:
    """A scored rollout passed or failed, whatever else ended it early."""
    if isinstance(error, RolloutCancelled):
        return "cancelled"
    if verdict is not None and verdict.reward is not None:
        return "passed" if verdict.reward >= PASS_REWARD else "failed"
    if error is not None or (verdict is not None and verdict.error is not None):
        return "errored"
    return "unscored"


def attribution_of(error: BenchflowError | None, verdict: VerifyResult | None) -> AttributionRecord:
    """May a trainer count it? By cause: what the policy earned counts, what the machinery
    broke does not."""
    if isinstance(error, RolloutError) and error.attribution == "mask":
        return AttributionRecord(verdict="mask", reason=error.category)
    if error is not None and not isinstance(error, RolloutError):
        return AttributionRecord(verdict="mask", reason=error.category)
    if verdict is None:
        return AttributionRecord(verdict="mask", reason="not verified")
    if verdict.reward is None:
        reason = verdict.error.category if verdict.error else "no reward"
        return AttributionRecord(verdict="mask", reason=reason)
    return AttributionRecord(verdict="score", reason=error.category if error else "verified")


def agent_result(
    totals: RouteTotals | None, usages: Sequence[Usage], n_tool_calls: int, n_prompts: int
) -> AgentResult:
    """Token counts from the gateway when it saw calls, else from the agents' own account."""
    if totals is not None and totals.calls:
        counts = Usage(
            totals.prompt_tokens,
            totals.completion_tokens,
            totals.cache_read_tokens,
            totals.cache_creation_tokens,
            totals.cost_usd,
            source="gateway",
        )
    else:
        counts = _sum_usage(usages)
    known = counts.input_tokens is not None and counts.output_tokens is not None
    details: dict[str, Any] | None = None
    if totals is not None and totals.calls:
        details = {
            "calls": totals.calls,
            "failed_calls": totals.failed_calls,
            "cost_reason": totals.cost_reason,
            "retry_wait_sec": round(totals.retry_wait_sec, 6),
        }
    elif context := [usage.context_tokens for usage in usages if usage.context_tokens is not None]:
        details = {"context_tokens": max(context)}
    return AgentResult(
        n_tool_calls=n_tool_calls,
        n_prompts=n_prompts,
        n_input_tokens=counts.input_tokens,
        n_output_tokens=counts.output_tokens,
        n_cache_read_tokens=counts.cache_read_tokens,
        n_cache_creation_tokens=counts.cache_creation_tokens,
        total_tokens=(counts.input_tokens or 0) + (counts.output_tokens or 0) if known else None,
        cost_usd=counts.cost_usd,
        usage_source=counts.source,
        usage_details=details,
    )


def _sum_usage(usages: Sequence[Usage]) -> Usage:
    counted = [usage for usage in usages if usage.source != "none"]
    if not counted:
        return Usage()

    def total(values: list[int | None]) -> int | None:
        return None if any(value is None for value in values) else sum(value or 0 for value in values)

    costs = [usage.cost_usd for usage in counted]
    partial = any(usage.source == "agent_partial" for usage in counted)
    return Usage(
        total([usage.input_tokens for usage in counted]),
        total([usage.output_tokens for usage in counted]),
        total([usage.cache_read_tokens for usage in counted]),
        total([usage.cache_creation_tokens for usage in counted]),
        None if any(cost is None for cost in costs) else sum(cost or 0.0 for cost in costs),
        source="agent_partial" if partial else counted[-1].source,
    )


def result_record(
    rollout: Rollout,
    clock: Clock,
    totals: RouteTotals | None,
    usages: Sequence[Usage],
    agents: Mapping[str, Agent],
) -> Result:
    """The whole of ``result.json``."""
    config, task, verdict, error = rollout.config, rollout.task, rollout.verdict, rollout.error
    role = config.roles[0]
    agent = agents.get(role.agent)
    counts = agent_result(totals, usages, rollout.n_tool_calls, rollout.n_prompts)
    verifier_error = verdict.error if verdict else None
    rewards = (
        None if verdict is None or verdict.reward is None else {**verdict.items, "reward": verdict.reward}
    )
    return Result(
        task_name=task.name,
        task_digest=task.digest,
        rollout_name=rollout.files.folder.name,
        trial=config.trial,
        group_id=config.group_id,
        job=config.job,
        agent=role.agent,
        agent_name=agent.name if agent else None,
        agent_version=agent.version if agent else None,
        model=role.model,
        policy_version=PolicyVersion(
            first=totals.policy_version_first if totals else None,
            last=totals.policy_version_last if totals else None,
        ),
        rewards=rewards,
        outcome=outcome_of(error, verdict),
        attribution=attribution_of(error, verdict),
        n_tool_calls=rollout.n_tool_calls,
        n_prompts=rollout.n_prompts,
        agent_result=counts,
        final_metrics=FinalMetrics(
            total_prompt_tokens=counts.n_input_tokens,
            total_completion_tokens=counts.n_output_tokens,
            total_cached_tokens=counts.n_cache_read_tokens,
            total_cost_usd=counts.cost_usd,
            total_steps=len(rollout.tree.nodes) - 1,
        ),
        error=str(error) if error else None,
        error_category=error.category if error else None,
        verifier_error=str(verifier_error) if verifier_error else None,
        verifier_error_category=verifier_error.category if verifier_error else None,
        partial_trajectory=error is not None,
        trajectory_source="session" if rollout.n_prompts else None,
        stop_reason=rollout.stop_reason,
        verify_mode=verdict.mode if verdict else None,
        hardening=config.hardening,
        sandbox=sandbox_facts(config, rollout.sandbox),
        started_at=clock.started_at,
        finished_at=utc_now(),
        timing=clock.timing(model_wait=totals.model_wait_sec if totals else None),
        token_capture=totals.token_capture if totals else "none",
        scenes=scenes_record(config),
        identity=config.identity,
        retries=config.retries,
    )


def sandbox_facts(config: RolloutConfig, sandbox: Sandbox | None) -> SandboxFacts:
    if sandbox is None:
        return SandboxFacts(provider=config.sandbox_name)
    enforced = sandbox.enforced
    return SandboxFacts(
        provider=sandbox.image.provider,
        base=sandbox.image.base,
        image_digest=sandbox.image.digest,
        limits={name: enforced.get(name) for name in ("memory_mb", "cpus", "pids", "storage_mb")},
        network={"mode": enforced.get("network"), "model_door": enforced.get("model_door")},
        users={"ids": enforced.get("users")},
    )


def scenes_record(config: RolloutConfig) -> list[dict[str, Any]]:
    return [
        {
            "name": scene.name,
            "roles": [{"name": role.name, "agent": role.agent, "model": role.model} for role in scene.roles],
            "turns": [turn.role for turn in scene.turns],
        }
        for scene in config.resolved_scenes()
    ]


def config_record(
    config: RolloutConfig, task: Task, agents: Mapping[str, Agent], sandbox: Sandbox | None
) -> dict[str, Any]:
    """``config.json``: what was asked and, once the sandbox runs, what was enforced.
    Environment variables appear by name only."""
    role = config.roles[0]
    agent = agents.get(role.agent)
    return {
        "schema_version": 1,
        "task_path": str(config.task_path),
        "task_name": task.name,
        "task_digest": task.digest,
        "agent": role.agent,
        "agent_version": agent.version if agent else None,
        "model": role.model,
        "reasoning_effort": role.reasoning_effort,
        "prompts": len(config.prompts),
        "scenes": scenes_record(config),
        "sandbox": config.sandbox_name,
        "local_base": config.local_base or task.local_base,
        "base_image_override": list(config.base_image_override),
        "environment_manifest": None,
        "skill_mode": "no-skill",
        "sandbox_user": agent_user(task, config),
        "timeouts": {
            "agent_sec": config.agent_timeout if config.agent_timeout is not None else task.agent_timeout_sec,
            "agent_idle_sec": config.agent_idle_timeout,
            "verifier_sec": task.verifier.timeout_sec,
            "setup_sec": config.sandbox_setup_timeout,
            "clock": config.timeout_clock,
        },
        "verify_mode": config.verify_mode,
        "hardening": config.hardening,
        "agent_env": sorted({*config.agent_env, *role.env}),
        "task_env": sorted(task.env),
        "sampling": dict(config.sampling),
        "train_mode": config.train_mode,
        "seed": config.seed,
        "trial": config.trial,
        "group_id": config.group_id,
        "job": config.job,
        "identity": config.identity,
        "asked": {"limits": asdict(task.limits), "network": asdict(task.network)},
        "enforced": dict(sandbox.enforced) if sandbox else None,
        "image": {"digest": sandbox.image.digest, "base": sandbox.image.base} if sandbox else None,
        "host": {
            "system": platform.system(),
            "machine": platform.machine(),
            "python": platform.python_version(),
        },
    }
