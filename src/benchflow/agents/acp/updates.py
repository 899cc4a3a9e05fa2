"""What an ACP agent reports, as recorded events.

Agents differ in when a tool call is first seen (an announcement, a permission question, or
only its end) and in where output and exit code are. Each event of a call carries all that
is known of it so far, so that the last line of an id is complete.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from benchflow.agents.events import Event
from benchflow.contracts.agent import Usage

_KINDS = {
    "user_message_chunk": "user_message",
    "agent_message_chunk": "agent_message",
    "agent_thought_chunk": "agent_thought",
    "usage_update": "usage",
}
_EXIT_KEYS = ("exit_code", "exitCode", "exit", "returncode", "return_code")


@dataclass(slots=True)
class ToolCall:
    """Everything told so far about one call."""

    id: str
    title: str | None = None
    tool_kind: str | None = None
    input: Any = None
    output: Any = None
    exit_code: int | None = None
    status: str | None = None
    parent_tool_call_id: str | None = None

    def merge(self, update: Mapping[str, Any]) -> None:
        self.title = update.get("title") or self.title
        self.tool_kind = update.get("kind") or self.tool_kind
        self.status = update.get("status") or self.status
        if update.get("rawInput"):
            self.input = update["rawInput"]
        elif self.input is None:
            self.input = update.get("rawInput")
        output = update.get("rawOutput")
        if output is None:
            output = content_text(update.get("content")) or self.output
        self.output = output
        code = exit_code(update)
        self.exit_code = self.exit_code if code is None else code
        self.parent_tool_call_id = _parent(update) or self.parent_tool_call_id

    def fields(self) -> Event:
        return {name: getattr(self, name) for name in ToolCall.__slots__}


class UpdateLog:
    """Turns the raw updates of one session into events, and counts its tool calls and tokens."""

    def __init__(self) -> None:
        self.calls: dict[str, ToolCall] = {}
        self.usage = Usage()

    def update(self, update: Mapping[str, Any]) -> Event:
        """The event of one ``session/update``."""
        name = str(update.get("sessionUpdate", "update"))
        event = {"direction": "from_agent", "kind": _KINDS.get(name, name), "update": dict(update)}
        if name in ("tool_call", "tool_call_update"):
            event |= self._merge(update)
        elif name == "usage_update":
            self.usage = add_usage(self.usage, update, source="agent_partial")
        return event

    def permission(self, params: Mapping[str, Any]) -> Event:
        """The event of a ``session/request_permission``; for some agents the first sight of a call."""
        event = {"direction": "from_agent", "kind": "permission", "update": dict(params)}
        call = params.get("toolCall")
        return event | self._merge(call) if isinstance(call, dict) else event

    def _merge(self, update: Mapping[str, Any]) -> Event:
        call_id = str(update.get("toolCallId"))
        call = self.calls.setdefault(call_id, ToolCall(call_id))
        call.merge(update)
        return call.fields()


def exit_code(update: Mapping[str, Any]) -> int | None:
    """The exit code of a finished command, wherever this agent puts it."""
    meta = update.get("_meta")
    places = [update.get("rawOutput"), meta.get("terminal_exit") if isinstance(meta, dict) else None]
    places += [place["metadata"] for place in places if isinstance(place, dict) and "metadata" in place]
    for place in places:
        if not isinstance(place, dict):
            continue
        for key in _EXIT_KEYS:
            value = place.get(key)
            if isinstance(value, int) and not isinstance(value, bool):
                return value
    return None


def content_text(content: object) -> str | None:
    """The text of a tool call's content blocks; None when there is none."""
    if not isinstance(content, list):
        return None
    parts: list[str] = []
    for block in content:
        inner = block.get("content") if isinstance(block, dict) else None
        text = inner.get("text") if isinstance(inner, dict) else None
        if isinstance(text, str):
            parts.append(text)
    return "\n".join(parts) if parts else None


def add_usage(known: Usage, told: Mapping[str, Any], *, source: str) -> Usage:
    """``known`` with whatever ``told`` says on top; what it does not say stays as it was.

    Reads a ``usage_update`` (context size and cost), a prompt's ``usage`` (running totals of
    the session), and totals that agents put in ``usage`` or ``_meta.usage`` of an update.
    """
    meta = told.get("_meta")
    places = [told, told.get("usage"), meta.get("usage") if isinstance(meta, dict) else None]
    found: dict[str, Any] = {}
    for place in places:
        if isinstance(place, dict):
            found |= {key: value for key, value in place.items() if _is_number(value)}
    cost = told.get("cost")
    usd = cost.get("amount") if isinstance(cost, dict) and cost.get("currency") == "USD" else None
    return Usage(
        input_tokens=found.get("inputTokens", known.input_tokens),
        output_tokens=found.get("outputTokens", known.output_tokens),
        cache_read_tokens=found.get("cachedReadTokens", known.cache_read_tokens),
        cache_creation_tokens=found.get("cachedWriteTokens", known.cache_creation_tokens),
        cost_usd=float(usd) if usd is not None and _is_number(usd) else known.cost_usd,
        context_tokens=found.get("used", known.context_tokens),
        source=source,
    )


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _parent(update: Mapping[str, Any]) -> str | None:
    meta = update.get("_meta")
    vendor = meta.get("claudeCode") if isinstance(meta, dict) else None
    parent = vendor.get("parentToolUseId") if isinstance(vendor, dict) else None
    return parent if isinstance(parent, str) else None
