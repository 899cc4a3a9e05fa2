"""One chat-completions call of an agent: refuse, submit, retry, answer.

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
from typing import Any

from benchflow.contracts.errors import HostPressureError
from benchflow.gateway import failures, sse, tokens, wire
from benchflow.gateway.asgi import (
    JSON,
    SSE,
    BadRequest,
    Disconnected,
    Receive,
    Scope,
    Send,
    read_chat,
    send_bytes,
    send_head,
    send_json,
)
from benchflow.gateway.client import Answer, Unreachable
from benchflow.gateway.recorder import Recorder
from benchflow.gateway.route import Route
from benchflow.gateway.upstream import Submission

_SECRET_HEADERS = frozenset(
    {b"authorization", b"x-api-key", b"api-key", b"x-goog-api-key", b"cookie", b"proxy-authorization"}
)


@dataclass(frozen=True, slots=True)
class Patience:
    """How long passing trouble of an upstream is waited out, per call. Times in seconds.

    ``pulse``: an agent that asked for a stream hears a comment this often while the policy
    thinks, because HTTP clients give up on a silent connection.
    """

    attempts: int = 6
    budget: float = 60.0
    first: float = 0.5
    longest: float = 15.0
    pulse: float = 15.0

    def delay(self, attempt: int, waited: float, asked: float | None) -> float | None:
        """Wait before the attempt after ``attempt``; None when it is time to give up."""
        if attempt >= self.attempts:
            return None
        backoff = min(self.longest, self.first * 2 ** (attempt - 1)) * random.uniform(0.5, 1.0)
        delay = max(backoff, asked or 0.0)
        return None if waited + delay > self.budget else delay


@dataclass(frozen=True, slots=True)
class Trouble:
    """An attempt that may be tried again; with ``room``, at once and for fewer tokens."""

    message: str
    status: int | None = None
    body: bytes = b""
    retry_after: float | None = None
    room: int | None = None

    @property
    def down(self) -> bool:
        """The endpoint is away, rather than busy or unable to serve this one request."""
        return self.status in (None, 502, 503, 504)


async def handle(route: Route, patience: Patience, scope: Scope, receive: Receive, send: Send) -> None:
    """Serve one ``POST /v1/chat/completions``."""
    try:
        raw, body = await read_chat(receive)
    except Disconnected:
        return
    except BadRequest as error:
        return await send_json(send, 400, wire.error_body(str(error), "invalid_request_error"))
    if route.closed:
        return await send_json(send, 410, wire.error_body("this rollout is over", "rollout_closed"))
    headers = {
        name.decode("latin-1"): value.decode("latin-1")
        for name, value in scope["headers"]
        if name not in _SECRET_HEADERS
    }
    task = asyncio.current_task()
    assert task is not None
    await Exchange(route, patience, raw, Recorder(route, headers, body), send, task).run(receive)


@dataclass(slots=True, eq=False)
class Exchange:
    """Implements ``gateway.route.Stoppable``."""

    route: Route
    patience: Patience
    raw: bytes
    record: Recorder
    send: Send
    task: asyncio.Task[Any]
    _arrived: float = field(default_factory=time.monotonic)
    _stopped: str | None = None
    _head_sent: bool = False
    _finished: bool = False
    _pulse: asyncio.Task[None] | None = None

    async def run(self, receive: Receive) -> None:
        """Serve the call until it is answered, the agent hangs up, or ``stop``."""
        route = self.route
        route.in_flight.add(self)
        watcher = asyncio.create_task(self._watch(receive))
        try:
            with route.waiting:
                await self._serve()
        except asyncio.CancelledError:
            if self._stopped is None:
                raise
            self.task.uncancel()
            route.counts.failed += 1
            if not self._finished:
                await self._error(503, wire.error_body(self._stopped, "rollout_closed"))
        except HostPressureError as error:
            route.fail(error.category, error.message, self.record.purpose)
            await self._error(503, wire.error_body(error.message, error.category))
        finally:
            self._finished = True
            watcher.cancel()
            if self._pulse is not None:
                self._pulse.cancel()
            route.in_flight.discard(self)

    async def stop(self, reason: str) -> None:
        if not self._finished:
            self._stopped = reason
            self.task.cancel()
            await asyncio.wait([self.task])

    async def _watch(self, receive: Receive) -> None:
        """An agent that hangs up frees the model at once."""
        message = await receive()
        if message["type"] == "http.disconnect" and not self._finished:
            self._stopped, self._finished = "the agent disconnected", True
            self.task.cancel()

    async def _serve(self) -> None:
        route, breaker = self.route, self.route.upstream.guard.breaker
        if await self._refuse():
            return
        route.counts.calls += 1
        payload = self._prepare()
        if route.upstream.target.policy and self.record.body.get("stream"):
            self._pulse = asyncio.create_task(self._keep_awake())
        while True:
            reason = breaker.blocked()
            if reason is not None:
                return await self._give_up(Trouble(reason))
            self.record.attempt += 1
            trouble = await self._try(
                Submission(payload, self.record.session_id, route.seed, self.record.attempt)
            )
            if trouble is None:
                return
            if trouble.room is not None:
                payload = self._prepare(room=trouble.room)
                continue
            waited, attempt = time.monotonic() - self._arrived, self.record.attempt
            delay = self.patience.delay(attempt, waited, trouble.retry_after)
            # After a tripped breaker's cooldown a call has one attempt, not a whole budget.
            if delay is None or breaker.open:
                if trouble.down:
                    breaker.trip(trouble.message, since=self._arrived)
                return await self._give_up(trouble)
            with route.retrying:
                await asyncio.sleep(delay)

    # -- before the call

    async def _refuse(self) -> bool:
        """Answer without calling the model when a budget or the context says so."""
        route, limit = self.route, self.route.spec.max_context
        spent = route.spent()
        if spent is not None:
            await self._end("budget", spent, failures.BUDGET_CODE)
            return True
        used = route.log.context_of(self.record.body["messages"]) if limit is not None else None
        if limit is not None and used is not None and used >= limit:
            message = f"the conversation holds at least {used} tokens; the maximum context length is {limit}"
            await self._end("context_limit", message, failures.CONTEXT_CODE)
            return True
        return False

    async def _end(self, category: str, message: str, code: str) -> None:
        body = wire.error_body(message, category, code)
        self.record.broken(400, {}, wire.dumps(body), message)
        self.route.fail(category, message, self.record.purpose)
        await self._error(400, body)

    def _prepare(self, room: int | None = None) -> bytes:
        """The bytes to submit: the agent's own unless something must be different. ``room`` is
        the most tokens that the reply may have."""
        upstream, body = self.route.upstream, self.record.body
        changes: dict[str, Any] = dict(self.route.spec.sampling)
        if room is not None:
            changes["max_tokens"] = room
        if body.get("model") != upstream.model:
            changes["model"] = upstream.model
        self.record.submitted = body
        if not changes and not upstream.target.policy:
            return self.raw
        submitted = {**body, **changes}
        if "max_tokens" in changes:
            submitted.pop("max_completion_tokens", None)
        if upstream.target.policy:
            tokens.ask(submitted, train_mode=self.route.spec.train_mode)
            submitted.setdefault("seed", self.route.seed)
        self.record.submitted = submitted
        return wire.dumps(submitted)

    # -- one attempt

    async def _try(self, submission: Submission) -> Trouble | None:
        """None once the agent has its answer."""
        upstream = self.route.upstream
        came: list[bytes] = []
        status, headers = None, {}
        self.record.begin()
        try:
            async with upstream.guard.slots or nullcontext():
                self.record.begin()
                async with upstream.send(submission) as answer:
                    status, headers = answer.status, dict(answer.headers)
                    relayed = self._relays(answer)
                    if relayed:
                        await self._relay(answer, came)
                    else:
                        async for chunk in answer.chunks:
                            came.append(chunk)
        except Unreachable as error:
            return await self._cut(status, headers, b"".join(came), str(error))
        except asyncio.CancelledError:
            self.record.broken(status, headers, b"".join(came), self._stopped or "the gateway stopped")
            raise
        body = b"".join(came)
        if relayed:
            return await self._relayed(headers, body)
        if failures.transient(status):
            message = failures.error_of(body)[1] or f"status {status}"
            self.record.broken(status, headers, body, message)
            return Trouble(message, status, body, failures.retry_after(headers))
        if 200 <= status < 300:
            return await self._deliver(status, headers, body)
        return await self._rejected(status, headers, body)

    def _relays(self, answer: Answer) -> bool:
        if answer.status != 200 or self.route.upstream.target.policy or not self.record.body.get("stream"):
            return False
        return answer.headers.get("content-type", "").startswith("text/event-stream")

    async def _relay(self, answer: Answer, came: list[bytes]) -> None:
        self._head_sent = True
        await send_head(self.send, 200, [(b"content-type", answer.headers["content-type"].encode("latin-1"))])
        async for chunk in answer.chunks:
            came.append(chunk)
            await self.send({"type": "http.response.body", "body": chunk, "more_body": True})

    async def _relayed(self, headers: dict[str, str], stream: bytes) -> None:
        reply = sse.assemble(stream) or {}
        if reply.get("choices"):
            self.record.success(200, headers, reply)
        else:
            why = failures.error_of(wire.dumps(reply))[1] or "the stream held no reply"
            self.record.broken(200, headers, stream, why)
            self.route.fail("endpoint", why, self.record.purpose)
        await self._finish(b"")

    async def _deliver(self, status: int, headers: dict[str, str], body: bytes) -> Trouble | None:
        target, record = self.route.upstream.target, self.record
        try:
            reply = wire.loads(body)
        except wire.BadJson:
            reply = None
        if not isinstance(reply, dict) or not isinstance(reply.get("choices"), list):
            message = "the endpoint's reply is not a chat completion"
            record.broken(status, headers, body, message)
            return Trouble(message, status)
        if not target.policy:
            record.success(status, headers, reply)
            return await self._reply(status, body, _content_type(headers))
        capture = tokens.read(target.provider, reply)
        plain = tokens.strip(reply, keep_logprobs=bool(record.body.get("logprobs")))
        if await self._too_long(headers, plain, capture):
            return None
        version = reply.get("policy_version") or reply.get("weight_version")
        record.success(status, headers, plain, capture, version)
        if not record.body.get("stream"):
            return await self._reply(status, wire.dumps(plain))
        options = record.body.get("stream_options") or {}
        events = sse.synthesise(plain, include_usage=bool(options.get("include_usage")))
        await self._reply(status, b"".join(events), SSE)

    async def _too_long(
        self, headers: dict[str, str], reply: dict[str, Any], capture: dict[str, Any]
    ) -> bool:
        """A prompt over ``max_context`` that the engine would still have taken."""
        limit = self.route.spec.max_context
        prompt = (reply.get("usage") or {}).get("prompt_tokens")
        if limit is None or not isinstance(prompt, int) or prompt <= limit:
            return False
        message = f"the prompt holds {prompt} tokens; the maximum context length is {limit}"
        self.record.refused(headers, reply, capture, message)
        self.route.fail("context_limit", message, self.record.purpose)
        await self._error(400, wire.error_body(message, "context_limit", failures.CONTEXT_CODE))
        return True

    async def _rejected(self, status: int, headers: dict[str, str], body: bytes) -> Trouble | None:
        """A refusal that no retry would change goes to the agent as it is; only a context
        overflow is put into the one form that agents understand."""
        message = failures.error_of(body)[1] or f"status {status}"
        self.record.broken(status, headers, body, message)
        self.route.upstream.guard.breaker.succeeded()
        if failures.context_overflow(status, body):
            room = failures.room_left(message)
            if room is not None and self.record.attempt == 1:
                return Trouble(message, status, room=room)
            self.route.fail("context_limit", message, self.record.purpose)
            refusal = wire.error_body(message, "invalid_request_error", failures.CONTEXT_CODE)
            return await self._error(400, refusal)
        self.route.fail("endpoint_rejected", f"{status}: {message}", self.record.purpose)
        await self._reply(status, body, _content_type(headers))

    async def _cut(self, status: int | None, headers: dict[str, str], raw: bytes, why: str) -> Trouble | None:
        self.record.broken(status, headers, raw, why)
        if self._pulse is None and self._head_sent:
            self.route.fail("endpoint", why, self.record.purpose)
            return await self._error(502, wire.error_body("the model endpoint broke off", "server_error"))
        return Trouble(why)

    async def _give_up(self, trouble: Trouble) -> None:
        route, target = self.route, self.route.upstream.target
        where = target.base_url or route.spec.model
        if trouble.status == 429:
            message = f"the model endpoint {where} keeps limiting the rate: {trouble.message}"
        else:
            message = f"the model endpoint {where} is unavailable: {trouble.message}"
        if not self.record.attempt:
            self.record.broken(None, {}, b"", message)
        route.fail("endpoint", message, self.record.purpose)
        if trouble.status == 429:
            return await self._reply(429, trouble.body)
        await self._error(503, wire.error_body(message, "server_error", failures.DOWN_CODE))

    # -- the answer to the agent

    async def _keep_awake(self) -> None:
        while True:
            await asyncio.sleep(self.patience.pulse)
            if not self._head_sent:
                self._head_sent = True
                await send_head(self.send, 200, [(b"content-type", SSE)])
            await self.send({"type": "http.response.body", "body": b": thinking\n\n", "more_body": True})

    async def _reply(self, status: int, body: bytes, content_type: bytes = JSON) -> None:
        """The whole answer; as an event when a stream was already begun."""
        self._finished = True
        if self._pulse is not None:
            self._pulse.cancel()
        if not self._head_sent:
            self._head_sent = True
            return await send_bytes(self.send, status, body, content_type)
        await self._finish(body if content_type is SSE else b"data: " + body.strip() + b"\n\n")

    async def _error(self, status: int, payload: dict[str, Any]) -> None:
        await self._reply(status, wire.dumps(payload))

    async def _finish(self, last: bytes) -> None:
        self._finished = True
        await self.send({"type": "http.response.body", "body": last})


def _content_type(headers: dict[str, str]) -> bytes:
    return headers.get("content-type", "application/json").encode("latin-1")
