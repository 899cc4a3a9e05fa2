"""JSON and server-sent events as they travel between an agent and a model.

JSON from agents may hold lone surrogates (a JavaScript string cut inside an emoji), which
orjson refuses; such a body takes the slower standard library instead.
"""

from __future__ import annotations

import json
from typing import Any

import orjson

SSE_DONE = b"data: [DONE]\n\n"


class BadJson(ValueError):
    """The bytes are not JSON."""


def loads(data: bytes | bytearray) -> Any:
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError:
        try:
            return json.loads(bytes(data))
        except (ValueError, RecursionError) as error:
            raise BadJson(str(error)) from error


def dumps(value: Any) -> bytes:
    try:
        return orjson.dumps(value)
    except TypeError:
        return json.dumps(value, separators=(",", ":")).encode("ascii")


def recordable(value: Any) -> Any:
    """``value`` with what cannot be stored as UTF-8 replaced by U+FFFD."""
    try:
        orjson.dumps(value)
        return value
    except TypeError:
        text = json.dumps(value, ensure_ascii=False)
        return json.loads(text.encode("utf-16", "surrogatepass").decode("utf-16", "replace"))


def event(payload: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + dumps(payload) + b"\n\n"


def events(stream: bytes) -> list[bytes]:
    """The ``data:`` payloads of a stream, complete events only, without the final marker."""
    found: list[bytes] = []
    for line in stream.splitlines(keepends=True):
        if line.startswith(b"data:") and line.endswith((b"\n", b"\r")):
            payload = line[5:].strip()
            if payload and payload != b"[DONE]":
                found.append(payload)
    return found


def error_body(message: str, kind: str, code: str | None = None, **extra: Any) -> dict[str, Any]:
    """An error in the shape every OpenAI-compatible client reads."""
    return {"error": {"message": message, "type": kind, "param": None, "code": code or kind, **extra}}


def model_list(name: str, context: int | None) -> dict[str, Any]:
    """The answer to ``GET /v1/models``; ``context`` is in tokens, None for no limit."""
    entry = {"id": name, "object": "model", "created": 0, "owned_by": "benchflow"}
    if context is not None:
        entry["max_model_len"] = context
    return {"object": "list", "data": [entry]}
