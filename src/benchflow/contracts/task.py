"""A task as the engine runs it, whichever layout it was written in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from benchflow.contracts.sandbox import Limits, NetworkPolicy


@dataclass(frozen=True, slots=True)
class VerifierPlan:
    """The script verifier: ``directory`` goes to ``target`` and ``command`` runs there."""

    directory: Path
    target: str
    command: str
    timeout_sec: float = 600.0
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    user: str | None = None
    service: str = "main"
    network: NetworkPolicy | None = None
    isolated: bool = False
    cleanup_conftests: bool = True
    kill_processes: bool = True
    pytest_plugins: tuple[str, ...] = ()
    reward_range: tuple[float, float] = (0.0, 1.0)
    reward_text: str = "/logs/verifier/reward.txt"
    reward_json: str = "/logs/verifier/reward.json"
    expects_ctrf: bool = False


@dataclass(frozen=True, slots=True)
class OraclePlan:
    directory: Path
    target: str
    command: str
    timeout_sec: float | None = None
    env: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True, slots=True)
class Task:
    """Read-only. ``digest`` pins every file of the package (see ``tasks.digest``)."""

    name: str
    path: Path
    layout: Literal["task.md", "split"]
    digest: str
    instruction: str
    verifier: VerifierPlan
    oracle: OraclePlan | None = None
    environment_dir: Path | None = None
    dockerfile: Path | None = None
    docker_image: str | None = None
    local_base: str | None = None
    backend: str | None = None
    """``benchflow.runtime_policy.backend``: ``local`` lets a task run without a container engine."""
    agent_timeout_sec: float | None = None
    agent_user: str | None = "agent"
    build_timeout_sec: float = 600.0
    limits: Limits = field(default_factory=Limits)
    network: NetworkPolicy = field(default_factory=NetworkPolicy)
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    workdir: str | None = None
    artifacts: tuple[str, ...] = ()
    metadata: Mapping[str, object] = field(default_factory=dict[str, object])
    warnings: tuple[str, ...] = ()
