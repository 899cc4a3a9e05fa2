"""How a state is scored."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from benchflow.contracts.errors import VerifierError
from benchflow.contracts.sandbox import Sandbox, SandboxImage, SandboxProvider
from benchflow.contracts.task import Task

Space = Literal["output", "action", "reasoning", "memory"]
Granularity = Literal["terminal", "step"]
VerifyMode = Literal["shared", "isolated"]


@dataclass(frozen=True, slots=True)
class RewardEvent:
    space: Space
    granularity: Granularity
    value: float
    source: str
    step: str | None = None


@dataclass(frozen=True, slots=True)
class VerifyResult:
    """``reward`` is None when the verifier gave none; then ``error`` says why."""

    reward: float | None
    items: Mapping[str, float] = field(default_factory=dict[str, float])
    events: tuple[RewardEvent, ...] = ()
    error: VerifierError | None = None
    mode: VerifyMode = "shared"
    output: str = ""
    notes: tuple[str, ...] = ()
    """What a reader should know of how it was scored: links dropped, output cut."""


@dataclass(frozen=True, slots=True)
class VerifyRequest:
    """What a reward function may look at. ``node`` is the id of the state that is scored;
    ``path`` are the ids from the root to it and ``subtree`` those below it."""

    task: Task
    node: str
    path: tuple[str, ...]
    subtree: tuple[str, ...]
    sandbox: Sandbox
    provider: SandboxProvider
    image: SandboxImage
    """The task's prepared image: isolated verification starts a fresh sandbox from it."""
    logs: Path
    """Host folder of the rollout's ``verifier/`` files."""
    workspace: str
    agent_user: str | None
    mode: VerifyMode = "shared"
    hardening: bool = True
    baseline: object | None = None
    """What ``Reward.baseline`` returned before the agent acted."""
    timeout: float | None = None
    soft: bool = False
    """Between rounds: nothing of the agent's is killed, restored or re-owned."""
    redact: Callable[[bytes], bytes] | None = None
    """Masks secret values in what is written to ``logs``."""


class Reward(Protocol):
    async def baseline(self, task: Task, sandbox: Sandbox, workspace: str) -> object:
        """Called once before the agent acts: what hardening must restore afterwards."""
        ...

    async def score(self, request: VerifyRequest) -> VerifyResult:
        """Never raises for a verifier's own fault: that is a ``VerifyResult`` with an error."""
        ...
