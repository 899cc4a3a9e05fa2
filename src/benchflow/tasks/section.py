"""Typed reading of one mapping of a task's configuration.

Each reader notes its key as known and reports a wrong value with file, line and key;
``close`` then reports the keys nobody asked for.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from benchflow.kernel.documents import Key
from benchflow.tasks.problems import ConfigSource, Findings, Problem, did_you_mean, dotted

_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)i?b?\s*", re.IGNORECASE)
_MEGABYTES = {"": 1 / 2**20, "k": 1 / 2**10, "m": 1, "g": 2**10, "t": 2**20}
_LARGEST = 1e15
"""Any larger number, or infinity or NaN, is a slip of the pen."""
_EMPTY: tuple[object, ...] = (None, "", 0, False, [], {})


class Section:
    def __init__(self, source: ConfigSource, findings: Findings, at: Key = (), data: Any = None) -> None:
        self.source = source
        self.findings = findings
        self.at = at
        self.data: dict[str, Any] = source.data if not at else data
        self._known: set[str] = set()

    def problem(self, key: str, message: str) -> None:
        self.findings.problems.append(self._place(key, message))

    def warn(self, key: str, message: str) -> None:
        self.findings.warnings.append(self._place(key, message))

    def given(self, key: str) -> bool:
        """True when the key has a value other than an empty one, zero or false."""
        self._known.add(key)
        return self.data.get(key) not in _EMPTY

    def value(self, key: str) -> Any:
        self._known.add(key)
        return self.data.get(key)

    def accept(self, *keys: str) -> None:
        """Keys that describe the task and change nothing of its run."""
        self._known.update(keys)

    def ignore(self, key: str, why: str) -> None:
        if self.given(key):
            self.warn(key, f"ignored: {why}")

    def refuse(self, key: str, why: str) -> None:
        """A key that decides how a task is run or scored and that is not honoured."""
        if self.given(key):
            self.problem(key, why)

    def text(self, key: str) -> str | None:
        return self._checked(key, _is_text, "a text")

    def flag(self, key: str) -> bool | None:
        return self._checked(key, lambda value: isinstance(value, bool), "true or false")

    def number(self, key: str) -> float | None:
        """A finite number above 0."""
        value = self._checked(key, _is_number, "a number")
        if value is not None and value <= 0:
            self.problem(key, f"must be above 0, not {_show(value)}")
            return None
        return value

    def megabytes(self, key: str, size_key: str) -> int | None:
        """Megabytes from ``key`` (a number), or from ``size_key`` (a text such as "2G")."""
        plain = self.number(key)
        size = self._size(size_key)
        if plain is not None and size is not None and size != plain:
            self.warn(size_key, f"ignored: {key} says {plain:g}")
        chosen = plain if plain is not None else size
        return None if chosen is None else max(1, round(chosen))

    def names(self, key: str) -> tuple[str, ...]:
        return tuple(self._checked(key, _is_texts, "a list of texts") or ())

    def env(self) -> dict[str, str]:
        """Environment variables under ``env``; a number becomes its text."""
        table = self.table("env")
        found: dict[str, str] = {}
        for name, value in table.data.items():
            if not name or "=" in name or "\0" in name:
                table.problem(name, "is not a name of an environment variable")
            elif isinstance(value, bool) or not isinstance(value, (str, int, float)):
                table.problem(name, f"must be a text, not {_show(value)}")
            else:
                found[name] = str(value)
        return found

    def table(self, key: str) -> Section:
        """The mapping under ``key``; an empty one when it is absent or no mapping."""
        value = self._checked(key, lambda value: isinstance(value, dict), "a mapping")
        return Section(self.source, self.findings, (*self.at, key), value or {})

    def close(self, *, strict: bool | None = None) -> None:
        """Report unknown keys: problems when strict, else warnings."""
        for key in self.data:
            if key in self._known:
                continue
            message = f"unknown key{did_you_mean(str(key), self._known)}"
            if self.source.strict if strict is None else strict:
                self.problem(key, message)
            else:
                self.warn(key, f"ignored: {message}")

    def _size(self, key: str) -> float | None:
        value = self._checked(key, _is_size, 'a size such as "2G" or "512M"')
        match = _SIZE.fullmatch(value or "")
        return float(match[1]) * _MEGABYTES[match[2].lower()] if match else None

    def _checked(self, key: str, sound: Callable[[Any], bool], what: str) -> Any:
        """The value when it is ``what`` was asked for; None when it is absent, or wrong."""
        value = self.value(key)
        if value is None or sound(value):
            return value
        self.problem(key, f"must be {what}, not {_show(value)}")
        return None

    def _place(self, key: str, message: str) -> Problem:
        path = (*self.at, key)
        return Problem(message, self.source.file, self.source.line(path), dotted(path))


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip()) and "\0" not in value


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) and item.strip() for item in value)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= _LARGEST


def _is_size(value: Any) -> bool:
    match = _SIZE.fullmatch(value) if isinstance(value, str) else None
    return match is not None and float(match[1]) > 0


def _show(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
