"""The door between agents and models: one gateway per job and host."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """What a rollout may call. ``model`` is ``provider/name`` as the user wrote it."""

    model: str
    policy_url: str | None = None
    policy_version: str | None = None
    sampling: Mapping[str, object] = field(default_factory=dict[str, object])
    max_context: int | None = None
    max_tokens: int | None = None
    """Total token budget of the rollout (prompt + completion), not of one call."""
    max_calls: int | None = None
    max_cost_usd: float | None = None
    train_mode: bool = True
    """Pin truncating sampling parameters to no-ops so that log-probabilities stay exact."""


@dataclass(frozen=True, slots=True)
class RouteTotals:
    """What the gateway counted for one rollout. ``None`` is unknown.

    ``failure`` is set when the rollout cannot be trusted because of the model side:
    ``(category, message)`` with a category of ``contracts.errors`` (endpoint,
    endpoint_rejected, budget, context_limit).
    """

    calls: int = 0
    failed_calls: int = 0
    answered_calls: int = 0
    """Calls the model answered; one still under way is neither failed nor answered."""
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cache_read_tokens: int | None = None
    cache_creation_tokens: int | None = None
    cost_usd: float | None = None
    cost_reason: str | None = None
    model_wait_sec: float = 0.0
    retry_wait_sec: float = 0.0
    policy_version_first: str | None = None
    policy_version_last: str | None = None
    token_capture: str = "none"
    """``tokens`` (every call exact), ``partial``, ``text`` or ``none``."""
    failure: tuple[str, str] | None = None


class ModelRoute(Protocol):
    """One rollout's access: a random key that is its identity at the gateway."""

    key: str
    model: str
    """The model name an agent should send."""
    socket: Path
    """Unix socket of the gateway on the host."""
    inside_port: int
    """Loopback port inside the sandbox that leads to the gateway."""

    @property
    def inside_url(self) -> str:
        """``http://127.0.0.1:<port>/r/<key>`` (without ``/v1``)."""
        ...

    @property
    def host_path(self) -> str:
        """``/r/<key>``: path prefix for a client of ``socket``."""
        ...

    def set_node(self, node_id: str) -> None:
        """Calls from now on belong to this node of the rollout's tree."""
        ...

    def totals(self) -> RouteTotals: ...

    async def close(self) -> RouteTotals:
        """Refuse further calls, finish writing, and return the totals. Idempotent."""
        ...


class Gateway(Protocol):
    async def start(self) -> None: ...

    async def open_route(
        self,
        rollout: str,
        spec: ModelSpec,
        *,
        trajectory: Path,
        task: str,
        seed: int,
        trial: int,
        node_id: str = "n0",
    ) -> ModelRoute: ...

    async def probe(self, spec: ModelSpec) -> Mapping[str, object]:
        """Classify the endpoint: ``{"endpoint", "level": tokens|logprobs|text, …}``. Raises
        ``PrerequisiteError`` when it refuses, ``UsageError`` for an unknown provider."""
        ...

    async def stop(self) -> None: ...
