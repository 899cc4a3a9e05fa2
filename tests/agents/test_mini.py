"""The tool loop in the engine, through the real gateway to an endpoint that says what we want."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from benchflow.agents import bash_tool, catalog, chat
from benchflow.contracts.agent import StopReason
from benchflow.contracts.errors import EndpointError, EndpointRejectedError, UsageError
from benchflow.kernel import storage


@pytest.fixture
async def mini(sandbox, context, route, endpoint):
    """Opens a mini session on the endpoint; ``spec`` are keyword arguments of ``ModelSpec``."""
    sessions = []

    async def connect(*, resume=None, spec=None, **changes):
        opened = await route("vllm/m", policy_url=endpoint.url, **(spec or {}))
        session = await catalog.load("mini").connect(sandbox, context(route=opened, **changes), resume=resume)
        sessions.append(session)
        return session

    yield connect
    for session in sessions:
        await session.close()


async def test_it_runs_commands_until_the_model_stops_calling(mini, endpoint, record, context):
    endpoint.call({"command": "pwd; echo to stderr >&2; echo hello > made.txt; exit 4"})
    endpoint.call({"command": "cat made.txt"}, call_id="c2")
    endpoint.say("All done.")
    session = await mini()
    assert await session.prompt("Do it.") is StopReason.END_TURN
    roles = [message["role"] for message in endpoint.requests[-1]["messages"]]
    assert roles == ["system", "user", "assistant", "tool", "assistant", "tool"]
    first, second = (m for m in endpoint.requests[-1]["messages"] if m["role"] == "tool")
    assert first["content"] == f"{context().workspace}\nto stderr\n[exit code 4]"
    assert second == {"role": "tool", "tool_call_id": "c2", "content": "hello\n[exit code 0]"}
    assert endpoint.requests[0]["tools"] == [bash_tool.SCHEMA]
    assert session.n_tool_calls == 2
    usage = session.usage
    assert (usage.input_tokens, usage.output_tokens, usage.source) == (30, 6, "agent")


async def test_everything_is_recorded_as_it_happens(mini, endpoint, record):
    endpoint.answer(
        {
            "role": "assistant",
            "content": "Let me see.",
            "reasoning_content": "hm",
            "tool_calls": [
                {
                    "id": "c1",
                    "type": "function",
                    "function": {"name": "bash", "arguments": '{"command":"false"}'},
                }
            ],
        }
    )
    endpoint.say("Done.")
    await (await mini()).prompt("Go.")
    assert record.kinds() == [
        "user_message",
        "agent_thought",
        "agent_message",
        "tool_call",
        "tool_call_update",
        "agent_message",
        "turn_end",
    ]
    end = record.last("tool_call_update")
    assert (end["id"], end["input"], end["exit_code"], end["status"]) == (
        "c1",
        {"command": "false"},
        1,
        "failed",
    )
    assert end["output"] == "[exit code 1]"
    assert len(list(storage.read_lines(record.path))) == 7


async def test_the_scripted_model_drives_it_without_an_endpoint(
    sandbox, context, route, record, tmp_path: Path
):
    policy = tmp_path / "policy.yaml"
    policy.write_text("turns:\n  - choices: [{run: echo made > x.txt}]\n  - choices: [{say: ready}]\n")
    opened = await route(f"scripted/{policy}")
    session = await catalog.load("mini").connect(sandbox, context(route=opened))
    assert await session.prompt("Go.") is StopReason.END_TURN
    await session.close()
    assert record.said()[-1] == "ready"
    assert (await sandbox.exec("cat x.txt", cwd=context().workspace)).out == "made\n"


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("bash", "{broken", "not valid JSON"),
        ("bash", "[1]", "must be an object"),
        ("bash", '{"cmd": "ls"}', '"command" must be'),
        ("bash", '{"command": "  "}', '"command" must be'),
        ("python", '{"code": "1"}', "no tool 'python'"),
    ],
)
async def test_a_senseless_call_is_answered_and_the_model_may_try_again(
    mini, endpoint, record, name, arguments, words
):
    endpoint.call(arguments, name=name)
    endpoint.say("Sorry.")
    assert await (await mini()).prompt("Go.") is StopReason.END_TURN
    assert words in endpoint.requests[1]["messages"][-1]["content"]
    assert record.last("tool_call_update")["status"] == "failed"


async def test_a_command_beyond_its_time_is_killed_and_the_model_is_told(mini, endpoint, sandbox):
    endpoint.call({"command": "echo begun; sleep 4343", "timeout": 2})
    endpoint.say("Too slow.")
    await (await mini()).prompt("Go.")
    told = endpoint.requests[1]["messages"][-1]["content"]
    assert told == "begun\n[killed after 2 s; nothing of it is still running]"
    assert (await sandbox.exec("pgrep -f '[s]leep 4343'")).out == ""


async def test_long_output_is_shown_head_and_tail_with_its_size(mini, endpoint):
    endpoint.call({"command": "echo HEAD; head -c 300000 /dev/zero | tr '\\0' x; echo; echo TAIL"})
    endpoint.say("Long.")
    await (await mini(env={"MINI_OUTPUT_LIMIT": "1000"})).prompt("Go.")
    told = endpoint.requests[1]["messages"][-1]["content"]
    assert told.startswith("HEAD\nxxx") and "xxx\nTAIL\n[exit code 0]" in told
    assert "300011 bytes in all" in told and len(told) < 1200


async def test_output_that_is_not_utf8_is_replaced(mini, endpoint):
    """C36"""
    endpoint.call({"command": "printf 'ok\\342\\050\\n'"})
    endpoint.say("Odd.")
    await (await mini()).prompt("Go.")
    assert endpoint.requests[1]["messages"][-1]["content"] == "ok\ufffd(\n[exit code 0]"


async def test_a_command_may_be_longer_than_any_argument_list(mini, endpoint, sandbox, context):
    text = "y" * 400_000
    endpoint.call({"command": f"cat > big.txt <<'END'\n{text}\nEND"})
    endpoint.say("Written.")
    await (await mini()).prompt("Go.")
    assert (await sandbox.exec("wc -c < big.txt", cwd=context().workspace)).out.strip() == "400001"


async def test_a_command_cannot_hang_on_its_input(mini, endpoint):
    endpoint.call({"command": "cat; echo after"})
    endpoint.say("Fine.")
    await (await mini()).prompt("Go.")
    assert endpoint.requests[1]["messages"][-1]["content"] == "after\n[exit code 0]"


async def test_the_steps_of_a_turn_are_bounded(mini, endpoint):
    for _ in range(3):
        endpoint.call({"command": "true"})
    session = await mini(env={"MINI_MAX_STEPS": "3"})
    assert await session.prompt("Go.") is StopReason.MAX_TURN_REQUESTS
    assert len(endpoint.requests) == 3


async def test_a_setting_that_is_no_number_is_a_usage_error(mini):
    with pytest.raises(UsageError, match="MINI_MAX_STEPS='many' is not a number"):
        await mini(env={"MINI_MAX_STEPS": "many"})


async def test_a_reply_cut_by_its_token_limit_ends_the_turn_and_the_next_prompt_works(mini, endpoint):
    endpoint.call('{"command": "echo ha', finish_reason="length")
    session = await mini()
    assert await session.prompt("Go.") is StopReason.MAX_TOKENS
    endpoint.say("Hello again.")
    assert await session.prompt("And now?") is StopReason.END_TURN
    assert [m["role"] for m in endpoint.requests[1]["messages"]] == [
        "system",
        "user",
        "assistant",
        "tool",
        "user",
    ]


async def test_a_context_overflow_ends_the_turn_as_context_limit(mini, endpoint, record):
    endpoint.refuse(400, "This model's maximum context length is 10 tokens.", "context_length_exceeded")
    assert await (await mini()).prompt("Go.") is StopReason.CONTEXT_LIMIT
    assert record.kinds() == ["user_message", "error", "turn_end"]


async def test_a_spent_budget_ends_the_turn_as_budget(mini, endpoint):
    endpoint.call({"command": "true"})
    assert await (await mini(spec={"max_calls": 1})).prompt("Go.") is StopReason.BUDGET


async def test_an_endpoint_that_fails_is_an_endpoint_error(mini, endpoint):
    endpoint.refuse(500, "out of order")
    with pytest.raises(EndpointError, match="out of order"):
        await (await mini()).prompt("Go.")


async def test_an_endpoint_that_rejects_is_told_apart(mini, endpoint):
    endpoint.refuse(401, "bad key")
    with pytest.raises(EndpointRejectedError, match="bad key"):
        await (await mini()).prompt("Go.")


async def test_a_gateway_that_is_gone_is_an_endpoint_error(mini, gateway):
    session = await mini()
    await gateway.stop()
    with pytest.raises(EndpointError):
        await session.prompt("Go.")


async def test_sampling_reaches_the_model_and_cannot_replace_what_is_ours(mini, endpoint):
    endpoint.say("Hi.")
    session = await mini(
        sampling={"temperature": 0.5, "max_tokens": 64, "messages": [], "stream": True},
        reasoning_effort="low",
    )
    await session.prompt("Go.")
    sent = endpoint.requests[0]
    assert (sent["temperature"], sent["max_tokens"], sent["reasoning_effort"]) == (0.5, 64, "low")
    assert sent["messages"][-1] == {"role": "user", "content": "Go."}
    assert not sent.get("stream")


async def test_a_fork_continues_exactly_and_leaves_its_parent_alone(mini, endpoint):
    endpoint.call({"command": "echo one"})
    endpoint.say("First.")
    parent = await mini()
    await parent.prompt("Go.")
    state = await parent.fork_state()
    assert state is not None and state.level == "fork"
    child = await mini(resume=state)
    endpoint.say("Child.")
    await child.prompt("Left.")
    endpoint.say("Parent.")
    await parent.prompt("Right.")
    history, left, right = (request["messages"] for request in endpoint.requests[-3:])
    assert left[:-2] == right[:-2] == history
    assert (left[-1]["content"], right[-1]["content"]) == ("Left.", "Right.")


async def test_a_session_state_survives_json(mini, endpoint):
    endpoint.say("First.")
    session = await mini()
    await session.prompt("Go.")
    state = await session.fork_state()
    assert json.loads(json.dumps(dict(state.data))) == state.data


async def test_unknown_usage_stays_unknown(mini, endpoint):
    endpoint.call({"command": "true"})
    endpoint.say("No numbers.", usage={"note": 1})
    session = await mini()
    assert session.usage.source == "none" and session.usage.input_tokens is None
    await session.prompt("Go.")
    assert session.usage.input_tokens is None and session.usage.output_tokens is None


async def test_cancelling_the_prompt_kills_the_running_command(mini, endpoint, record, sandbox):
    endpoint.call({"command": "sleep 4444"})
    session = await mini()
    turn = asyncio.create_task(session.prompt("Go."))
    await record.seen("tool_call")
    turn.cancel()
    with pytest.raises(asyncio.CancelledError):
        await turn
    assert record.last("tool_call_update")["status"] == "cancelled"
    assert (await sandbox.exec("pgrep -f '[s]leep 4444'")).out == ""


async def test_cancel_ends_the_turn_and_the_session_goes_on(mini, endpoint, record):
    endpoint.call({"command": "sleep 4445"})
    session = await mini()
    turn = asyncio.create_task(session.prompt("Go."))
    await record.seen("tool_call")
    await session.cancel()
    assert await turn is StopReason.CANCELLED
    endpoint.say("Back.")
    assert await session.prompt("Again.") is StopReason.END_TURN
    assert endpoint.requests[-1]["messages"][-2]["content"].startswith("[not run")


async def test_sessions_share_one_connection_pool_and_give_it_back(mini, endpoint):
    first, second = await mini(), await mini()
    assert len(chat.POOLS) == 1
    await first.close()
    endpoint.say("Still here.")
    assert await second.prompt("Go.") is StopReason.END_TURN
    await second.close()
    assert chat.POOLS == {}


async def test_it_needs_a_model(sandbox, context):
    with pytest.raises(UsageError, match="mini needs a model"):
        await catalog.load("mini").connect(sandbox, context())
