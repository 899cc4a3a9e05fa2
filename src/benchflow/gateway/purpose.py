"""What a call is for, told from the wire alone.

Agents make calls of their own beside the work: titles, summaries, suggestions, permission
classifiers. A call is called auxiliary only on clear evidence; everything else is ``agent``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

AUXILIARY = frozenset({"title", "summary", "suggestion", "classifier", "helper"})
"""Purposes whose failure says nothing about the rollout."""

_TITLE = re.compile(
    r"\btitle generator\b"
    r"|\b(?:generate|create|write|produce|come up with|suggest)\b[^.\n]{0,80}\btitle\b"
    r"|\btitle (?:for|of) (?:this|the) (?:conversation|session|chat|thread|task)\b",
    re.IGNORECASE,
)
_COMPACTION = re.compile(
    r"\b(?:compact|compaction|condense)\b[^.\n]{0,80}\b(?:conversation|context|history)\b"
    r"|\bsummar\w+\b[^.\n]{0,120}\b(?:continue|continuing|resume|next agent|context window)\b"
    r"|\bdetailed summary of (?:the|our) conversation\b",
    re.IGNORECASE,
)
_SUMMARY = re.compile(
    r"\b(?:summari[sz]e|write a (?:short |brief |concise )?summary)\b"
    r"[^.\n]{0,80}\b(?:conversation|session|chat|thread|changes|transcript)\b",
    re.IGNORECASE,
)
_CLASSIFIER = re.compile(
    r"\b(?:classif(?:y|ier)|should (?:be )?(?:block|allow)|allow or (?:deny|block))\b"
    r"|\bis (?:this|the) command safe\b",
    re.IGNORECASE,
)
_READ = 4000
"""Characters of a text that are looked at."""
_HINTS = {
    _TITLE: ("title",),
    _COMPACTION: ("compact", "condense", "summar"),
    _SUMMARY: ("summar",),
    _CLASSIFIER: ("classif", "allow", "block", "safe"),
}
"""Letters without which a pattern cannot match: most texts are done with at once."""
_SHORT_ANSWER = 256
"""A classifier asks for a word, not for work."""


def purpose_of(
    body: Mapping[str, Any], headers: Mapping[str, str], *, seen_tools: bool, extends: bool
) -> str:
    """``seen_tools``: an earlier call of the rollout offered tools. ``extends``: this conversation
    continues one that was seen. See ``contracts.records.CallMetadata.purpose``."""
    messages = [item for item in body.get("messages") or () if isinstance(item, dict)]
    system, last = _texts(messages)
    if "[SUGGESTION MODE" in last[:400]:
        return "suggestion"
    subagent = headers.get("x-openai-subagent", "")
    under_way = any(message.get("role") == "assistant" for message in messages)
    if "compact" in subagent or (under_way and _says(last[-_READ:], _COMPACTION)):
        return "compaction"
    if subagent or headers.get("x-parent-session-id"):
        return "subagent"
    if body.get("tools"):
        return "agent"
    return _without_tools(body, f"{system[:_READ]}\n{last[:_READ]}", seen_tools, extends)


def _without_tools(body: Mapping[str, Any], text: str, seen_tools: bool, extends: bool) -> str:
    if extends:
        return "agent"
    if _says(text, _TITLE):
        return "title"
    if _says(text, _SUMMARY):
        return "summary"
    limit = body.get("max_completion_tokens") or body.get("max_tokens")
    if isinstance(limit, int) and limit <= _SHORT_ANSWER and _says(text, _CLASSIFIER):
        return "classifier"
    return "helper" if seen_tools else "agent"


def _says(text: str, pattern: re.Pattern[str]) -> bool:
    lowered = text.lower()
    return any(hint in lowered for hint in _HINTS[pattern]) and bool(pattern.search(text))


def _texts(messages: list[dict[str, Any]]) -> tuple[str, str]:
    """The system text, and the text of the last message when a user wrote it."""
    system = [m.get("content") for m in messages if m.get("role") in ("system", "developer")]
    last = messages[-1] if messages and messages[-1].get("role") == "user" else {}
    return "\n".join(map(text_of, system)), text_of(last.get("content"))


def text_of(content: object) -> str:
    """The text of a message's content: a string, or parts of which some are text."""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        parts = [part.get("text") for part in content if isinstance(part, dict)]
        return "".join(part for part in parts if isinstance(part, str))
    return ""
