"""The life of a rollout in a real local sandbox, phase by phase and with what can go wrong."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from pathlib import Path

import pytest

from benchflow.contracts.agent import AgentCapabilities, StopReason, Usage
from benchflow.contracts.config import Role, RolloutConfig, Scene, Turn
from benchflow.contracts.errors import AgentCrashError, AgentProtocolError, UsageError
from benchflow.contracts.gateway import RouteTotals
from benchflow.kernel.planes import open_planes
from benchflow.kernel.rollout import Rollout
from benchflow.kernel.storage import read_lines
from benchflow.kernel.tree import Tree

TASK = """---
agent:
  timeout_sec: 30
verifier:
  timeout_sec: 30
environment:
  network_mode: no-network
  env:
    API_TOKEN: "${KERNEL_TEST_TOKEN:-none}"
benchflow:
  runtime_policy:
    backend: local
    local_base: host
---
Write /app/answer.
"""


class StubSession:
    """A session whose turn is a function of the sandbox and the prompt."""

    session_id = "s"
    usage = Usage()
    n_tool_calls = 0

    def __init__(self, turn, sandbox, context) -> None:
        self._turn, self._sandbox, self._context = turn, sandbox, context
        self.closed = False

    async def prompt(self, text):
        self._context.record({"direction": "to_agent", "kind": "user_message", "update": text})
        return await self._turn(self._sandbox, text) or StopReason.END_TURN

    async def cancel(self):
        pass

    def on_ask_user(self, handler):
        pass

    async def fork_state(self):
        return None

    async def close(self):
        self.closed = True


class StubAgent:
    name, version = "stub", "1"

    def __init__(self, turn) -> None:
        self._turn = turn
        self.sessions = []

    def capabilities(self):
        return AgentCapabilities(needs_model=False, runs_inside=False)

    async def install(self, sandbox):
        pass

    async def connect(self, sandbox, context, *, resume=None):
        self.sessions.append(StubSession(self._turn, sandbox, context))
        return self.sessions[-1]


@pytest.fixture
def task(tmp_path):
    folder = tmp_path / "task"
    for relative, text in {
        "task.md": TASK,
        "environment/Dockerfile": "FROM debian:12-slim\nWORKDIR /app\n",
        "verifier/test.sh": "#!/bin/sh\ncat /app/answer > /logs/verifier/reward.txt\n",
    }.items():
        path = folder / relative
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
    return folder


@pytest.fixture
async def planes():
    planes = await open_planes("local", with_gateway=False)
    yield planes
    await planes.close()


@pytest.fixture
def rollout(task, planes, tmp_path):
    """``rollout(turn, **config)``: a rollout whose agent does ``turn`` at each prompt."""

    def make(turn, **fields) -> tuple[Rollout, StubAgent]:
        agent = StubAgent(turn)
        ours = dataclasses.replace(planes, load_agent=lambda name: agent)
        wanted = {"agent": "stub", "sandbox": "local", "rollout_dir": tmp_path / "r"} | fields
        return Rollout(RolloutConfig(task_path=task, **wanted), ours), agent

    return make


async def answers(sandbox, text):
    await sandbox.exec("echo 0.5 > /app/answer", user="agent")


def read(folder: Path, name: str):
    return json.loads((folder / name).read_text())


async def test_run_leaves_a_whole_record(rollout, tmp_path):
    subject, _ = rollout(answers)
    result = await subject.run()
    assert (result.rewards, result.outcome, result.attribution.verdict) == (
        {"reward": 0.5},
        "failed",
        "score",
    )
    folder = tmp_path / "r"
    assert read(folder, "result.json")["rewards"] == {"reward": 0.5}
    assert read(folder, "prompts.json") == ["Write /app/answer."]
    enforced, sandbox = read(folder, "config.json")["enforced"], read(folder, "result.json")["sandbox"]
    assert sandbox["limits"] == {name: enforced[name] for name in ("memory_mb", "cpus", "pids", "storage_mb")}
    assert sandbox["network"]["mode"] == enforced["network"] == "none"
    assert sandbox["users"] == {"ids": enforced["users"]}
    tree = Tree.parse(read(folder, "tree.json"))
    assert [node.id for node in tree.path("n1")] == ["n0", "n1"] and tree.rewards[0].value == 0.5
    events = list(read_lines(folder / "trajectory" / "acp_trajectory.jsonl"))
    assert [(e["seq"], e["node_id"], e["kind"]) for e in events] == [(0, "n1", "user_message")]
    assert list(read_lines(folder / "rewards.jsonl"))[-1]["value"] == 0.5


async def test_timing_adds_up(rollout, tmp_path):
    subject, _ = rollout(answers)
    await subject.run()
    timing = read(tmp_path / "r", "timing.json")
    parts = (
        "image",
        "sandbox_start",
        "provision",
        "agent_setup",
        "agent_execution",
        "verifier",
        "teardown",
        "other",
    )
    assert sum(timing[part] for part in parts) == pytest.approx(timing["total"], abs=1e-3)


async def test_phases_one_by_one_equal_run(rollout):
    subject, _ = rollout(answers)
    async with subject:
        await subject.setup()
        await subject.start()
        await subject.install_agent()
        await subject.connect()
        await subject.execute()
        await subject.execute(["again"])
        await subject.disconnect()
        assert (await subject.verify()).reward == 0.5
    assert subject.result is not None and subject.result.n_prompts == 2


@pytest.mark.parametrize("last", ["setup", "start", "install_agent", "connect", "execute"])
async def test_each_phase_leaves_a_true_record_as_the_last_one(rollout, last, tmp_path):
    subject, _ = rollout(answers)
    order = ["setup", "start", "install_agent", "connect", "execute"]
    async with subject:
        for phase in order[: order.index(last) + 1]:
            await getattr(subject, phase)()
    result = read(tmp_path / "r", "result.json")
    assert (result["outcome"], result["rewards"]) == ("unscored", None)
    assert result["attribution"] == {"verdict": "mask", "reason": "not verified"}


async def test_a_timed_out_agent_is_scored_on_what_it_left(rollout):
    """The verifier runs after a timeout; 0 is not assumed."""

    async def answers_then_hangs(sandbox, text):
        await answers(sandbox, text)
        await asyncio.Event().wait()

    subject, agent = rollout(answers_then_hangs, agent_timeout=0.3)
    result = await subject.run()
    assert (result.error_category, result.rewards, result.attribution.verdict) == (
        "timeout",
        {"reward": 0.5},
        "score",
    )
    assert result.partial_trajectory and agent.sessions[0].closed


async def test_a_crash_is_masked_and_not_verified(rollout, tmp_path):
    async def crashes(sandbox, text):
        await answers(sandbox, text)
        raise AgentCrashError("the agent exited with 3")

    subject, _ = rollout(crashes)
    result = await subject.run()
    assert (result.outcome, result.rewards, result.attribution.verdict) == ("errored", None, "mask")
    assert (
        result.error_category == "agent_crash" and not (tmp_path / "r" / "verifier" / "reward.txt").exists()
    )


async def test_a_fault_of_the_engine_is_data_with_evidence(rollout, tmp_path):
    async def breaks(sandbox, text):
        raise ZeroDivisionError("by zero")

    subject, _ = rollout(breaks)
    result = await subject.run()
    assert (result.outcome, result.attribution.verdict) == ("errored", "mask")
    assert "ZeroDivisionError" in (result.error or "")
    assert "ZeroDivisionError" in (tmp_path / "r" / "engine-error.txt").read_text()


@pytest.mark.parametrize("breaks", [False, True])
async def test_cancellation_tears_down_and_writes_cancelled(rollout, tmp_path, breaks):
    """Also when the agent breaks because it is being cancelled."""
    started = asyncio.Event()

    async def hangs(sandbox, text):
        started.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            if breaks:
                raise AgentCrashError("its pipe was closed") from None
            raise

    subject, agent = rollout(hangs)
    running = asyncio.create_task(subject.run())
    await started.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert read(tmp_path / "r", "result.json")["outcome"] == "cancelled"
    assert agent.sessions[0].closed


async def test_cancellation_during_cleanup_waits_for_its_end_and_is_not_lost(rollout, tmp_path, monkeypatch):
    """C22: the caller stops, and what was finished by then stays finished."""
    subject, _ = rollout(answers)
    entered, go_on = asyncio.Event(), asyncio.Event()
    async with asyncio.timeout(60):
        await subject.setup()
        await subject.start()
        teardown = subject.live.teardown

        async def slow():
            entered.set()
            await go_on.wait()
            await teardown()

        monkeypatch.setattr(subject.live, "teardown", slow)
        running = asyncio.create_task(subject.cleanup())
        await entered.wait()
        for _ in range(3):
            running.cancel()
            await asyncio.sleep(0)
        assert not running.done()
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await running
    assert read(tmp_path / "r", "result.json")["outcome"] == "unscored"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"task_path": "no/such/task"}, "no/such/task"),
        ({"agent": "oracle"}, "no reference solution"),
    ],
)
async def test_a_wrong_request_is_raised_before_anything_is_written(rollout, fields, words, tmp_path):
    subject, _ = rollout(answers)
    subject.config = dataclasses.replace(subject.config, **fields)
    with pytest.raises(UsageError, match=words):
        await subject.run()
    assert not (tmp_path / "r").exists()


async def test_secrets_of_task_and_agent_are_masked_everywhere(rollout, monkeypatch, tmp_path):
    """C54: what came from the host's environment appears in no file."""
    monkeypatch.setenv("KERNEL_TEST_TOKEN", "tk-3f9c2b7a1d-secret")

    async def leaks(sandbox, text):
        done = await sandbox.exec("echo $API_TOKEN; echo 1 > /app/answer", user="agent")
        assert done.out.strip() == "tk-3f9c2b7a1d-secret"
        raise AgentCrashError(f"died saying {done.out}")

    subject, _ = rollout(leaks, agent_env={"MY_KEY": "ak-another-secret-value"})
    await subject.run()
    for path in (tmp_path / "r").rglob("*"):
        if path.is_file():
            text = path.read_text(errors="replace")
            assert "tk-3f9c2b7a1d-secret" not in text and "ak-another-secret-value" not in text, path


async def test_roles_share_the_sandbox_and_keep_their_sessions(rollout, tmp_path):
    seen = []

    async def turn(sandbox, text):
        seen.append((text, (await sandbox.exec("cat /app/answer 2>/dev/null", user="agent")).out.strip()))
        await answers(sandbox, text)

    coder, critic = Role("coder", "stub"), Role("critic", "stub")
    scene = Scene("s", (coder, critic), (Turn("coder"), Turn("critic", "look"), Turn("coder", "fix")))
    again = Scene("t", (coder,), (Turn("coder", "anew"),))
    subject, agent = rollout(turn, agent=None, scenes=(scene, again))
    result = await subject.run()
    assert seen == [("Write /app/answer.", ""), ("look", "0.5"), ("fix", "0.5"), ("anew", "0.5")]
    assert len(agent.sessions) == 3, "two roles of the first scene, and the coder anew in the second"
    steps = [node["step"] for node in read(tmp_path / "r", "tree.json")["nodes"][1:]]
    assert [(s["role"], s["scene"]) for s in steps] == [
        ("coder", "s"),
        ("critic", "s"),
        ("coder", "s"),
        ("coder", "t"),
    ]
    assert result.n_prompts == 4


async def test_a_workspace_is_never_the_root(rollout, task):
    """C64: an image without WORKDIR, or with `/`, works in /app."""
    (task / "environment" / "Dockerfile").write_text("FROM debian:12-slim\nWORKDIR /\n")
    subject, _ = rollout(answers)
    async with subject:
        await subject.setup()
        await subject.start()
        assert subject.workspace == "/app"
        done = await subject.live.exec("pwd; stat -c %U /app; stat -c %U /", user="agent")
        assert done.out.split() == ["/app", "agent", "root"]


async def test_roles_may_speak_to_different_models(task, tmp_path):
    for name in ("first", "second"):
        (tmp_path / f"{name}.yaml").write_text(f"turns:\n  - say: I am {name}.\n  - say: Still {name}.\n")
    roles = [Role(name, "mini", f"scripted/{tmp_path / name}.yaml") for name in ("first", "second")]
    scene = Scene("s", roles, [Turn("first"), Turn("second"), Turn("first", "once more")])
    config = RolloutConfig(task_path=task, scenes=[scene], sandbox="local", rollout_dir=tmp_path / "r")
    result = await (await Rollout.create(config)).run()
    calls = list(read_lines(tmp_path / "r" / "trajectory" / "llm_trajectory.jsonl"))
    said = [call["response"]["body"]["choices"][0]["message"]["content"] for call in calls]
    assert said == ["I am first.", "I am second.", "Still first."]
    assert [(call["index"], call["node_id"]) for call in calls] == [(0, "n1"), (1, "n2"), (2, "n3")]
    counted = result.agent_result
    assert counted.usage_source == "gateway" and counted.usage_details["calls"] == 3
    assert counted.total_tokens == sum(call["metadata"]["usage"]["total_tokens"] for call in calls)


@pytest.mark.parametrize("scored", [True, False])
async def test_a_teardown_that_fails_costs_no_record(rollout, tmp_path, monkeypatch, scored):
    async def turn(sandbox, text):
        await answers(sandbox, text)
        if not scored:
            raise AgentCrashError("gone")

    subject, _ = rollout(turn)
    async with subject:
        await subject.setup()
        await subject.start()
        teardown = subject.live.teardown

        async def fails():
            await teardown()
            raise OSError("the host went away")

        monkeypatch.setattr(subject.sandbox, "teardown", fails)
        await subject.connect()
        if scored:
            await subject.execute()
            await subject.verify()
        else:
            with pytest.raises(AgentCrashError):
                await subject.execute()
    result = read(tmp_path / "r", "result.json")
    assert result["rewards"] == ({"reward": 0.5} if scored else None)
    assert result["error_category"] == (None if scored else "agent_crash")


PHASES = ("setup", "start", "install_agent", "connect", "execute", "disconnect", "verify")


@pytest.mark.parametrize(
    ("done", "wrong", "words"),
    [
        ("", "start", "setup"),
        ("", "connect", "start"),
        ("", "verify", "start"),
        ("setup", "setup", "called already"),
        ("setup", "install_agent", "start"),
        ("setup", "execute", "connect"),
        ("setup", "verify", "start"),
        ("setup start", "start", "called already"),
        ("setup start", "execute", "connect"),
        *(("setup start cleanup", phase, "ended|already|connect") for phase in PHASES),
    ],
)
async def test_a_phase_out_of_order_is_the_callers_mistake_and_leaves_nothing(
    rollout, done, wrong, words, planes
):
    subject, _ = rollout(answers)
    async with subject:
        for phase in done.split():
            await getattr(subject, phase)()
        with pytest.raises(UsageError, match=words):
            await getattr(subject, wrong)()
        assert subject.error is None
    assert await planes.provider.reap() == []


async def test_a_role_that_was_never_declared_is_refused(rollout):
    subject, _ = rollout(answers)
    async with subject:
        await subject.setup()
        await subject.start()
        with pytest.raises(UsageError, match="no role of this rollout"):
            await subject.connect_as(Role("other", "stranger"))


async def test_an_endpoint_that_never_answers_is_not_the_policys_zero(task, tmp_path):
    async def swallow(reader, writer):
        await reader.read()
        writer.close()

    async with await asyncio.start_server(swallow, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        config = RolloutConfig(
            task_path=task,
            agent="mini",
            model="vllm/silent",
            policy_url=f"http://127.0.0.1:{port}/v1",
            sandbox="local",
            rollout_dir=tmp_path / "r",
            agent_timeout=0.5,
        )
        result = await (await Rollout.create(config)).run()
    assert (result.error_category, result.rewards, result.attribution.verdict) == ("endpoint", None, "mask")
    assert result.agent_result.n_output_tokens is None


@pytest.mark.parametrize("ends", ["waits", "gives up"])
@pytest.mark.parametrize(
    ("category", "attribution"), [("endpoint", "mask"), ("budget", "score"), ("context_limit", "score")]
)
async def test_an_agent_that_its_model_left_is_not_blamed(rollout, ends, category, attribution):
    async def left_alone(sandbox, text):
        await answers(sandbox, text)
        if ends == "gives up":
            raise AgentProtocolError("the agent answered the prompt with an error")
        await asyncio.Event().wait()

    subject, _ = rollout(left_alone, agent_timeout=0.3)
    subject.models.totals = lambda: RouteTotals(calls=2, answered_calls=1, failure=(category, "no more"))
    result = await subject.run()
    assert (result.error_category, result.error, result.stop_reason) == (category, "no more", category)
    assert result.attribution.verdict == attribution
    assert result.rewards == ({"reward": 0.5} if attribution == "score" else None)


@pytest.mark.parametrize(
    ("fields", "mode"),
    [
        ({}, "shared"),
        ({"sandbox_user": None}, "isolated"),
        ({"sandbox_user": None, "verify_mode": "shared"}, "shared"),
        ({"verify_mode": "isolated"}, "isolated"),
    ],
)
async def test_an_agent_that_was_root_is_verified_apart_unless_asked(rollout, fields, mode):
    async def turn(sandbox, text):
        await sandbox.exec("echo 0.5 > /app/answer")

    subject, _ = rollout(turn, **fields)
    result = await subject.run()
    assert (result.verify_mode, result.rewards) == (mode, {"reward": 0.5})
