"""Reports of real agents, each in its own dialect, to one shape of event."""

from __future__ import annotations

import pytest

from benchflow.agents.acp.updates import UpdateLog


def replay(*updates):
    log = UpdateLog()
    return log, [log.update(update) for update in updates]


def call(update="tool_call_update", **fields):
    return {"sessionUpdate": update, "toolCallId": "t1", **fields}


CASES = {
    "input grows, output and exit code in metadata": (
        [
            call("tool_call", title="bash", kind="execute", status="pending", rawInput={"cwd": "/w"}),
            call(title="echo hi", status="in_progress", rawInput={"command": "echo hi", "cwd": "/w"}),
            call(status="completed", rawOutput={"output": "hi", "metadata": {"exit": 0, "truncated": False}}),
        ],
        ("echo hi", {"command": "echo hi", "cwd": "/w"}, 0),
    ),
    "an empty first input, a string as output": (
        [
            call("tool_call", title="Terminal", kind="execute", status="pending", rawInput={}),
            call(title="echo hi", rawInput={"command": "echo hi"}),
            call(status="completed", rawOutput="hi"),
        ],
        ("echo hi", {"command": "echo hi"}, None),
    ),
    "exit_code in the output": (
        [
            call("tool_call", title="run", kind="execute", rawInput={"command": ["echo", "hi"]}),
            call(status="failed", rawOutput={"stdout": "hi", "exit_code": 2}),
        ],
        ("run", {"command": ["echo", "hi"]}, 2),
    ),
    "only the end is ever seen": (
        [
            call(
                title="Shell",
                kind="execute",
                status="completed",
                rawInput={"command": "ls"},
                rawOutput={"type": "shell_result", "exitCode": 1},
            )
        ],
        ("Shell", {"command": "ls"}, 1),
    ),
    "the exit code in the terminal's own field": (
        [
            call("tool_call", title="ls", status="in_progress", rawInput={"command": "ls"}),
            call(status="completed", _meta={"terminal_exit": {"exit_code": 127}}),
        ],
        ("ls", {"command": "ls"}, 127),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_last_line_of_a_call_is_complete(name):
    updates, (title, call_input, code) = CASES[name]
    log, events = replay(*updates)
    last = events[-1]
    assert (last["id"], last["title"], last["input"], last["exit_code"]) == ("t1", title, call_input, code)
    assert last["status"] == updates[-1]["status"]
    assert len(log.calls) == 1
    assert [event["update"] for event in events] == updates


def test_text_blocks_are_the_output_when_there_is_no_other():
    block = {"type": "content", "content": {"type": "text", "text": "hi"}}
    _, events = replay(
        call("tool_call", title="x"), call(status="completed", content=[block, {"type": "diff"}])
    )
    assert events[-1]["output"] == "hi"


def test_a_permission_question_may_be_the_first_sight_of_a_call():
    log = UpdateLog()
    asked = log.permission(
        {"toolCall": {"toolCallId": "t1", "title": "rm", "kind": "execute"}, "options": []}
    )
    assert (asked["kind"], asked["id"], asked["title"]) == ("permission", "t1", "rm")
    done = log.update(call(status="completed"))
    assert (done["title"], done["tool_kind"], done["status"]) == ("rm", "execute", "completed")


def test_the_call_of_a_sub_agent_names_its_parent():
    _, events = replay(call("tool_call", title="x", _meta={"claudeCode": {"parentToolUseId": "t0"}}), call())
    assert [event["parent_tool_call_id"] for event in events] == ["t0", "t0"]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("user_message_chunk", "user_message"),
        ("agent_message_chunk", "agent_message"),
        ("agent_thought_chunk", "agent_thought"),
        ("plan", "plan"),
        ("usage_update", "usage"),
        ("something_new", "something_new"),
    ],
)
def test_kinds_are_named_plainly_and_unknown_ones_kept(name, kind):
    _, events = replay({"sessionUpdate": name, "x": 1})
    assert events[0] == {"direction": "from_agent", "kind": kind, "update": {"sessionUpdate": name, "x": 1}}


def test_usage_keeps_what_it_knows():
    log, _ = replay(
        {"sessionUpdate": "usage_update", "used": 7, "size": 9, "cost": {"amount": 1, "currency": "USD"}},
        {"sessionUpdate": "usage_update", "used": 8, "cost": {"amount": 5, "currency": "EUR"}},
        {"sessionUpdate": "usage_update", "_meta": {"usage": {"inputTokens": 3, "outputTokens": 4}}},
    )
    usage = log.usage
    assert (usage.context_tokens, usage.cost_usd, usage.input_tokens, usage.output_tokens) == (8, 1.0, 3, 4)
    assert usage.cache_read_tokens is None and usage.source == "agent_partial"


@pytest.mark.parametrize(
    "update",
    [
        {},
        {"sessionUpdate": None},
        call(content="x", rawOutput=[1], _meta="m"),
        call(rawOutput={"exit": True}),
    ],
)
def test_odd_reports_are_kept_without_guessing(update):
    _, events = replay(update)
    assert events[0]["update"] == update
    assert events[0].get("exit_code") is None
