"""Checking a file of rows before it is trained on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson
from pydantic import BaseModel, ValidationError

from benchflow.contracts.errors import UsageError
from benchflow.training.calls import has_tool_calls
from benchflow.training.records import ROW_VERSION, ChatRow, TokenRow, VerifiersRow

MODELS: dict[str, type[BaseModel]] = {"chat": ChatRow, "verifiers": VerifiersRow, "tokens": TokenRow}
_TELLTALE = {"chat": "messages", "verifiers": "completion", "tokens": "prompt_ids"}
MAX_ERRORS = 50


@dataclass(slots=True)
class Check:
    """``errors`` are ``(line, what)``, at most ``MAX_ERRORS`` of ``n_errors``; line 0 is the
    file as a whole."""

    format: str | None = None
    rows: int = 0
    rows_with_tool_calls: int = 0
    n_errors: int = 0
    errors: list[tuple[int, str]] = field(default_factory=list[tuple[int, str]])

    @property
    def ok(self) -> bool:
        return self.n_errors == 0

    def add(self, line: int, what: str) -> None:
        self.n_errors += 1
        if len(self.errors) < MAX_ERRORS:
            self.errors.append((line, what))

    def headline(self) -> dict[str, Any]:
        return {"ok": self.ok, "rows": self.rows, "rows_with_tool_calls": self.rows_with_tool_calls}

    def record(self) -> dict[str, Any]:
        errors = [{"line": line, "error": what} for line, what in self.errors]
        return {**self.headline(), "format": self.format, "n_errors": self.n_errors, "errors": errors}

    def lines(self) -> list[str]:
        said = [f"line {line}: {what}" if line else what for line, what in self.errors]
        hidden = self.n_errors - len(self.errors)
        return [*said, f"… and {hidden} more"] if hidden else said


def validate(path: str | Path, *, format: str | None = None, require_tool_calls: bool = False) -> Check:
    """Check every row. ``format`` is told from the first row when it is not given. Raises
    ``UsageError`` for a path that cannot be read or a format nobody checks."""
    if format is not None and format not in MODELS:
        raise UsageError(f"no check for format {format!r}", fix=f"known: {', '.join(MODELS)}")
    check = Check(format)
    try:
        with Path(path).open("rb") as handle:
            for number, line in enumerate(handle, 1):
                if line.strip():
                    _check_line(check, number, line, require_tool_calls)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}", fix="name a file of rows") from error
    if not check.rows and not check.errors:
        check.add(0, "no rows")
    return check


def _check_line(check: Check, number: int, line: bytes, require_tool_calls: bool) -> None:
    check.rows += 1
    try:
        row = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        check.add(number, f"not JSON: {error}")
        return
    if not isinstance(row, dict):
        check.add(number, f"a row is an object, not {type(row).__name__}")
        return
    if check.format is None:
        check.format = next((name for name, key in _TELLTALE.items() if key in row), None)
    if check.format is None:
        check.add(number, f"unknown format: none of {', '.join(_TELLTALE.values())} is there")
        return
    problems = list(_problems(MODELS[check.format], row))
    for problem in problems:
        check.add(number, problem)
    messages = row.get("messages") or row.get("completion")
    if not problems and messages and has_tool_calls(messages):
        check.rows_with_tool_calls += 1
    elif not problems and require_tool_calls:
        check.add(number, "no tool calls")


def _problems(model: type[BaseModel], row: dict[str, Any]) -> Iterator[str]:
    version = row.get("schema_version", ROW_VERSION)
    if not isinstance(version, int) or version > ROW_VERSION:
        yield f"schema_version {version!r}; this benchflow reads up to {ROW_VERSION}"
        return
    try:
        model.model_validate(row)
    except ValidationError as error:
        for item in error.errors(include_url=False, include_input=False):
            where = ".".join(str(part) for part in item["loc"])
            what = item["msg"].removeprefix("Value error, ")
            yield f"{where}: {what}" if where else what
