"""What a user asks for: a rollout as roles, scenes and turns in one sandbox."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchflow.contracts.errors import UsageError


@dataclass(frozen=True, slots=True)
class Role:
    """An agent that takes part, with its model."""

    name: str
    agent: str
    model: str | None = None
    reasoning_effort: str | None = None
    env: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True, slots=True)
class Turn:
    """One prompt to one role. ``prompt=None`` sends the task's own instruction."""

    role: str
    prompt: str | None = None


@dataclass(frozen=True, slots=True)
class Scene:
    """Authoring sugar: compiled to steps before the run, without a runtime object."""

    name: str = "main"
    roles: tuple[Role, ...] = ()
    turns: tuple[Turn, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "roles", tuple(self.roles))
        object.__setattr__(self, "turns", tuple(self.turns))
        known = {role.name for role in self.roles}
        for turn in self.turns:
            if turn.role not in known:
                raise UsageError(
                    f"scene {self.name!r}: a turn names the undeclared role {turn.role!r}",
                    fix=f"declared roles: {', '.join(sorted(known)) or 'none'}",
                )

    @classmethod
    def single(
        cls,
        agent: str,
        model: str | None = None,
        *,
        prompts: tuple[str | None, ...] = (None,),
        reasoning_effort: str | None = None,
        name: str = "main",
    ) -> Scene:
        """One role; one turn per prompt in the same session."""
        role = Role("agent", agent, model, reasoning_effort)
        return cls(name, (role,), tuple(Turn("agent", prompt) for prompt in prompts))


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeConfig:
    """Settings of a run beside task, agent and model. ``environment`` and ``sandbox`` are two
    names of the same choice."""

    environment: str | None = None
    sandbox: str | None = None
    jobs_dir: Path | str = "jobs"
    prompts: tuple[str | None, ...] = (None,)
    local_base: str | None = None
    base_image_override: tuple[str, ...] = ()
    """``IMAGE`` for the base of the task's image, or ``NAME=IMAGE`` for one that it names."""
    seed: int = 0
    policy_url: str | None = None
    policy_version: str | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict[str, Any])
    train_mode: bool = True
    max_context: int | None = None
    max_tokens: int | None = None
    max_calls: int | None = None
    max_cost_usd: float | None = None
    agent_env: Mapping[str, str] = field(default_factory=dict[str, str])
    sandbox_user: str | None = "agent"
    sandbox_setup_timeout: float = 120.0
    agent_timeout: float | None = None
    """Wall-clock cap of the agent in seconds; ``None`` takes the task's, 0 means no cap."""
    agent_idle_timeout: float | None = None
    timeout_clock: str = "wall"
    """``wall``, or ``work``: time spent waiting for the gateway's own retries is left out."""
    verify_mode: str | None = None
    """``shared`` or ``isolated``; ``None`` takes the task's, then ``shared``."""
    hardening: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutConfig(RuntimeConfig):
    """One rollout, whole."""

    task_path: Path | str
    scenes: tuple[Scene, ...] = ()
    agent: str | None = None
    model: str | None = None
    reasoning_effort: str | None = None
    rollout_dir: Path | str | None = None
    """Exact folder to write; by default ``<jobs_dir>/<start time>/<task>__<8 hex>``."""
    rollout_name: str | None = None
    job: str = ""
    trial: int = 1
    group_id: str | None = None
    skip_verify: bool = False
    identity: str | None = None
    """Digest of everything that makes two rollouts comparable; set by the job's plan."""
    retries: int = 0
    """How many earlier attempts of this planned rollout were thrown away."""

    def __post_init__(self) -> None:
        if self.environment and self.sandbox and self.environment != self.sandbox:
            raise UsageError(
                f"environment={self.environment!r} and sandbox={self.sandbox!r} disagree",
                fix="give one of them",
            )
        if not self.scenes and not self.agent:
            raise UsageError("a rollout needs an agent", fix="pass agent=… or scenes=[…]")
        if self.scenes and self.agent:
            raise UsageError("agent= and scenes= were both given", fix="keep one of them")
        if self.timeout_clock not in ("wall", "work"):
            raise UsageError(f"timeout_clock {self.timeout_clock!r} is not wall or work")
        if self.verify_mode not in (None, "shared", "isolated"):
            raise UsageError(f"verify_mode {self.verify_mode!r} is not shared or isolated")
        object.__setattr__(self, "scenes", tuple(self.scenes))
        object.__setattr__(self, "prompts", tuple(self.prompts))
        object.__setattr__(self, "task_path", Path(self.task_path))

    @property
    def sandbox_name(self) -> str:
        return self.sandbox or self.environment or "docker"

    def resolved_scenes(self) -> tuple[Scene, ...]:
        if self.scenes:
            return self.scenes
        assert self.agent is not None
        return (
            Scene.single(
                self.agent,
                self.model,
                prompts=self.prompts,
                reasoning_effort=self.reasoning_effort,
            ),
        )

    @property
    def roles(self) -> tuple[Role, ...]:
        """The roles of all scenes, in order; the first is the one results are named after."""
        return tuple(role for scene in self.resolved_scenes() for role in scene.roles)

    def with_(self, **changes: Any) -> RolloutConfig:
        return replace(self, **changes)
