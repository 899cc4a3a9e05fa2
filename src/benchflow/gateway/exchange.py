"""One chat-completions call of an agent: refuse, submit, retry, answer, record.

Two ways through. A *policy* (a model server of the user's own) is always asked for the whole
reply with its exact tokens; the agent's stream is made from it. Any other upstream is relayed
byte for byte, each chunk as it comes. Every attempt becomes one line of the call log.
"""

from __future__ import annotations

import asyncio
import random
import time
from contextlib import nullcontext
from dataclasses import dataclass, field
from datetime import UTC, datetime
from hashlib import blake2b
from typing import Any

from benchflow.contracts.errors import HostPressureError
from benchflow.contracts.records import CALL_VERSION
from benchflow.gateway import failures, sse, tokens, wire
from benchflow.gateway.asgi import (
    Disconnected,
    Receive,
    Scope,
    Send,
    read_body,
    send_bytes,
    send_head,
    send_json,
)
from benchflow.gateway.purpose import purpose_of, text_of
from benchflow.gateway.route import Route, cost_reason
from benchflow.gateway.upstream import Answer, Submission, Unreachable

DIALECT = "openai-chat"
_SSE = b"text/event-stream; charset=utf-8"
_SESSION_HEADERS = (
    "x-session-id",
    "session-id",
    "session_id",
    "x-session-affinity",
    "x-claude-code-session-id",
)
_SECRET_HEADERS = frozenset(
    {b"authorization", b"x-api-key", b"api-key", b"x-goog-api-key", b"cookie", b"proxy-authorization"}
)
_SECRET_REPLY_HEADERS = frozenset({"set-cookie", "authorization"})


@dataclass(frozen=True, slots=True)
class Patience:
    """How long passing trouble of an upstream is waited out, per call. Seconds."""

    attempts: int = 6
    budget: float = 60.0
    first: float = 0.5
    longest: float = 15.0

    def delay(self, attempt: int, waited: float, asked: float | None) -> float | None:
        """Wait before the attempt after ``attempt``; None when it is time to give up."""
        if attempt >= self.attempts:
            return None
        backoff = min(self.longest, self.first * 2 ** (attempt - 1)) * random.uniform(0.5, 1.0)
        delay = max(backoff, asked or 0.0)
        return None if waited + delay > self.budget else delay


@dataclass(frozen=True, slots=True)
class Trouble:
    """An attempt that may be tried again."""

    message: str
    status: int | None = None
    body: bytes = b""
    retry_after: float | None = None


async def handle(route: Route, patience: Patience, scope: Scope, receive: Receive, send: Send) -> None:
    """Serve one ``POST /v1/chat/completions``."""
    try:
        raw = await read_body(receive)
        body = wire.loads(raw)
    except Disconnected:
        return
    except wire.BadJson as error:
        message = f"the request body is not JSON: {error}"
        return await send_json(send, 400, wire.error_body(message, "invalid_request_error"))
    if not isinstance(body, dict) or not isinstance(body.get("messages"), list):
        message = "the request body needs a list of messages"
        return await send_json(send, 400, wire.error_body(message, "invalid_request_error"))
    headers = {
        name.decode("latin-1"): value.decode("latin-1")
        for name, value in scope["headers"]
        if name not in _SECRET_HEADERS
    }
    task = asyncio.current_task()
    assert task is not None
    await Exchange(route, patience, raw, body, headers, send, task).run(receive)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


@dataclass(slots=True, eq=False)
class Exchange:
    route: Route
    patience: Patience
    raw: bytes
    body: dict[str, Any]
    headers: dict[str, str]
    send: Send
    task: asyncio.Task[Any]
    purpose: str = "agent"
    session_id: str = ""
    attempt: int = 0
    first_index: int | None = None
    submitted: dict[str, Any] = field(default_factory=dict)
    stopped: str | None = None
    head_sent: bool = False
    _finished: bool = False
    _ts: str = ""
    _began: float = 0.0

    async def run(self, receive: Receive) -> None:
        route = self.route
        route.in_flight.add(self)
        watcher = asyncio.create_task(self._watch(receive))
        try:
            with route.waiting:
                await self._serve()
        except asyncio.CancelledError:
            if self.stopped is None:
                raise
            self.task.uncancel()
            if not self.head_sent:
                await send_json(self.send, 503, wire.error_body(self.stopped, "rollout_closed"))
        except HostPressureError as error:
            route.fail(error.category, error.message, self.purpose)
            if not self.head_sent:
                await send_json(self.send, 503, wire.error_body(error.message, error.category))
        finally:
            self._finished = True
            watcher.cancel()
            route.in_flight.discard(self)

    async def stop(self, reason: str) -> None:
        if not self._finished:
            self.stopped = reason
            self.task.cancel()
            await asyncio.wait([self.task])

    async def _watch(self, receive: Receive) -> None:
        """An agent that hangs up frees the model at once."""
        message = await receive()
        if message["type"] == "http.disconnect" and not self._finished:
            self.stopped, self.head_sent = "the agent disconnected", True
            self.task.cancel()

    async def _serve(self) -> None:
        route = self.route
        if route.closed:
            message = "this rollout is over"
            return await self._reply(410, wire.dumps(wire.error_body(message, "rollout_closed")))
        self._identify()
        if await self._refuse():
            return
        route.counts.calls += 1
        payload = self._prepare()
        while True:
            reason = route.upstream.guard.breaker.blocked()
            if reason is not None:
                return await self._give_up(Trouble(reason))
            self.attempt += 1
            submission = Submission(payload, self.session_id, route.seed, self.attempt)
            trouble = await self._try(submission)
            if trouble is None:
                return
            # After the cooldown of a tripped breaker a call has one attempt, not a whole budget.
            delay = None
            if not route.upstream.guard.breaker.open:
                delay = self.patience.delay(
                    self.attempt, time.monotonic() - self._arrived, trouble.retry_after
                )
            if delay is None:
                return await self._give_up(trouble)
            with route.retrying:
                await asyncio.sleep(delay)

    # -- before the call

    _arrived: float = field(default_factory=time.monotonic)

    def _identify(self) -> None:
        route = self.route
        extends = not self.body.get("tools") and route.seen_tools and route.log.extends(self.body["messages"])
        self.purpose = purpose_of(self.body, self.headers, seen_tools=route.seen_tools, extends=extends)
        route.seen_tools = route.seen_tools or bool(self.body.get("tools"))
        own = next((self.headers[name] for name in _SESSION_HEADERS if self.headers.get(name)), None)
        self.session_id = own or _conversation_id(route.key, self.body["messages"])

    async def _refuse(self) -> bool:
        """Answer without calling the model when a budget or the context says so."""
        route, limit = self.route, self.route.spec.max_context
        spent = route.spent()
        if spent is not None:
            await self._end(400, "budget", spent, failures.BUDGET_CODE)
            return True
        used = route.log.context_of(self.body["messages"]) if limit is not None else None
        if limit is not None and used is not None and used >= limit:
            message = f"the conversation holds at least {used} tokens; the maximum context length is {limit}"
            await self._end(400, "context_limit", message, failures.CONTEXT_CODE)
            return True
        return False

    async def _end(self, status: int, category: str, message: str, code: str) -> None:
        self._begin()
        body = wire.error_body(message, category, code)
        self._record(status, {}, body, error=message, capture=self._no_tokens(message))
        self.route.fail(category, message, self.purpose)
        await self._reply(status, wire.dumps(body))

    def _prepare(self) -> bytes:
        """The bytes to submit: the agent's own unless something must be different."""
        route = self.route
        changes: dict[str, Any] = dict(route.spec.sampling)
        if self.body.get("model") != route.upstream.model:
            changes["model"] = route.upstream.model
        self.submitted = self.body
        if not changes and not route.upstream.target.policy:
            return self.raw
        self.submitted = {**self.body, **changes}
        if "max_tokens" in changes:
            self.submitted.pop("max_completion_tokens", None)
        if route.upstream.target.policy:
            tokens.ask(self.submitted, train_mode=route.spec.train_mode)
            self.submitted.setdefault("seed", route.seed)
        return wire.dumps(self.submitted)

    # -- one attempt

    async def _try(self, submission: Submission) -> Trouble | None:
        """None once the agent has its answer."""
        upstream, came = self.route.upstream, []
        status: int | None = None
        headers: dict[str, str] = {}
        self._begin()
        try:
            async with upstream.guard.slots or nullcontext():
                self._begin()
                async with upstream.send(submission) as answer:
                    status, headers = answer.status, dict(answer.headers)
                    if status == 200 and self._relays(answer):
                        await self._relay(answer, came)
                    else:
                        async for chunk in answer.chunks:
                            came.append(chunk)
        except Unreachable as error:
            return await self._cut(status, headers, came, str(error))
        except asyncio.CancelledError:
            self._broken(status, headers, came, self.stopped or "the gateway stopped")
            raise
        body = b"".join(came)
        if self.head_sent:
            await self._relayed(headers, body)
            return None
        if failures.transient(status):
            message = failures.error_of(body)[1] or f"status {status}"
            self._broken(status, headers, came, message)
            return Trouble(message, status, body, failures.retry_after(headers))
        if 200 <= status < 300:
            return await self._deliver(status, headers, body)
        await self._rejected(status, headers, body)
        return None

    def _relays(self, answer: Answer) -> bool:
        if self.route.upstream.target.policy or not self.body.get("stream"):
            return False
        return answer.headers.get("content-type", "").startswith("text/event-stream")

    async def _relay(self, answer: Answer, came: list[bytes]) -> None:
        self.head_sent = True
        head = [(b"content-type", answer.headers["content-type"].encode("latin-1"))]
        await send_head(self.send, answer.status, head)
        async for chunk in answer.chunks:
            came.append(chunk)
            await self.send({"type": "http.response.body", "body": chunk, "more_body": True})

    async def _relayed(self, headers: dict[str, str], stream: bytes) -> None:
        self._succeed(200, headers, sse.assemble(stream) or {}, self._pass_through())
        await self._finish(b"")

    async def _deliver(self, status: int, headers: dict[str, str], body: bytes) -> Trouble | None:
        try:
            reply = wire.loads(body)
        except wire.BadJson:
            reply = None
        if not isinstance(reply, dict) or not isinstance(reply.get("choices"), list):
            message = "the endpoint's reply is not a chat completion"
            self._broken(status, headers, [body], message)
            return Trouble(message, status)
        if not self.route.upstream.target.policy:
            self._succeed(status, headers, reply, self._pass_through())
            await self._reply(status, body, headers.get("content-type", "application/json").encode("latin-1"))
            return None
        capture = tokens.read(self.route.upstream.target.provider, reply)
        plain = tokens.strip(reply, keep_logprobs=bool(self.body.get("logprobs")))
        if await self._too_long(headers, plain, capture):
            return None
        self._succeed(
            status, headers, plain, capture, reply.get("policy_version") or reply.get("weight_version")
        )
        if self.body.get("stream"):
            options = self.body.get("stream_options") or {}
            events = b"".join(sse.synthesise(plain, include_usage=bool(options.get("include_usage"))))
            await self._reply(status, events, _SSE)
        else:
            await self._reply(status, wire.dumps(plain))
        return None

    async def _too_long(
        self, headers: dict[str, str], reply: dict[str, Any], capture: dict[str, Any]
    ) -> bool:
        """A prompt over ``max_context`` that the engine would still have taken."""
        limit = self.route.spec.max_context
        prompt = (reply.get("usage") or {}).get("prompt_tokens")
        if limit is None or not isinstance(prompt, int) or prompt <= limit:
            return False
        message = f"the prompt holds {prompt} tokens; the maximum context length is {limit}"
        self._record(200, headers, reply, error=message, capture=capture, usage=reply.get("usage"))
        self.route.fail("context_limit", message, self.purpose)
        await self._reply(400, wire.dumps(wire.error_body(message, "context_limit", failures.CONTEXT_CODE)))
        return True

    async def _rejected(self, status: int, headers: dict[str, str], body: bytes) -> None:
        """A refusal that no retry would change goes to the agent as it is; only a context
        overflow is put into the one form that agents understand."""
        message = failures.error_of(body)[1] or f"status {status}"
        self._broken(status, headers, [body], message)
        self.route.upstream.guard.breaker.reset()
        if failures.context_overflow(status, body):
            self.route.fail("context_limit", message, self.purpose)
            body = wire.dumps(wire.error_body(message, "invalid_request_error", failures.CONTEXT_CODE))
            return await self._reply(400, body)
        self.route.fail("endpoint_rejected", f"{status}: {message}", self.purpose)
        await self._reply(status, body, headers.get("content-type", "application/json").encode("latin-1"))

    async def _cut(
        self, status: int | None, headers: dict[str, str], came: list[bytes], why: str
    ) -> Trouble | None:
        self._broken(status, headers, came, why)
        if not self.head_sent:
            return Trouble(why)
        self.route.fail("endpoint", why, self.purpose)
        await self._finish(
            wire.event(wire.error_body("the model endpoint broke off its answer", "server_error"))
        )
        return None

    async def _give_up(self, trouble: Trouble) -> None:
        route, target = self.route, self.route.upstream.target
        where = target.base_url or route.spec.model
        limited = trouble.status == 429
        if self.attempt and not limited:
            route.upstream.guard.breaker.trip(trouble.message)
        message = f"the model endpoint {where} is unavailable: {trouble.message}"
        if limited:
            message = f"the model endpoint {where} keeps limiting the rate: {trouble.message}"
        if not self.attempt:
            self._begin()
            self._broken(None, {}, [], message)
        route.fail("endpoint", message, self.purpose)
        if limited:
            return await self._reply(429, trouble.body)
        await self._reply(503, wire.dumps(wire.error_body(message, "server_error", failures.DOWN_CODE)))

    # -- the answer to the agent

    async def _reply(self, status: int, body: bytes, content_type: bytes = b"application/json") -> None:
        self._finished = self.head_sent = True
        await send_bytes(self.send, status, body, content_type)

    async def _finish(self, last: bytes) -> None:
        self._finished = True
        await self.send({"type": "http.response.body", "body": last})

    # -- the record

    def _begin(self) -> None:
        self._ts, self._began = _now(), time.monotonic()

    def _no_tokens(self, why: str) -> dict[str, Any]:
        target = self.route.upstream.target
        return tokens.failed(target.provider, target.policy, why)

    def _pass_through(self) -> dict[str, Any]:
        return tokens.not_requested(self.route.upstream.target.provider)

    def _broken(self, status: int | None, headers: dict[str, str], came: list[bytes], why: str) -> None:
        """Record an attempt without a whole answer: what came is kept as JSON, stream or text."""
        body, raw = None, b"".join(came)
        if raw:
            try:
                body = wire.loads(raw)
            except wire.BadJson:
                body = sse.assemble(raw) or raw.decode("utf-8", "replace")
        usage = body.get("usage") if isinstance(body, dict) else None
        self._record(status, headers, body, error=why, capture=self._no_tokens(why), usage=usage)
        if self.stopped is not None:
            self.route.counts.failed += 1

    def _succeed(
        self,
        status: int,
        headers: dict[str, str],
        reply: dict[str, Any],
        capture: dict[str, Any],
        version: object = None,
    ) -> None:
        route = self.route
        usage = reply.get("usage") if isinstance(reply.get("usage"), dict) else None
        version = (
            headers.get("x-policy-version") or version or route.policy_version or route.spec.policy_version
        )
        version = None if version is None else str(version)
        self._record(status, headers, reply, capture=capture, usage=usage, version=version)
        route.count_version(version)
        route.counts.answered += 1
        route.counts.exact += tokens.exact(capture)
        route.upstream.guard.breaker.reset()
        route.succeed(self.purpose)

    def _record(
        self,
        status: int | None,
        headers: dict[str, str],
        body: Any,
        *,
        capture: dict[str, Any],
        error: str | None = None,
        usage: dict[str, Any] | None = None,
        version: str | None = None,
    ) -> None:
        route, target = self.route, self.route.upstream.target
        cost = _cost(usage, target.policy)
        if usage:
            route.counts.add_usage(usage)
            route.count_cost(cost)
        ended = time.monotonic()
        record = {
            "schema_version": CALL_VERSION,
            "index": 0,
            "rollout": route.rollout,
            "node_id": route.node_id,
            "request": {
                "ts": self._ts,
                "method": "POST",
                "path": "/v1/chat/completions",
                "headers": self.headers,
                "body": wire.recordable(self.body),
            },
            "response": None
            if status is None
            else {
                "ts": _now(),
                "status_code": status,
                "headers": {k: v for k, v in headers.items() if k not in _SECRET_REPLY_HEADERS},
                "body": wire.recordable(body),
            },
            "duration_ms": round((ended - self._began) * 1000, 3),
            "metadata": {
                "request_model": self.body.get("model"),
                "upstream_model": route.upstream.model,
                "dialect": DIALECT,
                "upstream_dialect": DIALECT,
                "purpose": self.purpose,
                "session_id": self.session_id,
                "attempt": max(1, self.attempt),
                "retry_of": self.first_index,
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
        if self.first_index is None:
            self.first_index = index


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
    return prompt + completion if isinstance(prompt, int) and isinstance(completion, int) else None


def _cost(usage: dict[str, Any] | None, policy: bool) -> float | None:
    """Some providers say what a call cost."""
    cost = (usage or {}).get("cost")
    return (
        float(cost) if not policy and isinstance(cost, (int, float)) and not isinstance(cost, bool) else None
    )
