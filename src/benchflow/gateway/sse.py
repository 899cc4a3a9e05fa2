"""Chat completions as a stream: put a stream together, and make one of a whole reply."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchflow.gateway import wire

_PIECE = 4096
"""Characters of content in one synthesised chunk."""


def assemble(stream: bytes) -> dict[str, Any] | None:
    """The chat completion that a stream of chunks spells, or None when it holds no chunk.

    An error event inside the stream ends up under ``error``. Chunks that are not JSON are left out.
    """
    whole: dict[str, Any] | None = None
    choices: dict[int, dict[str, Any]] = {}
    for payload in wire.events(stream):
        try:
            chunk = wire.loads(payload)
        except wire.BadJson:
            continue
        if not isinstance(chunk, dict):
            continue
        if whole is None:
            whole = {"object": "chat.completion"}
        for key, value in chunk.items():
            if key == "choices":
                for part in value or ():
                    _merge_choice(choices, part)
            elif key != "object" and value is not None:
                whole[key] = value
    if whole is not None:
        whole["choices"] = [choices[index] for index in sorted(choices)]
    return whole


def _merge_choice(choices: dict[int, dict[str, Any]], part: dict[str, Any]) -> None:
    index = part.get("index", 0)
    choice = choices.setdefault(
        index, {"index": index, "message": {"role": "assistant"}, "finish_reason": None}
    )
    if part.get("finish_reason"):
        choice["finish_reason"] = part["finish_reason"]
    logprobs = part.get("logprobs")
    if isinstance(logprobs, dict) and logprobs.get("content"):
        choice.setdefault("logprobs", {"content": []})["content"].extend(logprobs["content"])
    message = choice["message"]
    for key, value in (part.get("delta") or {}).items():
        if key == "tool_calls":
            for call in value or ():
                _merge_call(message.setdefault("tool_calls", []), call)
        elif isinstance(value, str) and key != "role":
            message[key] = (message.get(key) or "") + value
        elif value is not None:
            message[key] = value


def _merge_call(calls: list[dict[str, Any]], part: dict[str, Any]) -> None:
    index = part.get("index", len(calls) - 1 if calls else 0)
    while len(calls) <= index:
        calls.append({"id": None, "type": "function", "function": {"name": "", "arguments": ""}})
    call = calls[index]
    if part.get("id"):
        call["id"] = part["id"]
    function = part.get("function") or {}
    for key in ("name", "arguments"):
        call["function"][key] += function.get(key) or ""


def synthesise(reply: dict[str, Any], *, include_usage: bool, piece: int = _PIECE) -> Iterator[bytes]:
    """The stream of events that spells ``reply``, with the usage chunk when it was asked for.
    ``piece`` is the most characters of text in one event."""
    head = {
        "id": reply.get("id"),
        "object": "chat.completion.chunk",
        "created": reply.get("created"),
        "model": reply.get("model"),
    }
    for choice in reply.get("choices") or ():
        index = choice.get("index", 0)
        for delta in _deltas(choice.get("message") or {}, piece):
            yield wire.event({**head, "choices": [{"index": index, "delta": delta, "finish_reason": None}]})
        last = {"index": index, "delta": {}, "finish_reason": choice.get("finish_reason")}
        if choice.get("logprobs"):
            last["logprobs"] = choice["logprobs"]
        yield wire.event({**head, "choices": [last]})
    if include_usage:
        yield wire.event({**head, "choices": [], "usage": reply.get("usage")})
    yield wire.SSE_DONE


def _deltas(message: dict[str, Any], piece: int) -> Iterator[dict[str, Any]]:
    yield {"role": message.get("role", "assistant"), "content": ""}
    for key in ("reasoning_content", "reasoning", "content", "refusal"):
        text = message.get(key)
        if isinstance(text, str):
            for at in range(0, len(text), piece):
                yield {key: text[at : at + piece]}
    for position, call in enumerate(message.get("tool_calls") or ()):
        yield {"tool_calls": [{"index": position, **call}]}
