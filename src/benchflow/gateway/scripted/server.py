"""The scripted model as a server of its own, speaking vLLM's wire format."""

from __future__ import annotations

import asyncio
import signal
from collections import OrderedDict
from collections.abc import Callable, Mapping
from hashlib import blake2b
from typing import Any

from benchflow.gateway import sse, tokens, wire
from benchflow.gateway.asgi import (
    BadRequest,
    Disconnected,
    Listener,
    Receive,
    Scope,
    Send,
    read_chat,
    send_head,
    send_json,
)
from benchflow.gateway.scripted.engine import answer, rollout_seed
from benchflow.gateway.scripted.policy import Policy

_REMEMBERED = 10_000
"""Requests whose attempts are counted, so that a retry of a failed one gets further."""
_PIECE = 24
"""Characters in one streamed chunk."""


class ScriptedServer:
    """Serves ``POST /v1/chat/completions`` and ``GET /v1/models`` at ``http://host:port/v1``.

    The seed of a draw is taken from the headers ``X-Benchflow-Seed``, ``-Task`` and ``-Trial``,
    else from ``seed`` in the body, else from the server's seed and the session header. Like an
    engine that streams through a tool parser, it sends no token ids in a stream.
    """

    def __init__(self, policy: Policy, *, host: str = "127.0.0.1", port: int = 0, seed: int = 0) -> None:
        self.policy = policy
        self._seed = seed
        self._host = host
        self._listener = Listener(self._app, (host, port), log_level="critical")
        self._attempts: OrderedDict[bytes, int] = OrderedDict()

    @property
    def url(self) -> str:
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{host}:{self._listener.port}/v1"

    async def start(self) -> None:
        """Raises ``PrerequisiteError`` when the port is taken."""
        await self._listener.start()

    async def stop(self) -> None:
        await self._listener.stop()

    async def _app(self, scope: Scope, receive: Receive, send: Send) -> None:
        route = (scope["method"], scope["path"].rstrip("/"))
        if route == ("GET", "/v1/models"):
            return await send_json(send, 200, wire.model_list(self.policy.name, self.policy.context))
        if route == ("GET", "/health"):
            return await send_json(send, 200, {})
        if route != ("POST", "/v1/chat/completions"):
            return await send_json(send, 404, wire.error_body("Not Found", "NotFoundError"))
        try:
            raw, body = await read_chat(receive)
        except Disconnected:
            return
        except BadRequest as error:
            return await send_json(send, 400, wire.error_body(str(error), "BadRequestError"))
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        await self._complete(headers, raw, body, send)

    async def _complete(
        self, headers: Mapping[str, str], raw: bytes, body: dict[str, Any], send: Send
    ) -> None:
        attempt = self._count(headers.get("x-session-id", ""), raw)
        reply = answer(self.policy, body, seed=self._seed_of(headers, body), attempt=attempt)
        if reply.delay:
            await asyncio.sleep(reply.delay)
        if reply.disconnect:
            # An answer that is never completed: uvicorn complains (log level) and hangs up.
            await send_head(send, 200, [(b"content-length", b"1000")])
            return await send({"type": "http.response.body", "body": b"{", "more_body": True})
        extra = []
        if reply.retry_after is not None:
            extra.append((b"retry-after", str(reply.retry_after).encode()))
        if self.policy.version is not None:
            extra.append((b"x-policy-version", self.policy.version.encode("latin-1", "replace")))
        if reply.status == 200 and body.get("stream"):
            return await self._stream(reply.body, body, extra, send)
        await send_json(send, reply.status, reply.body, *extra)

    async def _stream(
        self, reply: dict[str, Any], body: dict[str, Any], extra: list[tuple[bytes, bytes]], send: Send
    ) -> None:
        plain = tokens.strip(reply, keep_logprobs=bool(body.get("logprobs")))
        usage = bool((body.get("stream_options") or {}).get("include_usage"))
        await send_head(send, 200, [(b"content-type", b"text/event-stream; charset=utf-8"), *extra])
        for event in sse.synthesise(plain, include_usage=usage, piece=_PIECE):
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    def _seed_of(self, headers: Mapping[str, str], body: Mapping[str, Any]) -> int:
        named = [headers.get(f"x-benchflow-{what}", "") for what in ("seed", "task", "trial")]
        if named[0].isdigit():
            return rollout_seed(int(named[0]), named[1], int(named[2]) if named[2].isdigit() else 1)
        if isinstance(body.get("seed"), int):
            return body["seed"]
        return rollout_seed(self._seed, headers.get("x-session-id", ""), 1)

    def _count(self, session: str, raw: bytes) -> int:
        key = blake2b(session.encode() + b"\0" + raw, digest_size=16).digest()
        attempt = self._attempts.pop(key, 0) + 1
        self._attempts[key] = attempt
        if len(self._attempts) > _REMEMBERED:
            self._attempts.popitem(last=False)
        return attempt


async def serve(
    policy: Policy, *, host: str, port: int, seed: int, ready: Callable[[str, str], None]
) -> None:
    """Serve until SIGINT or SIGTERM. ``ready`` is called with the model's name and the URL."""
    server = ScriptedServer(policy, host=host, port=port, seed=seed)
    await server.start()
    over = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, over.set)
    try:
        ready(policy.name, server.url)
        await over.wait()
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
        await server.stop()
