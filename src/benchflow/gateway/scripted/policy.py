"""Reading a policy file; every mistake is named with file, line and key."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from benchflow.contracts.errors import UsageError


@dataclass(frozen=True, slots=True)
class ToolUse:
    """``kind`` is run, write or call; ``arguments`` are command, or path and content, or the tool's own."""

    kind: str
    name: str = ""
    arguments: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True)
class Failure:
    status: int = 500
    message: str = "scripted failure"
    retry_after: float | None = None
    disconnect: bool = False
    times: int = 1


@dataclass(frozen=True, slots=True)
class Choice:
    weight: float = 1.0
    label: str | None = None
    say: str | None = None
    think: str | None = None
    tools: tuple[ToolUse, ...] = ()
    fail: Failure | None = None
    finish: str | None = None
    delay: float = 0.0
    """Seconds."""
    usage: Mapping[str, int] = field(default_factory=dict[str, int])


@dataclass(frozen=True, slots=True)
class Turn:
    choices: tuple[Choice, ...]
    when: re.Pattern[str] | None = None


DONE = Turn((Choice(say="Done."),))


@dataclass(frozen=True, slots=True)
class Policy:
    name: str
    turns: tuple[Turn, ...]
    otherwise: Turn = DONE
    context: int | None = None
    version: str | None = None


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
    reader = _Reader(file)
    top = reader.document(text)
    reader.known(top, ("model", "context", "version", "turns", "otherwise"))
    turns = top.get("turns")
    if not isinstance(turns, list) or not turns:
        raise reader.wrong(top, "turns", "must be a list of at least one turn")
    if not all(isinstance(turn, _Map) for turn in turns):
        raise reader.wrong(top, "turns", "each turn must be a mapping")
    otherwise = reader.value(top, "otherwise", _Map, None)
    return Policy(
        name=reader.value(top, "model", str, name),
        turns=tuple(reader.turn(turn) for turn in turns),
        otherwise=DONE if otherwise is None else reader.turn(otherwise),
        context=reader.value(top, "context", int, None),
        version=reader.optional_text(top, "version"),
    )


class _Map(dict[str, Any]):
    """A mapping that knows its lines."""

    line: int = 0
    lines: dict[str, int]


class _Loader(yaml.SafeLoader):
    pass


def _construct(loader: yaml.SafeLoader, node: yaml.MappingNode) -> _Map:
    loader.flatten_mapping(node)
    found = _Map()
    found.line, found.lines = node.start_mark.line + 1, {}
    for key_node, value_node in node.value:
        key = str(loader.construct_object(key_node, deep=True))
        if key in found:
            problem = f"the key {key!r} appears twice"
            raise yaml.constructor.ConstructorError(None, None, problem, key_node.start_mark)
        found[key] = loader.construct_object(value_node, deep=True)
        found.lines[key] = key_node.start_mark.line + 1
    return found


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _construct)

_KINDS = {_Map: "a mapping", str: "text", int: "a whole number", float: "a number", bool: "true or false"}
_FINISH = ("stop", "length", "content_filter")
_CHOICE_KEYS = (
    *("weight", "label", "say", "think", "run", "write", "call"),
    *("fail", "finish", "delay_ms", "usage"),
)


class _Reader:
    def __init__(self, file: str) -> None:
        self._file = file

    def document(self, text: str) -> _Map:
        try:
            top = yaml.load(text, _Loader)
        except yaml.MarkedYAMLError as error:
            line = error.problem_mark.line + 1 if error.problem_mark else 1
            raise UsageError(f"{self._file}:{line}: {error.problem or 'not YAML'}") from error
        except yaml.reader.ReaderError as error:
            line = text.count("\n", 0, error.position) + 1
            what = f"the character U+{error.character:04X} is not allowed in YAML"
            raise UsageError(f"{self._file}:{line}: {what}") from error
        if not isinstance(top, _Map):
            raise UsageError(f"{self._file}:1: a scripted policy is a mapping with the key turns")
        return top

    def wrong(self, where: _Map, key: str, what: str) -> UsageError:
        return UsageError(f"{self._file}:{where.lines.get(key, where.line)}: {key}: {what}")

    def known(self, where: _Map, keys: tuple[str, ...]) -> None:
        for key in where:
            if key not in keys:
                raise self.wrong(where, key, f"unknown key; known: {', '.join(keys)}")

    def value(self, where: _Map, key: str, kind: type | tuple[type, ...], default: Any) -> Any:
        value = where.get(key)
        if value is None:
            return default
        kinds = kind if isinstance(kind, tuple) else (kind,)
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            wanted = " or ".join(_KINDS[k] for k in kinds)
            raise self.wrong(where, key, f"must be {wanted}, not {_KINDS.get(type(value), 'a list')}")
        return value

    def number(self, where: _Map, key: str, default: Any, *, least: float = 0.0) -> Any:
        number = self.value(where, key, (int, float), default)
        if number is not None and not least <= number < float("inf"):
            raise self.wrong(where, key, f"must be a finite number of at least {least:g}")
        return number

    def optional_text(self, where: _Map, key: str) -> str | None:
        value = self.value(where, key, (str, int, float), None)
        return None if value is None else str(value)

    def turn(self, where: _Map) -> Turn:
        when = self.value(where, "when", str, None)
        if "choices" in where:
            self.known(where, ("choices", "when"))
            entries = where["choices"]
            if not isinstance(entries, list) or not entries or not all(isinstance(e, _Map) for e in entries):
                raise self.wrong(where, "choices", "must be a list of alternatives")
            choices = tuple(self.choice(entry) for entry in entries)
        else:
            choices = (self.choice(where),)
        if sum(choice.weight for choice in choices) <= 0:
            raise self.wrong(where, "choices", "at least one weight must be above 0")
        try:
            return Turn(choices, None if when is None else re.compile(when))
        except re.error as error:
            raise self.wrong(where, "when", f"not a regular expression: {error}") from error

    def choice(self, where: _Map) -> Choice:
        self.known(where, ("when", *_CHOICE_KEYS))
        finish = self.value(where, "finish", str, None)
        if finish not in (None, *_FINISH):
            raise self.wrong(where, "finish", f"must be one of {', '.join(_FINISH)}")
        tools = (
            *self._uses(where, "run", self._run),
            *self._uses(where, "write", self._write),
            *self._uses(where, "call", self._call),
        )
        choice = Choice(
            weight=float(self.number(where, "weight", 1.0)),
            label=self.optional_text(where, "label"),
            say=self.value(where, "say", str, None),
            think=self.value(where, "think", str, None),
            tools=tools,
            fail=self._failure(where),
            finish=finish,
            delay=self.number(where, "delay_ms", 0.0) / 1000,
            usage=dict(self.value(where, "usage", _Map, {})),
        )
        if choice.say is None and not tools and choice.fail is None and choice.think is None:
            raise UsageError(
                f"{self._file}:{where.line}: say: an alternative needs say, run, write, call or fail"
            )
        return choice

    def _uses(self, where: _Map, key: str, read: Callable[[_Map, str, Any], ToolUse]) -> tuple[ToolUse, ...]:
        value = where.get(key)
        if value is None:
            return ()
        return tuple(read(where, key, item) for item in (value if isinstance(value, list) else [value]))

    def _run(self, where: _Map, key: str, item: Any) -> ToolUse:
        if not isinstance(item, str) or not item.strip():
            raise self.wrong(where, key, "must be a shell command")
        return ToolUse("run", arguments={"command": item.rstrip("\n")})

    def _write(self, where: _Map, key: str, item: Any) -> ToolUse:
        if not isinstance(item, _Map):
            raise self.wrong(where, key, "must be {path, content}")
        self.known(item, ("path", "content"))
        path, content = self.value(item, "path", str, None), self.value(item, "content", str, None)
        if not path or content is None:
            raise self.wrong(where, key, "needs path and content")
        return ToolUse("write", arguments={"path": path, "content": content})

    def _call(self, where: _Map, key: str, item: Any) -> ToolUse:
        if not isinstance(item, _Map):
            raise self.wrong(where, key, "must be {name, arguments}")
        self.known(item, ("name", "arguments"))
        name = self.value(item, "name", str, None)
        if not name:
            raise self.wrong(where, key, "needs the name of a tool")
        return ToolUse("call", name, dict(self.value(item, "arguments", _Map, {})))

    def _failure(self, where: _Map) -> Failure | None:
        fail = self.value(where, "fail", _Map, None)
        if fail is None:
            return None
        self.known(fail, ("status", "message", "retry_after", "disconnect", "times"))
        status = self.value(fail, "status", int, 500)
        if not 400 <= status <= 599:
            raise self.wrong(fail, "status", "must be an error status, 400 to 599")
        return Failure(
            status=status,
            message=self.value(fail, "message", str, "scripted failure"),
            retry_after=self.number(fail, "retry_after", None),
            disconnect=self.value(fail, "disconnect", bool, False),
            times=self.number(fail, "times", 1, least=1),
        )
