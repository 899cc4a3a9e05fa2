"""opencode itself, from npm, driven by the scripted model through the gateway, in each sandbox."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchflow.agents import catalog
from benchflow.contracts.agent import AskUser, StopReason
from benchflow.contracts.errors import PrerequisiteError
from benchflow.contracts.sandbox import ImageSource, ModelDoor, Sandbox, SandboxProvider, SandboxSpec
from benchflow.gateway.calls import load_calls
from benchflow.gateway.purpose import text_of
from benchflow.jobs.config import EvaluationConfig
from benchflow.jobs.evaluation import Evaluation
from benchflow.kernel.registry import resolve
from benchflow.training.convert import convert, make_options
from benchflow.training.validate import validate

HOST = ImageSource("opencode", None, None, docker_image="debian:bookworm-slim", local_base="host")
ONE_MIB = 1 << 20
SLEEP = "sleep 4242"

POLICY = {
    "model": "scripted",
    "turns": [
        {"when": "Make the file", "say": "I make it.", "run": "echo made | tee made.txt; exit 3"},
        {"when": "Print much", "run": f"head -c {ONE_MIB} /dev/zero | tr '\\0' x"},
        {"when": "Wait", "run": f"{SLEEP} & {SLEEP}"},
        {"when": "Ask first", "run": "echo asked >> asked.txt"},
        {"when": "What did I", "say": "You asked for a file."},
    ],
    "otherwise": {"say": "Done."},
}

TASK = """---
schema_version: "1.3"
agent: {{timeout_sec: {timeout}}}
verifier: {{timeout_sec: 60}}
environment: {{network_mode: no-network, docker_image: "debian:bookworm-slim"}}
benchflow: {{runtime_policy: {{backend: local, local_base: host}}}}
---
{instruction}
"""


@pytest.fixture(params=["local", "docker"])
def provider_name(request: pytest.FixtureRequest, opencode: Any) -> str:
    return request.param


@pytest.fixture
async def provider(
    provider_name: str, require: Callable[[object, str], None]
) -> AsyncIterator[SandboxProvider]:
    made: SandboxProvider = resolve("sandboxes", provider_name)()
    try:
        await made.preflight()
    except PrerequisiteError as error:
        require(False, str(error))
    yield made
    await made.close()


@pytest.fixture
def policy(tmp_path: Path) -> str:
    path = tmp_path / "policy.yaml"
    path.write_text(yaml.safe_dump(POLICY))
    return f"scripted/{path}"


class Place:
    """A sandbox with opencode's bundle and a way to the scripted model."""

    def __init__(self, sandbox: Sandbox, connect: Callable[..., Awaitable[Any]], calls: Path) -> None:
        self.sandbox, self.connect, self._calls = sandbox, connect, calls

    async def shell(self, command: str) -> str:
        return (await self.sandbox.exec(command, cwd="/app")).out

    def calls(self) -> list[dict[str, Any]]:
        return list(load_calls(self._calls))


@pytest.fixture
async def open_place(route, context, policy: str, tmp_path: Path) -> AsyncIterator[Callable[..., Any]]:
    opened: list[Any] = []
    agent = catalog.load("opencode")

    async def start(provider: SandboxProvider, source: ImageSource) -> Place:
        way = await route(policy)
        spec = SandboxSpec(
            name="opencode",
            workdir="/app",
            mounts=await agent.prepare(),
            model_door=ModelDoor(way.socket, way.inside_port),
        )
        sandbox = await provider.create(await provider.prepare(source), spec)
        opened.append(sandbox.teardown)

        async def connect(resume: Any = None, **env: str) -> Any:
            given = context(agent="opencode", model=policy, route=way, env=env, cancel_grace=20.0)
            session = await agent.connect(sandbox, given, resume=resume)
            opened.append(session.close)
            return session

        return Place(sandbox, connect, tmp_path / "llm_trajectory.jsonl")

    yield start
    for end in reversed(opened):
        await end()


async def test_a_conversation_with_every_kind_of_turn(provider, open_place, record):
    """Tool turn, 1 MiB of output, cancel in the middle of a command, and the session loaded again by
    a new process, which asks before it acts: one sandbox, two processes."""
    place = await open_place(provider, HOST)
    session = await place.connect()

    assert await session.prompt("Make the file.") is StopReason.END_TURN
    assert await place.shell("cat made.txt") == "made\n"
    call = record.last("tool_call_update")
    assert call["input"]["command"].startswith("echo made")
    assert call["exit_code"] == 3 and "made" in json.dumps(call["output"])
    assert call["status"] == "completed"

    assert await session.prompt("Print much.") is StopReason.END_TURN
    told = record.last("tool_call_update")
    assert told["exit_code"] == 0 and "xxxxx" in json.dumps(told["output"])

    waiting = asyncio.create_task(session.prompt("Wait."))
    while SLEEP not in await place.shell("ps -eo args"):
        assert not waiting.done()
    await session.cancel()
    assert await waiting is StopReason.CANCELLED
    assert SLEEP not in await place.shell("ps -eo args")

    library = "/home/agent/.config/opencode/node_modules"
    assert await place.shell(f"ls {library}; ls -d /home/agent/.npm") == "", "it downloads at its start"

    state = await session.fork_state()
    await session.close()
    assert "opencode" not in await place.shell("ps -eo args")

    loaded = await place.connect(resume=state, OPENCODE_PERMISSION='{"bash": "ask"}')
    assert loaded.session_id == session.session_id
    answers = iter(["Reject", "Allow once"])
    asked: list[AskUser] = []

    async def user(question: AskUser) -> str | None:
        asked.append(question)
        wanted = next(answers)
        return next(name for name in question.options if name.lower().startswith(wanted.lower()[:5]))

    loaded.on_ask_user(user)
    await loaded.prompt("Ask first.")
    assert await place.shell("cat asked.txt") == ""
    await loaded.prompt("Ask first, again.")
    assert await place.shell("cat asked.txt") == "asked\n"
    assert len(asked) == 2 and {"allow_once", "reject_once"} <= set(asked[0].kinds)

    await loaded.prompt("What did I ask for?")
    messages = place.calls()[-1]["request"]["body"]["messages"]
    words = [text_of(message["content"]).strip() for message in messages if message["role"] == "user"]
    assert words[0] == "Make the file." and words[-1] == "What did I ask for?"
    assert {c["metadata"]["purpose"] for c in place.calls()} == {"agent"}


@pytest.fixture
def job(tmp_path: Path, provider_name: str) -> Callable[..., Awaitable[Path]]:
    """Runs rollouts of one small task and returns the job's folder."""

    async def run(turns: list[dict[str, Any]], *, timeout: int = 120, **fields: Any) -> Path:
        task = tmp_path / "task"
        (task / "verifier").mkdir(parents=True)
        (task / "task.md").write_text(TASK.format(timeout=timeout, instruction="Write /app/answer."))
        (task / "verifier" / "test.sh").write_text(
            "#!/bin/sh\n(cat /app/answer || echo 0) > /logs/verifier/reward.txt\n"
        )
        policy = tmp_path / "job-policy.yaml"
        policy.write_text(yaml.safe_dump({"turns": turns}))
        config = EvaluationConfig(
            agent="opencode", model=f"scripted/{policy}", sandbox=provider_name, **fields
        )
        await Evaluation([str(task)], tmp_path / "jobs", config).run()
        return tmp_path / "jobs"

    return run


def results(jobs: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(jobs.rglob("result.json"))]


@pytest.mark.parametrize(
    ("provider_name", "n"),
    [
        pytest.param("local", 8, marks=pytest.mark.slow),
        pytest.param("docker", 8, marks=pytest.mark.slow),
    ],
    indirect=["provider_name"],
)
async def test_many_at_once_make_rows_to_train_on(provider, job, tmp_path: Path, n: int):
    jobs = await job([{"run": "echo 1 > /app/answer"}], trials=n, concurrency=n)
    done = results(jobs)
    assert [one["rewards"] for one in done] == [{"reward": 1.0}] * n, [one["error"] for one in done]
    convert(jobs, tmp_path / "rows.jsonl", make_options())
    check = validate(tmp_path / "rows.jsonl", require_tool_calls=True)
    assert check.ok and check.rows == n, check.lines()


async def test_usage_is_kept_when_time_runs_out(provider, job):
    """C46."""
    jobs = await job([{"run": "echo 1 > /app/answer; sleep 600"}], timeout=8)
    (result,) = results(jobs)
    assert result["error_category"] == "timeout"
    assert result["agent_result"]["n_output_tokens"] > 0 and result["agent_result"]["n_input_tokens"] > 0
    assert result["rewards"] == {"reward": 1.0}, "what it had done is scored"


async def test_an_image_without_libc_or_certificates(open_place, opencode, busybox, record):
    """The bundle brings what opencode needs."""
    provider = resolve("sandboxes", "local")()
    place = await open_place(provider, busybox(provider))
    session = await place.connect()
    assert await session.prompt("Make the file.") is StopReason.END_TURN
    assert await place.shell("cat made.txt") == "made\n"
    assert record.last("tool_call_update")["exit_code"] == 3
    await session.close()
    await provider.close()
