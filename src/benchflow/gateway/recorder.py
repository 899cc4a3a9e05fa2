"""The account of one call: a line per attempt in the call log, and the rollout's counts."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from hashlib import blake2b
from typing import Any

from benchflow.contracts.records import CALL_VERSION
from benchflow.gateway import sse, tokens, wire
from benchflow.gateway.purpose import purpose_of, text_of
from benchflow.gateway.route import Route, cost_reason

DIALECT = "openai-chat"
_SESSION_HEADERS = (
    *("x-session-id", "session-id", "session_id"),
    *("x-session-affinity", "x-claude-code-session-id"),
)
_SECRET_REPLY_HEADERS = frozenset({"set-cookie", "authorization"})


@dataclass(slots=True)
class Recorder:
    """``body`` is the agent's request, ``submitted`` what went upstream."""

    route: Route
    headers: dict[str, str]
    body: dict[str, Any]
    submitted: dict[str, Any] = field(default_factory=dict)
    attempt: int = 0
    purpose: str = field(init=False)
    session_id: str = field(init=False)
    _node_id: str = field(init=False)
    _first_index: int | None = None
    _began_at: float = 0.0
    _began: float = 0.0

    def __post_init__(self) -> None:
        route, body = self.route, self.body
        self._node_id = route.node_id
        extends = not body.get("tools") and route.seen_tools and route.log.extends(body["messages"])
        self.purpose = purpose_of(body, self.headers, seen_tools=route.seen_tools, extends=extends)
        route.seen_tools = route.seen_tools or bool(body.get("tools"))
        own = next((self.headers[name] for name in _SESSION_HEADERS if self.headers.get(name)), None)
        self.session_id = own or _conversation_id(route.key, body["messages"])
        self.begin()

    def begin(self) -> None:
        """An attempt starts now."""
        self._began_at, self._began = time.time(), time.monotonic()

    def success(
        self,
        status: int,
        headers: dict[str, str],
        reply: dict[str, Any],
        capture: dict[str, Any] | None = None,
        version: object = None,
    ) -> None:
        """A whole reply. ``capture`` is None for an upstream that was not asked for tokens."""
        route = self.route
        for candidate in (headers.get("x-policy-version"), version, route.policy_version):
            if candidate is not None:
                version = str(candidate)
                break
        else:
            version = route.spec.policy_version
        if capture is None:
            capture = tokens.not_requested(route.upstream.target.provider)
        self._write(status, headers, reply, capture=capture, version=version)
        route.count_version(version)
        route.counts.answered += 1
        route.counts.exact += tokens.exact(capture)
        route.upstream.guard.breaker.succeeded()
        route.succeed(self.purpose)

    def broken(self, status: int | None, headers: dict[str, str], raw: bytes, why: str) -> None:
        """An attempt without a usable reply: what came is kept as JSON, stream or text."""
        body: Any = None
        if raw:
            try:
                body = wire.loads(raw)
            except wire.BadJson:
                body = sse.assemble(raw) or raw.decode("utf-8", "replace")
        target = self.route.upstream.target
        capture = tokens.failed(target.provider, target.policy, why)
        self._write(status, headers, body, capture=capture, error=why)

    def refused(
        self, headers: dict[str, str], reply: dict[str, Any], capture: dict[str, Any], why: str
    ) -> None:
        """A whole reply that the agent does not get."""
        self._write(200, headers, reply, capture=capture, error=why)

    def _write(
        self,
        status: int | None,
        headers: dict[str, str],
        body: Any,
        *,
        capture: dict[str, Any],
        error: str | None = None,
        version: str | None = None,
    ) -> None:
        route = self.route
        duration = time.monotonic() - self._began
        usage = body.get("usage") if isinstance(body, dict) else None
        usage = usage if isinstance(usage, dict) else None
        cost = _cost(usage, route.upstream.target.policy)
        if usage:
            route.counts.add_usage(usage)
            route.count_cost(cost)
        response = None
        if status is not None:
            response = {
                "ts": _iso(time.time()),
                "status_code": status,
                "headers": {k: v for k, v in headers.items() if k not in _SECRET_REPLY_HEADERS},
                "body": wire.recordable(body),
            }
        record = {
            "schema_version": CALL_VERSION,
            "index": 0,
            "rollout": route.rollout,
            "node_id": self._node_id,
            "request": {
                "ts": _iso(self._began_at),
                "method": "POST",
                "path": "/v1/chat/completions",
                "headers": self.headers,
                "body": wire.recordable(self.body),
            },
            "response": response,
            "duration_ms": round(duration * 1000, 3),
            "metadata": {
                **self._identity(),
                "policy_version": version,
                "usage": usage,
                "cost_usd": cost,
                "cost_reason": None if cost is not None else cost_reason(route),
                "finish_reason": _finish_reason(body),
                "error": error,
                "sampling": {
                    "requested": tokens.sampling_of(self.body),
                    "submitted": tokens.sampling_of(self.submitted),
                },
                "token_capture": capture,
            },
        }
        index = route.log.append(record, total_tokens=_total(usage))
        if self._first_index is None:
            self._first_index = index

    def _identity(self) -> dict[str, Any]:
        return {
            "request_model": self.body.get("model"),
            "upstream_model": self.route.upstream.model,
            "dialect": DIALECT,
            "upstream_dialect": DIALECT,
            "purpose": self.purpose,
            "session_id": self.session_id,
            "attempt": max(1, self.attempt),
            "retry_of": self._first_index,
        }


def _iso(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")


def _conversation_id(key: str, messages: list[Any]) -> str:
    """The same for every call of one conversation: its head, up to the first user message."""
    digest = blake2b(key.encode(), digest_size=16)
    for message in messages:
        if not isinstance(message, dict):
            continue
        digest.update(text_of(message.get("content")).encode("utf-8", "surrogatepass"))
        if message.get("role") == "user":
            break
    return digest.hexdigest()


def _finish_reason(body: Any) -> str | None:
    choices = body.get("choices") if isinstance(body, dict) else None
    first = choices[0] if isinstance(choices, list) and choices else None
    return first.get("finish_reason") if isinstance(first, dict) else None


def _total(usage: dict[str, Any] | None) -> int | None:
    if not usage:
        return None
    prompt, completion = usage.get("prompt_tokens"), usage.get("completion_tokens")
    if isinstance(prompt, int) and isinstance(completion, int) and min(prompt, completion) >= 0:
        return prompt + completion
    return None


def _cost(usage: dict[str, Any] | None, policy: bool) -> float | None:
    """Some providers say what a call cost."""
    cost = (usage or {}).get("cost")
    if policy or isinstance(cost, bool) or not isinstance(cost, (int, float)) or cost < 0:
        return None
    return float(cost)
