"""What a call is for. Prompts here are in the manner of real agents, not theirs."""

from __future__ import annotations

import pytest

from benchflow.gateway.purpose import purpose_of

TOOLS = [{"type": "function", "function": {"name": "bash"}}]


def call(system="", user="", *, tools=None, before=(), **extra):
    messages = [{"role": "system", "content": system}] if system else []
    messages += [{"role": role, "content": "text"} for role in before]
    return {"messages": [*messages, {"role": "user", "content": user}], "tools": tools, **extra}


def purpose(body, headers=None, *, seen_tools=False, extends=False):
    return purpose_of(body, headers or {}, seen_tools=seen_tools, extends=extends)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (call("You solve tasks.", "Fix the bug", tools=TOOLS), "agent"),
        (call("You are a title generator. You output only a title.", "Fix the bug"), "title"),
        (call("", "Please write a 5-10 word title for the following conversation: hi"), "title"),
        (call("Summarize this coding session in under 50 characters.", "hi"), "summary"),
        (call("", [{"type": "text", "text": "[SUGGESTION MODE: what would the user type?]"}]), "suggestion"),
        (call("", "[SUGGESTION MODE: next?]", tools=TOOLS), "suggestion"),
        (
            call(
                "",
                "Create a detailed summary of our conversation so far",
                tools=TOOLS,
                before=["user", "assistant"],
            ),
            "compaction",
        ),
        (call("Classify the command: should it be blocked?", "rm -rf /", max_tokens=64), "classifier"),
    ],
)
def test_clear_evidence_names_an_auxiliary_call(body, expected):
    assert purpose(body) == expected


@pytest.mark.parametrize(
    "body",
    [
        call("You solve tasks.", "Write a title for the page in index.html", tools=TOOLS),
        call("You solve tasks.", "Summarize the conversation in log.txt and continue", tools=TOOLS),
        call("You solve tasks.", "Train a classifier that decides allow or deny", tools=TOOLS),
        call("You solve tasks.", "Train a classifier that decides allow or deny"),
        call("You are a helpful assistant.", "What is 2 + 2?"),
        {"messages": []},
        {"messages": [None, "odd"]},
    ],
)
def test_work_stays_the_agents(body):
    assert purpose(body) == "agent"


def test_a_call_without_tools_beside_one_with_tools_is_a_helper_unless_it_continues_it():
    body = call("You extract facts.", "What did the user say?")
    assert purpose(body, seen_tools=True) == "helper"
    assert purpose(body, seen_tools=True, extends=True) == "agent"


def test_an_agent_that_names_its_sub_agent_is_believed():
    body = call("You search.", "Find it", tools=TOOLS)
    assert purpose(body, {"x-parent-session-id": "1"}) == "subagent"
    assert purpose(body, {"x-openai-subagent": "review"}) == "subagent"
    assert purpose(body, {"x-openai-subagent": "compact"}) == "compaction"
