"""The model calls of one rollout, and the conversation that they hold."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

Call = dict[str, Any]
"""One line of ``llm_trajectory.jsonl``, whole; the shape is ``contracts.records.Call``."""
ChatMessage = dict[str, Any]


def succeeded(call: Call) -> bool:
    response = call.get("response") or {}
    status = response.get("status_code")
    return isinstance(status, int) and 200 <= status < 300 and not metadata(call).get("error")


def metadata(call: Call) -> dict[str, Any]:
    return call.get("metadata") or {}


def is_agents(call: Call) -> bool:
    """True for calls of the agent's own conversation: not a sub-agent's, and not titles,
    summaries and other helpers around it."""
    return metadata(call).get("purpose", "agent") == "agent"


def finish_reason(call: Call) -> str | None:
    return metadata(call).get("finish_reason")


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
    messages, answer = request_body(call).get("messages"), reply(call)
    if not isinstance(messages, list) or answer is None:
        raise Skip("invalid")
    return [*messages, answer]


def tools(call: Call) -> list[dict[str, Any]]:
    """Tool definitions that the last request offered."""
    offered = request_body(call).get("tools")
    return offered if isinstance(offered, list) else []


def request_body(call: Call) -> dict[str, Any]:
    """What was asked; empty when it was no JSON object."""
    body = (call.get("request") or {}).get("body")
    return body if isinstance(body, dict) else {}


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
