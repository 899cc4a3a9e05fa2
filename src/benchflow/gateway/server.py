"""The gateway: one per job and host, on a unix socket, serving every rollout by its key."""

from __future__ import annotations

import asyncio
import secrets
import socket as sockets
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

from benchflow.contracts.errors import UsageError
from benchflow.contracts.gateway import ModelRoute, ModelSpec
from benchflow.gateway import exchange, providers, wire
from benchflow.gateway.asgi import Listener, Receive, Scope, Send, send_json
from benchflow.gateway.capture import CallLog
from benchflow.gateway.client import Client
from benchflow.gateway.exchange import Patience
from benchflow.gateway.probe import probe_endpoint
from benchflow.gateway.route import Route
from benchflow.gateway.scripted.engine import rollout_seed
from benchflow.gateway.scripted.policy import load_policy
from benchflow.gateway.scripted.upstream import ScriptedUpstream
from benchflow.gateway.upstream import Breaker, Guard, HttpUpstream, Upstream
from benchflow.kernel.storage import Redactor

DIALECTS: Mapping[tuple[str, str], Callable[..., Awaitable[None]]] = {
    ("POST", "/v1/chat/completions"): exchange.handle,
}
"""What agents may speak: (method, path) -> handler. A new dialect is one more entry."""

_CLOSE_GRACE = 2.0
"""Seconds a closing rollout's calls in flight get to end before they are broken off."""


class GatewayServer:
    """Implements ``contracts.gateway.Gateway``.

    Provider keys stay here and are registered with ``redact``. ``policy_concurrency`` limits the
    calls in flight per endpoint; ``patience`` bounds the retries of one call; a tripped endpoint
    is tried again after ``cooldown`` seconds; ``read_timeout`` is the longest silence of an
    upstream. Closed routes are forgotten, so memory does not grow with the rollouts of a job.
    """

    def __init__(
        self,
        socket: Path,
        *,
        redact: Redactor,
        policy_concurrency: int | None = None,
        patience: Patience | None = None,
        cooldown: float = 15.0,
        read_timeout: float = 900.0,
    ) -> None:
        self.socket = socket
        self._redact = redact
        self._concurrency = policy_concurrency
        self._patience = patience or Patience()
        self._cooldown = cooldown
        self._read_timeout = read_timeout
        self._listener = Listener(self._app, socket)
        self._client: Client | None = None
        self._guards: dict[tuple[str, str | None], Guard] = {}
        self._scripted: dict[str, ScriptedUpstream] = {}
        self._routes: dict[str, Route] = {}
        self._logs: dict[Path, CallLog] = {}
        self._policy_version: str | None = None
        self._inside_port = 0

    async def start(self) -> None:
        self._inside_port = _free_port()
        await self._listener.start()
        self._client = Client(self._read_timeout)

    async def stop(self) -> None:
        """Close what routes are left, then the socket and the connections. Idempotent."""
        for route in list(self._routes.values()):
            await route.close()
        await self._listener.stop()
        if self._client is not None:
            await self._client.close()
            self._client = None

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
    ) -> ModelRoute:
        """Raises ``UsageError`` or ``PrerequisiteError`` when ``spec`` cannot be served."""
        upstream = self._upstream(spec)
        if spec.max_cost_usd is not None and upstream.target.policy:
            raise UsageError(
                f"a cost budget was set, but {spec.model} is self-hosted and has no price",
                fix="use a token or call budget",
            )
        log = self._logs.get(trajectory)
        if log is None:
            log = self._logs[trajectory] = CallLog(trajectory, self._redact)
        log.users += 1
        route = Route(
            key=f"sk-bf-{secrets.token_urlsafe(24)}",  # a shape that every record masks
            model=upstream.model,
            socket=self.socket,
            rollout=rollout,
            spec=spec,
            upstream=upstream,
            log=log,
            seed=rollout_seed(seed, task, trial),
            node_id=node_id,
            on_close=self._close_route,
            inside_port=self._inside_port,
            policy_version=self._policy_version,
        )
        self._routes[route.key] = route
        return route

    async def probe(self, spec: ModelSpec) -> Mapping[str, object]:
        """See ``contracts.gateway.Gateway.probe`` and ``gateway.probe`` for the fields."""
        assert self._client is not None, "the gateway is not running"
        return await probe_endpoint(self._upstream(spec), self._client)

    def set_policy_version(self, version: str) -> None:
        """Calls from now on, of open rollouts too, were served by this version of the policy
        (an upstream that names its version itself is believed first)."""
        self._policy_version = version
        for route in self._routes.values():
            route.policy_version = version

    async def _app(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        path: str = scope["path"]
        if path.startswith("/r/"):
            key, slash, rest = path[3:].partition("/")
            path = slash + rest
        else:
            key = _bearer(scope["headers"])
        route = self._routes.get(key)
        if route is None:
            message = "unknown rollout key, or the rollout is over"
            return await send_json(
                send, 401, wire.error_body(message, "authentication_error", "invalid_api_key")
            )
        handler = DIALECTS.get((scope["method"], path))
        if handler is not None:
            return await handler(route, self._patience, scope, receive, send)
        if scope["method"] in ("GET", "HEAD") and path == "/v1/models":
            return await send_json(send, 200, wire.model_list(route.model, route.spec.max_context))
        served = ", ".join(f"{method} {served}" for method, served in DIALECTS)
        message = f"no {scope['method']} {path} here; this gateway serves {served} and GET /v1/models"
        await send_json(send, 404, wire.error_body(message, "invalid_request_error", "unknown_url"))

    def _upstream(self, spec: ModelSpec) -> Upstream:
        target = providers.resolve(spec)
        if target.provider == providers.SCRIPTED:
            return self._scripted_upstream(target)
        assert self._client is not None and target.base_url is not None, "the gateway is not running"
        if target.key:
            self._redact.add(target.key)
        guard = self._guards.get((target.base_url, target.key))
        if guard is None:
            guard = self._guards[target.base_url, target.key] = self._new_guard()
        return HttpUpstream(target, guard, self._client)

    def _scripted_upstream(self, target: providers.Target) -> ScriptedUpstream:
        upstream = self._scripted.get(target.name)
        if upstream is None:
            policy = load_policy(Path(target.name))
            upstream = self._scripted[target.name] = ScriptedUpstream(target, self._new_guard(), policy)
        return upstream

    def _new_guard(self) -> Guard:
        slots = asyncio.Semaphore(self._concurrency) if self._concurrency else None
        return Guard(Breaker(self._cooldown), slots)

    async def _close_route(self, route: Route) -> None:
        if route.in_flight:
            await asyncio.wait({call.task for call in route.in_flight}, timeout=_CLOSE_GRACE)
        for call in list(route.in_flight):
            await call.stop("the rollout is over")
        self._routes.pop(route.key, None)
        route.log.users -= 1
        if route.log.users == 0:
            route.log.close()
            self._logs.pop(route.log.path, None)


def _bearer(headers: list[tuple[bytes, bytes]]) -> str:
    for name, value in headers:
        if name == b"authorization" and value[:7].lower() == b"bearer ":
            return value[7:].strip().decode("latin-1")
    return ""


def _free_port() -> int:
    """A loopback port nobody listens on now: sandboxes with an open network share the host's
    loopback, where two engines must not want the same one."""
    with sockets.socket(sockets.AF_INET, sockets.SOCK_STREAM) as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
