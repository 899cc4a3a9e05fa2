"""What a failed model call means: passing, final, or a context that no longer fits."""

from __future__ import annotations

import re
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from time import time
from typing import Any

from benchflow.gateway import wire

CONTEXT_CODE = "context_length_exceeded"
BUDGET_CODE = "budget_exceeded"
DOWN_CODE = "endpoint_unavailable"

_TRANSIENT = frozenset({408, 425, 429, 500, 502, 503, 504, 520, 522, 524, 529})
_CONTEXT = re.compile(
    r"maximum context length|context[_ ](?:length|window|limit)|max_model_len|prompt is too long"
    r"|input is too long|input token count|exceeds? the available context",
    re.IGNORECASE,
)
_LIMIT = re.compile(r"maximum context length is (\d+)")
_INPUT = re.compile(r"(\d+) (?:in the messages|input tokens)")
_MESSAGE_LIMIT = 500


def transient(status: int) -> bool:
    return status in _TRANSIENT


def error_of(body: bytes) -> tuple[str, str]:
    """``(code, message)`` of an error reply, whatever its shape."""
    try:
        parsed: Any = wire.loads(body)
    except wire.BadJson:
        return "", body[:_MESSAGE_LIMIT].decode("utf-8", "replace").strip()
    error = parsed.get("error", parsed) if isinstance(parsed, dict) else parsed
    if not isinstance(error, dict):
        return "", str(error)[:_MESSAGE_LIMIT]
    message = error.get("message") or error.get("detail") or ""
    return str(error.get("code") or error.get("type") or ""), str(message)[:_MESSAGE_LIMIT]


def context_overflow(status: int, body: bytes) -> bool:
    """Does this refusal say that the conversation no longer fits the model?"""
    if status not in (400, 413, 422):
        return False
    code, message = error_of(body)
    return code == CONTEXT_CODE or bool(_CONTEXT.search(message))


def room_left(message: str) -> int | None:
    """Tokens that a reply could still have when only the asked-for length does not fit."""
    limit, used = _LIMIT.search(message), _INPUT.search(message)
    if limit is None or used is None:
        return None
    room = int(limit[1]) - int(used[1])
    return room if room > 0 else None


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Seconds the upstream asked to wait: a number or a date."""
    value = headers.get("retry-after")
    if not value:
        return None
    try:
        return max(0.0, float(value))
    except ValueError:
        pass
    try:
        return max(0.0, parsedate_to_datetime(value).timestamp() - time())
    except ValueError:
        return None
