"""A byte-level tokenizer and a chat template for the scripted model.

An id is a byte plus ``OFFSET``, or one of the few marks below it. What the template makes of a
conversation with the assistant's reply starts with exactly the prompt and the completion that
led to it, as long as the agent sends the reply back as it got it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchflow.gateway import wire
from benchflow.gateway.purpose import text_of

BOS, SYSTEM, USER, ASSISTANT, TOOL, END, CALL, ARGUMENTS, THINK, THOUGHT, TOOLS = range(1, 12)
OFFSET = 16
VOCABULARY = OFFSET + 256

_MARKS = {
    BOS: "<s>",
    SYSTEM: "<system>",
    USER: "<user>",
    ASSISTANT: "<assistant>",
    TOOL: "<tool>",
    END: "<end>",
    CALL: "<call>",
    ARGUMENTS: "<arguments>",
    THINK: "<think>",
    THOUGHT: "</think>",
    TOOLS: "<tools>",
}
_ROLES = {"system": SYSTEM, "developer": SYSTEM, "user": USER, "tool": TOOL, "function": TOOL}


def encode(text: str) -> list[int]:
    return [byte + OFFSET for byte in text.encode("utf-8", "surrogatepass")]


TEXTS = tuple(
    chr(token - OFFSET) if OFFSET <= token < OFFSET + 128 else _MARKS.get(token, "\ufffd")
    for token in range(VOCABULARY)
)
"""How each token reads in a list of log-probabilities: its text, or its number."""
NUMBERED = tuple(f"token_id:{token}" for token in range(VOCABULARY))


def prompt_ids(messages: Sequence[Any], tools: Any = None) -> list[int]:
    """The whole prompt, up to and including the mark after which the assistant speaks."""
    ids = [BOS]
    if tools:
        ids += [TOOLS, *encode(wire.dumps(tools).decode("utf-8", "replace")), END]
    for message in messages:
        if not isinstance(message, Mapping):
            continue
        if message.get("role") == "assistant":
            ids += [ASSISTANT, *reply_ids(message), END]
        else:
            ids += [_ROLES.get(str(message.get("role")), USER), *encode(text_of(message.get("content"))), END]
    ids.append(ASSISTANT)
    return ids


def reply_ids(message: Mapping[str, Any]) -> list[int]:
    """What the assistant said, without the final ``END``."""
    ids: list[int] = []
    thought = message.get("reasoning_content") or message.get("reasoning")
    if isinstance(thought, str) and thought:
        ids += [THINK, *encode(thought), THOUGHT]
    ids += encode(text_of(message.get("content")))
    for call in message.get("tool_calls") or ():
        function = call.get("function") or {}
        ids += [CALL, *encode(str(function.get("name", ""))), ARGUMENTS]
        ids += encode(str(function.get("arguments", "")))
    return ids
