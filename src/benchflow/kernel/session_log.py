"""The recorded events of a rollout's sessions, with secrets masked across pieces of a text."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from benchflow.kernel.storage import LineWriter, Redactor

_MOST_HELD = 256
"""Pieces; an agent that repeats the beginning of a secret must not delay the record for ever."""

Record = dict[str, Any]


class SessionLog:
    """Appends events to ``acp_trajectory.jsonl``.

    Agents stream a message in pieces, and a secret may be cut between two of them. A piece
    that ends with the beginning of a secret therefore waits for the next one; when both hold
    a secret together, the first is written with their masked text and the rest are empty.
    """

    def __init__(self, path: Path, redact: Redactor) -> None:
        self._lines = LineWriter(path, redact)
        self._redact = redact
        self._held: list[Record] = []

    def append(self, record: Record) -> None:
        text = _text(record)
        if self._held and (text is None or record["kind"] != self._held[0]["kind"]):
            self._release()
        if text is None:
            self._lines.append(record)
            return
        self._held.append(record)
        if len(self._held) >= _MOST_HELD or not self._redact.may_go_on(_joined(self._held)):
            self._release()

    def close(self) -> None:
        self._release()
        self._lines.close()

    def _release(self) -> None:
        held, self._held = self._held, []
        if len(held) > 1:
            whole = self._redact(_joined(held))
            if whole != b"".join(self._redact(_joined([record])) for record in held):
                texts = [whole.decode("utf-8", "replace"), *("" for _ in held[1:])]
                held = [_with_text(record, text) for record, text in zip(held, texts, strict=True)]
        for record in held:
            self._lines.append(record)


def _text(record: Record) -> str | None:
    """The text of an event that is a piece of a message; None for any other event."""
    value: Any = record
    for key in ("update", "content", "text"):
        value = cast(Record, value).get(key) if isinstance(value, dict) else None
    return value if isinstance(value, str) else None


def _joined(records: list[Record]) -> bytes:
    return "".join(_text(record) or "" for record in records).encode("utf-8", "surrogatepass")


def _with_text(record: Record, text: str) -> Record:
    update = record["update"]
    return {**record, "update": {**update, "content": {**update["content"], "text": text}}}
