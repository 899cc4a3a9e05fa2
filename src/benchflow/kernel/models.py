"""The models of one rollout: a route per model that its roles name, counted together."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from benchflow.contracts.config import RolloutConfig
from benchflow.contracts.errors import UsageError
from benchflow.contracts.gateway import Gateway, ModelRoute, RouteTotals
from benchflow.kernel.requests import model_spec


class ModelAccess:
    """Opens, tags and closes the routes. Without any model it is empty and counts nothing."""

    def __init__(self) -> None:
        self._routes: dict[str, ModelRoute] = {}
        self._closed: list[RouteTotals] | None = None

    async def open(
        self,
        gateway: Gateway | None,
        models: Iterable[str],
        config: RolloutConfig,
        *,
        rollout: str,
        calls: Path,
        task: str,
    ) -> None:
        """One route per distinct model; all append to the same ``calls`` file."""
        for model in models:
            if model in self._routes:
                continue
            if gateway is None:
                raise UsageError(
                    "a model was named but no gateway is running", fix="open planes with a gateway"
                )
            self._routes[model] = await gateway.open_route(
                rollout,
                model_spec(config, model),
                trajectory=calls,
                task=task,
                seed=config.seed,
                trial=config.trial,
            )

    def route(self, model: str | None) -> ModelRoute | None:
        return self._routes.get(model or "")

    @property
    def door(self) -> ModelRoute | None:
        """Any route: they share the gateway's socket."""
        return next(iter(self._routes.values()), None)

    def set_node(self, node_id: str) -> None:
        for route in self._routes.values():
            route.set_node(node_id)

    def totals(self) -> RouteTotals | None:
        """What the gateway counted so far; None when no route was opened."""
        if self._closed is not None:
            return _add(self._closed)
        return _add([route.totals() for route in self._routes.values()])

    async def close(self) -> RouteTotals | None:
        """Refuse further calls and return the final totals. Idempotent."""
        if self._closed is None:
            self._closed = [await route.close() for route in self._routes.values()]
        return self.totals()


def _add(parts: list[RouteTotals]) -> RouteTotals | None:
    """The sum over routes. A route that was never called changes nothing; an unknown count
    of one that was makes the sum unknown."""
    if len(parts) <= 1:
        return parts[0] if parts else None
    called = [part for part in parts if part.calls]
    failures = [part.failure for part in parts if part.failure]
    captures = {part.token_capture for part in called}

    def total(values: list[int | None]) -> int | None:
        return None if not values or None in values else sum(value or 0 for value in values)

    costs = [part.cost_usd for part in called]
    return RouteTotals(
        calls=sum(part.calls for part in parts),
        failed_calls=sum(part.failed_calls for part in parts),
        answered_calls=sum(part.answered_calls for part in parts),
        prompt_tokens=total([part.prompt_tokens for part in called]),
        completion_tokens=total([part.completion_tokens for part in called]),
        cache_read_tokens=total([part.cache_read_tokens for part in called]),
        cache_creation_tokens=total([part.cache_creation_tokens for part in called]),
        cost_usd=None if not costs or None in costs else sum(cost or 0.0 for cost in costs),
        cost_reason=next((part.cost_reason for part in called if part.cost_reason), None),
        model_wait_sec=sum(part.model_wait_sec for part in parts),
        retry_wait_sec=sum(part.retry_wait_sec for part in parts),
        policy_version_first=next((part.policy_version_first for part in called), None),
        policy_version_last=next((part.policy_version_last for part in reversed(called)), None),
        token_capture=captures.pop() if len(captures) == 1 else "partial" if captures else "none",
        failure=failures[0] if failures else None,
    )
