"""A real sandbox, a session context whose record goes to disk, and scripted agents."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml
from aiohttp import web

from benchflow.agents import catalog
from benchflow.contracts.agent import SessionContext
from benchflow.contracts.errors import PrerequisiteError
from benchflow.contracts.gateway import ModelSpec
from benchflow.contracts.sandbox import ImageSource, Sandbox, SandboxSpec
from benchflow.gateway.exchange import Patience
from benchflow.gateway.server import GatewayServer
from benchflow.kernel import storage
from benchflow.sandboxes.local.bases import import_base
from benchflow.sandboxes.local.provider import LocalProvider

WORKSPACE = "/app"


@pytest.fixture(scope="session")
def shared_bundles(require: Callable[[object, str], None]) -> Path:
    """Where opencode is installed, once for all workers and runs of the tests."""
    with pytest.MonkeyPatch.context() as patch:
        place = os.environ.get("BENCHFLOW_BUNDLES") or Path.home() / ".cache" / "benchflow-tests" / "bundles"
        patch.setenv("BENCHFLOW_BUNDLES", str(place))
        try:
            asyncio.run(catalog.ensure_bundle("opencode"))
        except PrerequisiteError as error:
            require(False, str(error))
    return Path(place)


@pytest.fixture
def opencode(shared_bundles: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """opencode is installed; the folder of bundles."""
    monkeypatch.setenv("BENCHFLOW_BUNDLES", str(shared_bundles))
    return shared_bundles


@pytest.fixture
def busybox(require: Callable[[object, str], None], tmp_path: Path) -> Callable[[LocalProvider], ImageSource]:
    """Imports a root file system that is busybox alone: like Alpine, without any libc we know."""
    program = shutil.which("busybox")
    require(program, "no busybox on this machine")

    def make(provider: LocalProvider) -> ImageSource:
        root = tmp_path / "rootfs"
        for folder in ("bin", "etc", "tmp", "proc", "dev", "usr"):
            (root / folder).mkdir(parents=True)
        shutil.copy2(str(program), root / "bin" / "busybox")
        for name in ("sh", "cat", "echo", "ps", "tee", "ls", "id", "mkdir", "chmod", "chown", "touch"):
            (root / "bin" / name).symlink_to("busybox")
        (root / "etc" / "passwd").write_text("root:x:0:0::/root:/bin/sh\n")
        (root / "etc" / "group").write_text("root:x:0:\n")
        import_base(provider.store, "busybox:1", root)
        return ImageSource("busybox", None, None, docker_image="busybox:1")

    return make


@pytest.fixture(scope="session")
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One image store for all tests of this folder."""
    return tmp_path_factory.mktemp("state")


@pytest.fixture
async def new_sandbox(state: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Callable[..., Any]]:
    """Starts local sandboxes; keyword arguments are those of ``SandboxSpec``."""
    monkeypatch.setenv("BENCHFLOW_HOME", str(state))
    provider = LocalProvider()
    image = await provider.prepare(
        ImageSource(name="agents", context=None, dockerfile=None, local_base="host")
    )
    started: list[Sandbox] = []

    async def start(**spec: Any) -> Sandbox:
        name = f"agents-{len(started)}"
        sandbox = await provider.create(image, SandboxSpec(name=name, workdir=WORKSPACE, **spec))
        started.append(sandbox)
        return sandbox

    yield start
    for sandbox in started:
        await sandbox.teardown()
    await provider.close()


@pytest.fixture
async def sandbox(new_sandbox: Callable[..., Any]) -> Sandbox:
    return await new_sandbox()


@dataclass
class Record:
    """What a session recorded: in memory for the tests, on disk as the kernel would keep it."""

    path: Path
    events: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._writer = storage.LineWriter(self.path)
        self._news = asyncio.Event()

    def __call__(self, event: Mapping[str, object]) -> None:
        line = {"ts": "t", "seq": len(self.events), "node_id": "n1", **event}
        self._writer.append(line)
        self.events.append(line)
        self._news.set()

    async def seen(self, kind: str) -> None:
        """Wait until an event of this kind has been recorded."""
        while kind not in self.kinds():
            self._news.clear()
            await self._news.wait()

    def kinds(self) -> list[str]:
        return [event["kind"] for event in self.events]

    def said(self) -> list[str]:
        return [e["update"]["content"]["text"] for e in self.events if e["kind"] == "agent_message"]

    def last(self, kind: str) -> dict[str, Any]:
        return [event for event in self.events if event["kind"] == kind][-1]


@pytest.fixture
def record(tmp_path: Path) -> Record:
    return Record(tmp_path / "acp_trajectory.jsonl")


@pytest.fixture
def context(tmp_path: Path, record: Record) -> Callable[..., SessionContext]:
    """Makes a session context; keyword arguments replace its fields."""
    logs = tmp_path / "agent"
    logs.mkdir()

    def make(**changes: Any) -> SessionContext:
        defaults: dict[str, Any] = {
            "role": "agent",
            "agent": "scripted",
            "model": None,
            "workspace": WORKSPACE,
            "user": "agent",
            "logs": logs,
            "record": record,
            "route": None,
            "cancel_grace": 1.0,
        }
        return SessionContext(**(defaults | changes))

    return make


@pytest.fixture
async def scripted(
    sandbox: Sandbox, tmp_path: Path, context: Callable[..., SessionContext]
) -> AsyncIterator[Callable[..., Any]]:
    """Connects the scripted agent to a script given as actions, or as a whole mapping."""
    sessions: list[Any] = []
    agent = catalog.load("scripted")

    async def connect(script: Any, *, resume: Any = None, into: Sandbox = sandbox, **changes: Any) -> Any:
        path = tmp_path / f"script-{len(sessions)}.yaml"
        path.write_text(yaml.safe_dump(script if isinstance(script, dict) else {"actions": script}))
        env = {"BENCHFLOW_SCRIPT": str(path)} | dict(changes.pop("env", {}))
        await agent.install(into)
        session = await agent.connect(into, context(env=env, **changes), resume=resume)
        sessions.append(session)
        return session

    yield connect
    for session in sessions:
        await session.close()


@dataclass
class Endpoint:
    """A chat-completions server that answers what the test says and keeps what it was sent."""

    url: str = ""
    replies: list[Any] = field(default_factory=list)
    requests: list[dict[str, Any]] = field(default_factory=list)

    def say(self, text: str, **more: Any) -> None:
        self.answer({"role": "assistant", "content": text}, **more)

    def call(self, arguments: Any, *, name: str = "bash", call_id: str = "c1", **more: Any) -> None:
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments)
        call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        message = {"role": "assistant", "content": None, "tool_calls": [call]}
        self.answer(message, **({"finish_reason": "tool_calls"} | more))

    def answer(self, message: dict[str, Any], *, finish_reason: str = "stop", usage: Any = None) -> None:
        choice = {"index": 0, "message": message, "finish_reason": finish_reason}
        usage = usage or {"prompt_tokens": 10, "completion_tokens": 2, "total_tokens": 12}
        self.replies.append({"object": "chat.completion", "model": "m", "choices": [choice], "usage": usage})

    def refuse(self, status: int, message: str, code: str | None = None) -> None:
        self.replies.append((status, {"error": {"message": message, "type": "e", "code": code}}))

    async def handle(self, request: web.Request) -> web.Response:
        self.requests.append(await request.json())
        reply = self.replies.pop(0)
        if isinstance(reply, tuple):
            return web.json_response(reply[1], status=reply[0])
        return web.json_response(reply)


@pytest.fixture
async def endpoint() -> AsyncIterator[Endpoint]:
    found = Endpoint()
    app = web.Application()
    app.router.add_post("/v1/chat/completions", found.handle)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    found.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    yield found
    await runner.cleanup()


@pytest.fixture
async def gateway() -> AsyncIterator[GatewayServer]:
    with tempfile.TemporaryDirectory(prefix="bf-") as folder:
        server = GatewayServer(
            Path(folder, "gateway.sock"), redact=storage.Redactor(), patience=Patience(attempts=1)
        )
        await server.start()
        yield server
        await server.stop()


@pytest.fixture
async def route(gateway: GatewayServer, tmp_path: Path) -> Callable[..., Any]:
    """Opens a route; keyword arguments are those of ``ModelSpec``."""

    async def open_route(model: str, **spec: Any) -> Any:
        return await gateway.open_route(
            "r",
            ModelSpec(model, **spec),
            trajectory=tmp_path / "llm_trajectory.jsonl",
            task="t",
            seed=0,
            trial=1,
        )

    return open_route
