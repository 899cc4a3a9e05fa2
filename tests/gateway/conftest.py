"""Real servers on loopback and unix sockets: the gateway, the scripted model, a flaky upstream."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest
from aiohttp import web

from benchflow.contracts.gateway import ModelSpec
from benchflow.gateway.calls import load_calls
from benchflow.gateway.exchange import Patience
from benchflow.gateway.scripted.policy import parse_policy
from benchflow.gateway.scripted.server import ScriptedServer
from benchflow.gateway.server import GatewayServer
from benchflow.kernel.storage import Redactor

BASH: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Run a command",
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string"}},
            "required": ["command"],
        },
    },
}

TWO_TURNS = """
model: two-turns
turns:
  - choices:
      - {weight: 3, label: look, say: I look., run: ls}
      - {weight: 1, label: write, write: {path: /app/x, content: hi}}
  - say: finished
"""


@dataclass
class Bench:
    """A running gateway, a client of its socket, and shortcuts."""

    gateway: GatewayServer
    client: aiohttp.ClientSession
    redact: Redactor
    folder: Path
    opened: int = 0

    async def open(self, model: str, *, path: Path | None = None, **options: Any) -> Any:
        """A route; ``options`` are those of ``ModelSpec``, and ``seed``, ``task``, ``trial``."""
        self.opened += 1
        where = path or self.folder / f"calls-{self.opened}.jsonl"
        rollout = {name: options.pop(name) for name in ("seed", "task", "trial") if name in options}
        arguments: dict[str, Any] = {"task": "t", "seed": 0, "trial": self.opened, **rollout}
        spec = ModelSpec(model, **options)
        return await self.gateway.open_route(f"t__{self.opened}", spec, trajectory=where, **arguments)

    def post(self, route: Any, body: Any, **options: Any) -> Any:
        data = body if isinstance(body, bytes) else orjson.dumps(body)
        url = f"http://gateway{route.host_path}/v1/chat/completions"
        return self.client.post(url, data=io.BytesIO(data), **options)

    async def ask(self, route: Any, messages: list[Any], **body: Any) -> tuple[int, Any]:
        """One non-streaming call; ``(status, reply)``."""
        async with self.post(route, {"model": route.model, "messages": messages, **body}) as reply:
            return reply.status, await reply.json()

    async def converse(self, route: Any, *, most: int = 10, **body: Any) -> list[Any]:
        """Play an agent with one bash tool until the model stops; returns the messages."""
        messages: list[Any] = [{"role": "user", "content": "Solve it."}]
        for _ in range(most):
            status, reply = await self.ask(route, messages, tools=[BASH], **body)
            assert status == 200, reply
            message = reply["choices"][0]["message"]
            messages.append(message)
            if not message.get("tool_calls"):
                break
            for call in message["tool_calls"]:
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": "output"})
        return messages

    def calls(self, route: Any) -> list[dict[str, Any]]:
        return list(load_calls(route.log.path))


OpenBench = Callable[..., Any]


@pytest.fixture
def open_bench(tmp_path: Path) -> OpenBench:
    @asynccontextmanager
    async def run(**options: Any) -> AsyncIterator[Bench]:
        redact = Redactor()
        # Retries are real but short, so that a test that waits for them stays fast.
        options.setdefault("patience", Patience(attempts=3, first=0.001, budget=5.0))
        gateway = GatewayServer(tmp_path / "gateway.sock", redact=redact, **options)
        await gateway.start()
        connector = aiohttp.UnixConnector(str(tmp_path / "gateway.sock"), limit=0)
        try:
            async with aiohttp.ClientSession(connector=connector) as client:
                yield Bench(gateway, client, redact, tmp_path)
        finally:
            await gateway.stop()

    return run


@pytest.fixture
async def bench(open_bench: OpenBench) -> AsyncIterator[Bench]:
    async with open_bench() as running:
        yield running


@pytest.fixture
def policy_file(tmp_path: Path) -> Callable[[str], str]:
    """Write a policy; returns its model string."""

    def write(text: str = TWO_TURNS, name: str = "policy.yaml") -> str:
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return f"scripted/{path}"

    return write


@pytest.fixture
async def serve_policy() -> AsyncIterator[Callable[..., Awaitable[ScriptedServer]]]:
    async with AsyncExitStack() as stack:

        async def start(text: str = TWO_TURNS, **options: Any) -> ScriptedServer:
            server = ScriptedServer(parse_policy(text, "policy.yaml", "policy"), **options)
            await server.start()
            stack.push_async_callback(server.stop)
            return server

        yield start


@dataclass
class Flaky:
    """An OpenAI-compatible server whose answers the test writes. ``answers`` are used in turn,
    the last one for ever; each gets the request and returns a response."""

    answers: list[Callable[[web.Request], Awaitable[web.StreamResponse]]] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    url: str = ""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.bodies.append(await request.read())
        self.headers.append({key.lower(): value for key, value in request.headers.items()})
        answer = self.answers[min(len(self.bodies), len(self.answers)) - 1]
        return await answer(request)

    def reply(self, body: Any = None, status: int = 200, **headers: str) -> None:
        """Answer next with JSON."""

        async def answer(_: web.Request) -> web.StreamResponse:
            return web.json_response(completion() if body is None else body, status=status, headers=headers)

        self.answers.append(answer)


@pytest.fixture
async def flaky() -> AsyncIterator[Flaky]:
    upstream = Flaky()
    app = web.Application(client_max_size=1 << 30)
    app.router.add_post("/v1/chat/completions", upstream.handle)
    app.router.add_get("/v1/models", _models)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    upstream.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    yield upstream
    await runner.cleanup()


async def _models(_: web.Request) -> web.Response:
    return web.json_response({"object": "list", "data": [{"id": "m"}]})


def completion(text: str = "hello", **extra: Any) -> dict[str, Any]:
    """A plain chat completion."""
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1,
        "model": "m",
        "choices": [{"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15},
        **extra,
    }


@pytest.fixture
def make_completion() -> Callable[..., dict[str, Any]]:
    return completion


@pytest.fixture
def bash_tool() -> dict[str, Any]:
    return BASH


@pytest.fixture
def openai(flaky: Flaky, monkeypatch: pytest.MonkeyPatch) -> Flaky:
    """The flaky upstream as ``openai/…``, which is passed through."""
    monkeypatch.setenv("OPENAI_API_KEY", "secret-key-of-the-provider")
    monkeypatch.setenv("OPENAI_BASE_URL", flaky.url)
    return flaky


@pytest.fixture
async def refused() -> str:
    """A URL where nobody listens."""
    server = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    server.close()
    await server.wait_closed()
    return f"http://127.0.0.1:{port}/v1"
