"""Who acts: an agent connects to a sandbox and yields a live session."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Literal, Protocol, runtime_checkable

from benchflow.contracts.gateway import ModelRoute
from benchflow.contracts.sandbox import Mount, Sandbox


class StopReason(StrEnum):
    """Why a turn ended. The first five are the protocol's own; the rest are ours."""

    END_TURN = "end_turn"
    MAX_TOKENS = "max_tokens"
    MAX_TURN_REQUESTS = "max_turn_requests"
    REFUSAL = "refusal"
    CANCELLED = "cancelled"
    CONTEXT_LIMIT = "context_limit"
    TIMEOUT = "timeout"
    BUDGET = "budget"


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of a session; ``None`` is unknown, never 0 for unknown.

    ``source`` says who counted: ``gateway``, ``agent``, ``agent_partial`` (the last
    running total of a turn that never ended), or ``none``.
    """

    input_tokens: int | None = None
    output_tokens: int | None = None
    cache_read_tokens: int | None = None
    cache_creation_tokens: int | None = None
    cost_usd: float | None = None
    context_tokens: int | None = None
    """Tokens in the model's context when last told; often all that an unfinished turn reveals."""
    source: str = "none"


@dataclass(frozen=True, slots=True)
class AgentCapabilities:
    needs_model: bool = True
    runs_inside: bool = True
    """True when its process lives in the sandbox; ``mini`` lives in the engine."""
    runs_as_root: bool = False
    session_fork: Literal["fork", "resume", "replay", "fresh"] = "fresh"
    dialect: str | None = None
    min_memory_mb: int | None = None
    """What its process takes in the sandbox; a task that allows less would only see it killed."""


@dataclass(frozen=True, slots=True)
class AskUser:
    """A question with enumerated options; ``kinds[i]`` is the protocol's kind of option i."""

    question: str
    options: tuple[str, ...]
    kinds: tuple[str, ...] = ()
    tool_call_id: str | None = None


AskUserHandler = Callable[[AskUser], Awaitable[str | None]]
"""Returns the chosen option, or ``None`` to cancel the question."""

Record = Callable[[Mapping[str, object]], None]
"""Appends one event of the agent's own account; the kernel adds ts, seq and node_id."""


@dataclass(frozen=True, slots=True)
class SessionContext:
    """What a session needs beyond the sandbox."""

    role: str
    agent: str
    model: str | None
    workspace: str
    user: str | None
    """User inside the sandbox; ``None`` is root."""
    logs: Path
    """Host folder of this rollout's ``agent/`` files (stdout, stderr)."""
    record: Record
    route: ModelRoute | None
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    reasoning_effort: str | None = None
    sampling: Mapping[str, object] = field(default_factory=dict[str, object])
    seed: int = 0
    trial: int = 1
    oracle: Path | None = None
    """The task's reference solution, for the oracle only."""
    oracle_target: str = "/oracle"
    oracle_command: str = "./solve.sh"
    oracle_env: Mapping[str, str] = field(default_factory=dict[str, str])
    redact: Callable[[bytes], bytes] = bytes
    """Masks secrets in raw output before it is written under ``logs``."""
    idle_timeout: float | None = None
    cancel_grace: float = 5.0


@dataclass(frozen=True, slots=True)
class SessionState:
    """A session frozen at a turn boundary. ``level`` is fork, resume, replay or fresh."""

    level: str
    data: Mapping[str, object] = field(default_factory=dict[str, object])


@runtime_checkable
class Session(Protocol):
    """A live conversation. Not safe for concurrent prompts."""

    session_id: str

    async def prompt(self, text: str) -> StopReason:
        """Send one prompt and wait for the end of the turn. Raises ``AgentError`` or
        ``ModelError``; cancelling the task cancels the turn and kills what it started."""
        ...

    async def cancel(self) -> None: ...

    def on_ask_user(self, handler: AskUserHandler) -> None: ...

    @property
    def usage(self) -> Usage: ...

    @property
    def n_tool_calls(self) -> int: ...

    async def fork_state(self) -> SessionState | None: ...

    async def close(self) -> None:
        """End the session and every process of it. Idempotent."""
        ...


@runtime_checkable
class Agent(Protocol):
    name: str
    version: str | None

    def capabilities(self) -> AgentCapabilities: ...

    async def install(self, sandbox: Sandbox) -> None: ...

    async def connect(
        self, sandbox: Sandbox, context: SessionContext, *, resume: SessionState | None = None
    ) -> Session: ...


@runtime_checkable
class HostInstalled(Protocol):
    """An agent that is installed on the host and shown to each sandbox."""

    async def prepare(self) -> tuple[Mount, ...]:
        """What its sandbox must be created with. Installs once per host, so it may take long the
        first time; raises ``AgentInstallError``."""
        ...


__all__ = [
    "Agent",
    "AgentCapabilities",
    "AskUser",
    "AskUserHandler",
    "HostInstalled",
    "Record",
    "Session",
    "SessionContext",
    "SessionState",
    "StopReason",
    "Usage",
]
