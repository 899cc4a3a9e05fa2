"""The ACP client against an agent that behaves, and one that does not."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from benchflow.contracts.agent import AskUser, SessionState, StopReason
from benchflow.contracts.errors import (
    AgentCrashError,
    AgentHandshakeError,
    AgentIdleTimeoutError,
    AgentProtocolError,
)
from benchflow.kernel import storage


async def test_a_turn_is_recorded_in_order_with_complete_tool_calls(scripted, record, sandbox, context):
    session = await scripted(
        [
            {"think": "first"},
            {"say": "I write"},
            {"run": "echo hi > a.txt; echo out; exit 3"},
            {"say": "done"},
        ]
    )
    assert await session.prompt("go") is StopReason.END_TURN
    assert [k for k in record.kinds() if k != "reply"] == [
        "user_message",
        "agent_thought",
        "agent_message",
        "tool_call",
        "tool_call_update",
        "agent_message",
        "turn_end",
    ]
    call = record.last("tool_call_update")
    assert call["input"] == {"command": "echo hi > a.txt; echo out; exit 3"}
    assert call["output"] == {"output": "out\n", "metadata": {"exit": 3}}
    assert (call["exit_code"], call["status"], call["tool_kind"]) == (3, "failed", "execute")
    assert session.n_tool_calls == 1
    assert (await sandbox.exec("cat a.txt", cwd=context().workspace)).out == "hi\n"


async def test_later_prompts_play_later_turns_in_the_same_process(scripted, record):
    session = await scripted({"turns": [[{"say": "one"}], [{"say": "two"}]]})
    for _ in range(3):
        assert await session.prompt("go") is StopReason.END_TURN
    assert record.said() == ["one", "two"]


async def test_a_prompt_of_three_mebibytes_arrives_byte_identical(scripted, sandbox, context, tmp_path):
    session = await scripted([{"save_prompt": "prompt.bin"}])
    prompt = ('a\u2028é\t"\\\r\n\0🙂' * 200_000)[: 3 << 20]
    await session.prompt(prompt)
    await sandbox.download(f"{context().workspace}/prompt.bin", tmp_path / "prompt.bin")
    assert (tmp_path / "prompt.bin").read_bytes() == prompt.encode()


@pytest.mark.parametrize("size", [65535, 65536, 65537, 1 << 20, 20 << 20])
async def test_long_frames_are_read_whole(scripted, record, size):
    """C40"""
    session = await scripted([{"big": size}, {"say": "after"}])
    assert await session.prompt("go") is StopReason.END_TURN
    big, after = record.said()
    assert after == "after"
    assert size - 300 < len(big) < size and set(big) == {"x"}


async def test_a_frame_beyond_the_cap_is_a_protocol_error_and_ends_the_process(scripted, record):
    """C40"""
    session = await scripted([{"say": "before"}, {"big": 33 << 20}, {"say": "after"}])
    with pytest.raises(AgentProtocolError, match="longer than 32 MiB"):
        await session.prompt("go")
    assert record.said() == ["before"]
    assert record.last("error")["update"]["category"] == "agent_protocol"
    with pytest.raises(AgentCrashError, match="not running"):
        await session.prompt("again")


NOISE = [
    {"raw": "*** welcome ***\n\x1b[32mcolour\x1b[0m\n\n   \n"},
    {"raw": '{"jsonrpc":"2.0","method":"session/upd\n'},
    {"raw": "[1, 2]\n17\nnull\ntrue\n{}\n"},
    {"raw": '{"id":[1],"result":{}}\n{"method": 5}\n{"id":1,"error":"x"}\n{"method":"a","params":3}\n'},
    {"raw": '{"jsonrpc":"2.0","method":"unheard/of","params":{}}\n'},
    {"raw_hex": ["fffe00ff0a"]},
    {"send": {"jsonrpc": "2.0", "method": "session/update", "params": {"update": "no mapping"}}},
    {"send": {"jsonrpc": "2.0", "id": 999, "result": {}}},
]


async def test_noise_on_stdout_is_skipped_and_logged(scripted, record, tmp_path: Path):
    """C42"""
    session = await scripted([*NOISE, {"say": "still here"}])
    assert await session.prompt("go") is StopReason.END_TURN
    assert record.said() == ["still here"]
    await session.close()
    raw = (tmp_path / "agent/stdout.txt").read_bytes()
    assert b"*** welcome ***" in raw and b"\xff\xfe\x00\xff" in raw


async def test_frames_with_crlf_a_banner_on_their_line_or_no_last_newline_count(scripted, record):
    """C42"""
    frame = (
        '{"jsonrpc":"2.0","method":"session/update","params":{"sessionId":"s","update":'
        '{"sessionUpdate":"agent_message_chunk","content":{"type":"text","text":"%s"}}}}'
    )
    session = await scripted(
        [
            {"raw": frame % "crlf" + "\r\n"},
            {"raw": "\x1b[0mloading… " + frame % "banner" + "\n"},
            {"raw": frame % "no newline"},
            {"crash": 0},
        ]
    )
    with pytest.raises(AgentCrashError, match="exited with code 0 during the turn"):
        await session.prompt("go")
    assert record.said() == ["crlf", "banner", "no newline"]


async def test_endless_noise_is_a_protocol_error(scripted):
    """C42"""
    session = await scripted([{"raw": "log line\n" * 10_001}, {"say": "never"}])
    with pytest.raises(AgentProtocolError, match="10001 lines"):
        await session.prompt("go")


async def test_bytes_that_are_not_utf8_are_replaced_and_split_characters_joined(scripted, record, tmp_path):
    """C36"""
    head = (
        b'{"jsonrpc":"2.0","method":"session/update","params":{"sessionId":"s","update":'
        b'{"sessionUpdate":"agent_message_chunk","content":{"type":"text","text":"'
    )
    tail = b'"}}}}\n'
    session = await scripted(
        [
            {"raw_hex": [(head + b"ok \xe2").hex(), (b"\x82\xac" + tail).hex()]},
            {"raw_hex": [(head + b"bad \xe2\x28" + tail).hex()]},
            {"raw_hex": [(head + b"lone \\ud83d end" + tail).hex()]},
        ]
    )
    assert await session.prompt("go") is StopReason.END_TURN
    assert record.said() == ["ok €", "bad \ufffd(", "lone \ufffd end"]
    await session.close()
    assert b"bad \xe2\x28" in (tmp_path / "agent/stdout.txt").read_bytes()


@pytest.mark.parametrize(("code", "words"), [(7, "exited with code 7"), (-9, "killed by signal 9")])
async def test_a_crash_tells_how_and_shows_stderr_and_the_record_is_on_disk(scripted, record, code, words):
    """C50"""
    session = await scripted(
        [{"say": "working"}, {"run": "echo out"}, {"stderr": "Traceback: it broke\n"}, {"crash": code}]
    )
    with pytest.raises(AgentCrashError, match=words) as caught:
        await session.prompt("go")
    assert "it broke" in (caught.value.detail or "")
    lines = list(storage.read_lines(record.path))
    assert len(lines) == len(record.path.read_bytes().splitlines())
    kinds = [line["kind"] for line in lines]
    assert kinds == [
        "reply",
        "reply",
        "user_message",
        "agent_message",
        "tool_call",
        "tool_call_update",
        "error",
    ]


async def test_a_closed_stdout_of_a_living_process_is_a_crash(scripted):
    session = await scripted([{"close_stdout": True}, {"hang": True}])
    with pytest.raises(AgentCrashError, match="closed its stdout"):
        await session.prompt("go")


async def test_a_flood_on_stderr_blocks_nothing_and_is_kept_bounded(scripted, record, tmp_path):
    session = await scripted([{"stderr": {"text": "e" * 65535 + "\n", "times": 200}}, {"say": "alive"}])
    assert await session.prompt("go") is StopReason.END_TURN
    await session.close()
    kept = (tmp_path / "agent/stderr.txt").read_bytes()
    assert 8 << 20 < len(kept) < 9 << 20 and b"bytes left out" in kept


@pytest.mark.parametrize(
    ("handshake", "words"),
    [
        ({"actions": [{"crash": 4}]}, "exited with code 4 during the handshake"),
        ({"actions": [{"close_stdout": True}, {"hang": True}]}, "closed its stdout during the handshake"),
        ({"version": 99}, "protocol version 99"),
    ],
)
async def test_a_failed_handshake_says_why(scripted, handshake, words):
    with pytest.raises(AgentHandshakeError, match=words):
        await scripted({"actions": [], "handshake": handshake})


async def test_an_agent_that_answers_with_an_error_is_a_protocol_error(scripted):
    session = await scripted([{"fail": {"code": -32603, "message": "no credit"}}])
    with pytest.raises(AgentProtocolError, match="no credit"):
        await session.prompt("go")


async def running(session, record):
    """Start a prompt and return its task once the agent has said something."""
    task = asyncio.create_task(session.prompt("go"))
    await record.seen("agent_message")
    return task


async def test_cancel_of_an_agent_that_heeds_it_keeps_the_session(scripted, record):
    session = await scripted({"turns": [[{"say": "tick"}, {"hang": True}], [{"say": "again"}]]})
    turn = await running(session, record)
    await session.cancel()
    assert await turn is StopReason.CANCELLED
    assert await session.prompt("go on") is StopReason.END_TURN
    assert record.said() == ["tick", "again"]


@pytest.mark.parametrize(
    "stubborn", [[{"stream": {"text": "tick"}}], [{"say": "tick"}, {"hang": True}]], ids=["streams", "silent"]
)
async def test_cancel_that_is_ignored_ends_with_a_kill(scripted, record, sandbox, stubborn):
    """C44"""
    session = await scripted(
        [{"on_cancel": "ignore"}, {"run": "sleep 4242 >/dev/null 2>&1 & :"}, *stubborn], cancel_grace=0.2
    )
    turn = await running(session, record)
    async with asyncio.timeout(20):
        await session.cancel()
        assert await turn is StopReason.CANCELLED
    left = await sandbox.exec("pgrep -f '[s]leep 4242'")
    assert left.out == ""


async def test_cancelling_the_task_of_a_prompt_ends_the_turn_and_the_process(scripted, record):
    """C44"""
    session = await scripted([{"on_cancel": "ignore"}, {"stream": {"text": "tick"}}], cancel_grace=0.2)
    turn = await running(session, record)
    turn.cancel()
    async with asyncio.timeout(20):
        with pytest.raises(asyncio.CancelledError):
            await turn
    assert record.events[-1]["update"] == {"stopReason": "cancelled"}


QUESTION = {
    "ask": {
        "question": "Delete it?",
        "options": [
            {"id": "y1", "name": "Yes", "kind": "allow_once"},
            {"id": "y2", "name": "Always", "kind": "allow_always"},
            {"id": "n1", "name": "No", "kind": "reject_once"},
        ],
        "then": {
            "y1": [{"say": "once"}],
            "y2": [{"say": "always"}],
            "n1": [{"say": "refused"}],
            "cancelled": [{"say": "never mind"}],
        },
    }
}


async def test_a_pending_question_is_answered_cancelled(scripted, record):
    """C44"""
    session = await scripted([{"say": "tick"}, QUESTION])
    asked = asyncio.Event()

    async def think_for_ever(question: AskUser) -> str | None:
        asked.set()
        await asyncio.Event().wait()

    session.on_ask_user(think_for_ever)
    turn = await running(session, record)
    await asked.wait()
    async with asyncio.timeout(20):
        await session.cancel()
        assert await turn in (StopReason.CANCELLED, StopReason.END_TURN)
    answer = [e for e in record.events if e["kind"] == "permission" and e["direction"] == "to_agent"]
    assert answer[-1]["update"]["outcome"] == {"outcome": "cancelled"}


async def test_without_a_user_the_widest_permission_is_given(scripted, record):
    session = await scripted([QUESTION])
    await session.prompt("go")
    assert record.said() == ["always"]
    assert session.n_tool_calls == 1


@pytest.mark.parametrize(("choice", "said"), [("Yes", "once"), ("n1", "refused"), (None, "never mind")])
async def test_a_user_answers_by_name_or_id_or_not_at_all(scripted, record, choice, said):
    session = await scripted([QUESTION])
    seen: list[AskUser] = []

    async def answer(question: AskUser) -> str | None:
        seen.append(question)
        return choice

    session.on_ask_user(answer)
    await session.prompt("go")
    assert record.said() == [said]
    assert seen[0].question == "Delete it?"
    assert seen[0].options == ("Yes", "Always", "No")
    assert seen[0].kinds == ("allow_once", "allow_always", "reject_once")


async def test_a_handler_that_raises_ends_the_turn_with_its_error(scripted):
    session = await scripted([{"on_cancel": "ignore"}, QUESTION, {"hang": True}], cancel_grace=0.1)

    async def broken(question: AskUser) -> str | None:
        raise LookupError("my bug")

    session.on_ask_user(broken)
    with pytest.raises(LookupError, match="my bug"):
        await session.prompt("go")


async def test_frames_after_the_end_of_a_turn_belong_to_it(scripted, record):
    session = await scripted([{"say": "in time"}, {"late": [{"say": "late"}]}])
    await session.prompt("go")
    assert record.said() == ["in time", "late"]
    assert record.kinds()[-1] == "turn_end"


async def test_usage_of_a_turn_that_ended_comes_from_its_reply(scripted):
    session = await scripted(
        [
            {"usage": {"used": 500, "size": 1000, "cost": {"amount": 0.25, "currency": "USD"}}},
            {"reply_usage": {"inputTokens": 30, "outputTokens": 12, "totalTokens": 42}},
        ]
    )
    assert session.usage.source == "none" and session.usage.input_tokens is None
    await session.prompt("go")
    usage = session.usage
    assert (usage.input_tokens, usage.output_tokens, usage.context_tokens) == (30, 12, 500)
    assert (usage.cost_usd, usage.source) == (0.25, "agent")


async def test_usage_of_a_silent_agent_is_kept_as_partial(scripted):
    """C46"""
    session = await scripted(
        [{"usage": {"used": 500, "size": 1000}}, {"on_cancel": "ignore"}, {"hang": True}],
        idle_timeout=0.3,
        cancel_grace=0.1,
    )
    with pytest.raises(AgentIdleTimeoutError, match=r"sent nothing for 0\.3 s"):
        await session.prompt("go")
    assert session.usage.source == "agent_partial"
    assert session.usage.context_tokens == 500
    assert session.usage.input_tokens is None and session.usage.output_tokens is None


async def test_time_spent_waiting_for_the_user_is_not_idle(scripted, record):
    session = await scripted([QUESTION], idle_timeout=0.1)

    async def slow(question: AskUser) -> str | None:
        await asyncio.sleep(0.5)
        return "Yes"

    session.on_ask_user(slow)
    assert await session.prompt("go") is StopReason.END_TURN
    assert record.said() == ["once"]


async def test_a_session_is_resumed_by_a_new_process_without_recording_the_replay(scripted, record):
    script = {"turns": [[{"say": "one"}], [{"say": "two"}]]}
    first = await scripted(script)
    await first.prompt("go")
    state = await first.fork_state()
    assert isinstance(state, SessionState) and state.level == "resume"
    await first.close()
    second = await scripted(script, resume=state)
    assert second.session_id == first.session_id
    await second.prompt("go on")
    assert record.said() == ["one", "two"]


async def test_the_agent_sees_its_own_variables_and_nothing_of_ours(scripted, record, monkeypatch):
    monkeypatch.setenv("ENGINE_SECRET", "hunter2")
    session = await scripted([{"run": "env"}], env={"GIVEN": "yes"})
    await session.prompt("go")
    seen = record.last("tool_call_update")["output"]["output"]
    assert "GIVEN=yes" in seen
    assert "ENGINE_SECRET" not in seen and "OPENAI_BASE_URL" not in seen


async def test_closing_twice_is_harmless(scripted):
    session = await scripted([])
    await session.close()
    await session.close()
