"""Reading a policy file; every mistake is named with file, line and key."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from benchflow.contracts.errors import UsageError
from benchflow.kernel.documents import Key, YamlProblem, line_of, parse_yaml, reason

Text = Annotated[str, BeforeValidator(lambda value: str(value) if type(value) in (int, float) else value)]
"""A text that YAML may have taken for a number."""


@dataclass(frozen=True, slots=True)
class ToolUse:
    """``kind`` is run, write or call; ``arguments`` are command, or path and content, or the tool's own."""

    kind: str
    name: str = ""
    arguments: Mapping[str, Any] = field(default_factory=dict[str, Any])


class _Part(BaseModel):
    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, populate_by_name=True
    )

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, data: Any) -> Any:
        return {k: v for k, v in data.items() if v is not None} if isinstance(data, dict) else data


class Failure(_Part):
    status: int = Field(default=500, ge=400, le=599)
    message: str = "scripted failure"
    retry_after: float | None = Field(default=None, ge=0)
    disconnect: bool = False
    times: int = Field(default=1, ge=1)


class Write(_Part):
    path: str = Field(min_length=1)
    content: str


class Call(_Part):
    name: str = Field(min_length=1)
    arguments: dict[str, Any] = {}


class Choice(_Part):
    """One alternative. ``run`` are shell commands; ``run``, ``write`` and ``call`` take one or a list."""

    weight: float = Field(default=1.0, ge=0)
    label: Text | None = None
    say: str | None = None
    think: str | None = None
    run: list[Annotated[str, Field(pattern=r"\S")]] = []
    write: list[Write] = []
    call: list[Call] = []
    fail: Failure | None = None
    finish: Literal["stop", "length", "content_filter"] | None = None
    delay_ms: float = Field(default=0.0, ge=0)
    usage: dict[str, Any] = {}

    @field_validator("run", "write", "call", mode="before")
    @classmethod
    def _one_or_many(cls, value: Any) -> Any:
        return value if isinstance(value, list) else [value]

    @model_validator(mode="after")
    def _sound(self) -> Choice:
        self.check()
        return self

    def check(self) -> None:
        """Raises ``ValueError``."""
        if self.say is None and self.think is None and not self.tools and self.fail is None:
            raise ValueError("an alternative needs say, run, write, call or fail")

    @cached_property
    def tools(self) -> tuple[ToolUse, ...]:
        return (
            *(ToolUse("run", arguments={"command": command.rstrip("\n")}) for command in self.run),
            *(ToolUse("write", arguments=item.model_dump()) for item in self.write),
            *(ToolUse("call", item.name, item.arguments) for item in self.call),
        )


class Turn(Choice):
    """A turn is its own only alternative, or lists several."""

    when: re.Pattern[str] | None = None
    several: list[Choice] | None = Field(default=None, alias="choices", min_length=1)

    def check(self) -> None:
        beside = self.model_fields_set - {"several", "when"}
        if not self.several:
            super().check()
        elif beside:
            raise ValueError(f"{min(beside)} stands beside choices; put it into one of them")
        if sum(choice.weight for choice in self.choices) <= 0:
            raise ValueError("at least one weight must be above 0")

    @property
    def choices(self) -> list[Choice]:
        return self.several or [self]


class Policy(_Part):
    name: str = Field(default="", alias="model")
    turns: list[Turn] = Field(min_length=1)
    otherwise: Turn = Turn(say="Done.")
    context: int | None = None
    version: Text | None = None


_PARTS = {"turns": Turn, "otherwise": Turn, "choices": Choice, "write": Write, "call": Call, "fail": Failure}


def load_policy(path: Path) -> Policy:
    """Raises ``UsageError`` for a missing file or a mistake in it."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise UsageError(
            f"no scripted policy at {path}", fix="give scripted/<path of a YAML file>"
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read the scripted policy {path}: {error}") from error
    return parse_policy(text, str(path), path.stem)


def parse_policy(text: str, file: str, name: str) -> Policy:
    """``file`` is for messages, ``name`` the default model name."""
    try:
        data, lines = parse_yaml(text)
    except YamlProblem as error:
        what = f"{error.key}: {error.message}" if error.key else error.message
        raise UsageError(f"{file}:{error.line}: {what}") from error
    if not isinstance(data, dict):
        raise UsageError(f"{file}:1: a scripted policy is a mapping with the key turns")
    try:
        policy = Policy.model_validate(data)
    except ValidationError as error:
        raise UsageError(f"{file}:{_explained(error, lines)}") from error
    return policy if policy.name else policy.model_copy(update={"name": name})


def _explained(error: ValidationError, lines: Mapping[Key, int]) -> str:
    """``line: key: what`` of the first mistake."""
    first = error.errors()[0]
    at = first["loc"]
    keys = [part for part in at if isinstance(part, str)]
    why = reason(first)
    if first["type"] == "extra_forbidden":
        part = next((_PARTS[key] for key in reversed(keys[:-1]) if key in _PARTS), Policy)
        known = ", ".join(item.alias or name for name, item in part.model_fields.items())
        why = f"unknown key; known: {known}"
    return f"{line_of(lines, at) or 1}: {f'{keys[-1]}: ' if keys else ''}{why}"
