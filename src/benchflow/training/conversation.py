"""The conversation of a rollout, read from its model calls."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from benchflow.training.calls import Call, is_agents, succeeded

ChatMessage = dict[str, Any]


class Skip(Exception):
    """This rollout yields no row; ``reason`` is the manifest's counter (``skipped_…``)."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def last_agent_call(calls: Sequence[Call]) -> Call:
    """The call that holds the whole main conversation: the agent's own last answered one.
    Raises ``Skip`` when there is none."""
    reason = "no_trajectory"
    for call in reversed(calls):
        if not is_agents(call):
            continue
        if not succeeded(call):
            reason = "provider_error" if reason == "no_trajectory" else reason
        elif reply(call) is None:
            reason = "no_assistant"
        else:
            return call
    raise Skip(reason)


def conversation(call: Call) -> list[ChatMessage]:
    """The request's messages and the reply, in OpenAI's chat form."""
    body = (call.get("request") or {}).get("body")
    messages = body.get("messages") if isinstance(body, dict) else None
    answer = reply(call)
    if not isinstance(messages, list) or answer is None:
        raise Skip("invalid")
    return [*messages, answer]


def tools(call: Call) -> list[dict[str, Any]]:
    """Tool definitions that the last request offered."""
    body = (call.get("request") or {}).get("body")
    offered = body.get("tools") if isinstance(body, dict) else None
    return offered if isinstance(offered, list) else []


def reply(call: Call) -> ChatMessage | None:
    """The assistant message of the first choice, without fields that are null; None when it
    says nothing and calls nothing."""
    body = (call.get("response") or {}).get("body")
    choices = body.get("choices") if isinstance(body, dict) else None
    message = choices[0].get("message") if isinstance(choices, list) and choices else None
    if not isinstance(message, dict):
        return None
    said = {name: value for name, value in message.items() if value is not None and value != []}
    if not said.get("content") and not said.get("tool_calls") and not said.get("reasoning_content"):
        return None
    said.setdefault("role", "assistant")
    said.setdefault("content", None)
    return said


def split_prompt(messages: list[ChatMessage]) -> tuple[list[ChatMessage], list[ChatMessage]]:
    """What was given before the first answer, and everything from it on."""
    for index, message in enumerate(messages):
        if message.get("role") == "assistant":
            return messages[:index], messages[index:]
    return messages, []


def has_tool_calls(messages: Iterable[ChatMessage]) -> bool:
    return any(message.get("tool_calls") for message in messages)
