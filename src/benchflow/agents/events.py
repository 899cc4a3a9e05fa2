"""Events of an agent's own account, in one shape whoever the agent is.

Each function returns the fields of ``SessionEvent`` that an agent knows; whoever records
them adds the time, the number and the node. ``update`` has the form of a protocol
``session/update``, so that a reader meets one shape for ``mini`` and for ACP agents.
"""

from __future__ import annotations

from typing import Any

Event = dict[str, Any]


def user_message(text: str) -> Event:
    return _message("to_agent", "user_message", text)


def agent_message(text: str) -> Event:
    return _message("from_agent", "agent_message", text)


def agent_thought(text: str) -> Event:
    return _message("from_agent", "agent_thought", text)


def tool_call(call_id: str, *, title: str, input: Any, tool_kind: str = "execute") -> Event:
    update = {"sessionUpdate": "tool_call", "toolCallId": call_id, "title": title, "kind": tool_kind}
    update |= {"status": "in_progress", "rawInput": input}
    event = {"direction": "from_agent", "kind": "tool_call", "update": update, "id": call_id}
    return event | {"title": title, "tool_kind": tool_kind, "input": input, "status": "in_progress"}


def tool_result(call: Event, *, output: Any, exit_code: int | None, status: str) -> Event:
    """The end of ``call``; carries its input again, so that the last line of an id is complete."""
    said = {"output": output, "exit_code": exit_code}
    update = {"sessionUpdate": "tool_call_update", "toolCallId": call["id"], "status": status}
    ended = {"direction": "engine", "kind": "tool_call_update", "update": update | {"rawOutput": said}}
    return call | ended | said | {"status": status}


def turn_end(reason: str, **facts: Any) -> Event:
    return {"direction": "engine", "kind": "turn_end", "update": {"stopReason": reason, **facts}}


def error(message: str, **facts: Any) -> Event:
    return {"direction": "engine", "kind": "error", "update": {"message": message, **facts}}


def _message(direction: str, kind: str, text: str) -> Event:
    update = {"sessionUpdate": f"{kind}_chunk", "content": {"type": "text", "text": text}}
    return {"direction": direction, "kind": kind, "update": update}
