"""What is wrong with a task, and where: file, line, key."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from benchflow.kernel.documents import Key, line_of


@dataclass(frozen=True, slots=True)
class Problem:
    """One finding. ``file`` is relative to the package; ``line`` counts from 1."""

    message: str
    file: str | None = None
    line: int | None = None
    key: str | None = None

    def __str__(self) -> str:
        place = ":".join(str(part) for part in (self.file, self.line) if part is not None)
        return ": ".join(part for part in (place, self.key, self.message) if part)


@dataclass(slots=True)
class Findings:
    """Collects every problem of one package, so that a user mends them in one go."""

    problems: list[Problem] = field(default_factory=list[Problem])
    warnings: list[Problem] = field(default_factory=list[Problem])


@dataclass(frozen=True, slots=True)
class ConfigSource:
    """A parsed configuration file that still knows the line of each key.

    ``strict`` refuses unknown keys (native authoring); otherwise they are warnings.
    """

    file: str
    data: dict[str, object]
    lines: dict[Key, int]
    strict: bool

    def line(self, key: Key) -> int | None:
        return line_of(self.lines, key)


class FileProblem(Exception):
    """A file that cannot be parsed at all."""

    def __init__(self, message: str, file: str, line: int | None = None, key: str | None = None) -> None:
        self.problem = Problem(message, file, line, key)
        super().__init__(str(self.problem))


def dotted(key: Key) -> str:
    text = ""
    for part in key:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text


def did_you_mean(word: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"; did you mean {close[0]!r}?" if close else ""


def read_text(path: Path, file: str) -> str:
    """UTF-8 text of a package file; raises ``FileProblem`` naming the line of a bad byte."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise FileProblem(f"cannot be read: {error.strerror}", file) from error
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise FileProblem(f"byte 0x{raw[error.start]:02x} is not UTF-8", file, line) from error
