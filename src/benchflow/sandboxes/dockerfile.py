"""Read a Dockerfile into instructions, and expand words the way Docker does.

It names everything the builder at hand does not do.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from benchflow.contracts.errors import ImageBuildError

DOCKER_ADVICE = "use --sandbox docker for this task"
_COMMON = frozenset(
    ("FROM", "RUN", "COPY", "ADD", "ENV", "ARG", "WORKDIR", "USER", "SHELL", "ENTRYPOINT", "CMD",
     "EXPOSE", "LABEL", "VOLUME", "STOPSIGNAL", "MAINTAINER", "HEALTHCHECK")
)  # fmt: skip
_WITH_DOCUMENTS = ("RUN", "COPY", "ADD")
_FLAG = re.compile(r"--([a-z-]+)(?:=(\S*))?(?:\s+|$)")
_HEREDOC = re.compile(r"(?:^|\s)\d*<<(-?)\s?([\"']?)([A-Za-z_]\w*)\2(?=\s|$|[;|&>)])")
_ESCAPE = re.compile(r"\s*#\s*escape\s*=\s*([\\`])\s*$", re.IGNORECASE)
_DIRECTIVE = re.compile(r"\s*#\s*[A-Za-z]+\s*=")


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction; ``line`` counts from 1. Flags are taken off ``value``."""

    keyword: str
    value: str
    line: int
    flags: Mapping[str, str]
    last_line: int = 0

    @property
    def argv(self) -> list[str] | None:
        """The list of the exec form, or None for the shell form."""
        if not self.value.startswith("["):
            return None
        try:
            parsed = json.loads(self.value)
        except ValueError:
            return None
        is_list = isinstance(parsed, list) and all(isinstance(part, str) for part in parsed)
        return parsed if is_list else None

    @property
    def heredoc(self) -> bool:
        return self.keyword in _WITH_DOCUMENTS and _HEREDOC.search(self.value) is not None

    def __str__(self) -> str:
        return f"{self.keyword} {self.value}"


@dataclass(frozen=True, slots=True)
class Dockerfile:
    instructions: tuple[Instruction, ...]
    escape: str = "\\"
    lines: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Dialect:
    """What a builder does of the language. ``flags`` is None where it takes any."""

    builder: str
    advice: str | None
    keywords: frozenset[str] = _COMMON
    flags: Mapping[str, tuple[str, ...]] | None = None
    heredocs: bool = True
    stages: bool = True


LOCAL = Dialect(
    "the local builder",
    DOCKER_ADVICE,
    flags={"COPY": ("chown", "chmod", "link"), "ADD": ("chown", "chmod", "link"), "FROM": ("platform",)},
    heredocs=False,
    stages=False,
)


def parse(data: bytes, dialect: Dialect = LOCAL) -> Dockerfile:
    """Parse a whole Dockerfile. Raises ``ImageBuildError`` naming the line of anything that
    is malformed or that the builder does not do."""
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ImageBuildError(f"the Dockerfile is not UTF-8: {error.reason} at byte {error.start}") from error
    escape, lines = _escape_character(text), text.splitlines()
    found = list(_joined(lines, escape))
    _check_stages([(keyword, first) for keyword, _, first, _ in found], dialect)
    return Dockerfile(tuple(_instruction(*item, dialect) for item in found), escape, tuple(lines))


def _escape_character(text: str) -> str:
    for line in text.splitlines():
        if match := _ESCAPE.match(line):
            return match[1]
        if not _DIRECTIVE.match(line):
            break
    return "\\"


def _joined(lines: list[str], escape: str) -> Iterator[tuple[str, str, int, int]]:
    """``(keyword, value, first line, last line)`` of each instruction, its continued lines as
    one. Comments and empty lines, also those within, and the bodies of heredocs are passed over."""
    parts: list[str] = []
    waiting: list[tuple[str, str]] = []
    keyword, first, last = "", 0, 0
    for number, line in enumerate(lines, 1):
        if waiting and not parts:
            dash, word = waiting[0]
            if (line.lstrip("\t") if dash else line) == word:
                waiting.pop(0)
            continue
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        text, last = line.rstrip(), number
        if not parts:
            keyword, first = text.split(None, 1)[0].upper(), number
        if keyword in _WITH_DOCUMENTS:
            waiting += [(found[1], found[3]) for found in _HEREDOC.finditer(line)]
        parts.append(text.removesuffix(escape))
        if not text.endswith(escape):
            yield from _split("".join(parts), first, last)
            parts = []
    yield from _split("".join(parts), first, last)


def _split(text: str, first: int, last: int) -> Iterator[tuple[str, str, int, int]]:
    if text.strip():
        keyword, *rest = text.split(None, 1)
        yield keyword.upper(), "".join(rest).strip(), first, last


def _instruction(keyword: str, value: str, line: int, last: int, dialect: Dialect) -> Instruction:
    where, unsupported = f"Dockerfile line {line}: ", f"not supported by {dialect.builder}"
    if keyword not in dialect.keywords:
        raise ImageBuildError(f"{where}{keyword} is {unsupported}", fix=dialect.advice)
    if not dialect.heredocs and keyword in _WITH_DOCUMENTS and _HEREDOC.search(value):
        raise ImageBuildError(f"{where}{keyword} with a heredoc is {unsupported}", fix=dialect.advice)
    flags: dict[str, str] = {}
    if keyword in (*_WITH_DOCUMENTS, "FROM"):
        while match := _FLAG.match(value):
            if dialect.flags is not None and match[1] not in dialect.flags.get(keyword, ()):
                raise ImageBuildError(f"{where}{keyword} --{match[1]} is {unsupported}", fix=dialect.advice)
            flags[match[1]] = match[2] or ""
            value = value[match.end() :]
    if not value:
        raise ImageBuildError(f"{where}{keyword} has no arguments")
    return Instruction(keyword, value, line, flags, last)


def _check_stages(found: list[tuple[str, int]], dialect: Dialect) -> None:
    """``found`` are keywords with their lines."""
    stages = [line for keyword, line in found if keyword == "FROM"]
    if not stages:
        raise ImageBuildError("the Dockerfile has no FROM")
    if len(stages) > 1 and not dialect.stages:
        raise ImageBuildError(
            f"Dockerfile line {stages[1]}: a second FROM (multi-stage build) is not supported locally",
            fix=dialect.advice,
        )
    keyword, line = next(item for item in found if item[0] != "ARG")
    if keyword != "FROM":
        raise ImageBuildError(f"Dockerfile line {line}: {keyword} comes before FROM")


def words(text: str, values: Mapping[str, str], escape: str = "\\") -> list[str]:
    """Split at unquoted blanks, take off quotes, expand ``$NAME``, ``${NAME}``,
    ``${NAME:-default}`` and ``${NAME:+other}``. Raises ``ValueError`` for other forms."""
    return _Words(text, values, escape).split()


def expand(text: str, values: Mapping[str, str], escape: str = "\\") -> str:
    """Like ``words`` without splitting."""
    return _Words(text, values, escape).one()


class _Words:
    def __init__(self, text: str, values: Mapping[str, str], escape: str) -> None:
        self._text = text
        self._values = values
        self._escape = escape
        self._at = 0

    def split(self) -> list[str]:
        found: list[str] = []
        while True:
            while self._at < len(self._text) and self._text[self._at].isspace():
                self._at += 1
            if self._at >= len(self._text):
                return found
            found.append(self._word(str.isspace))

    def one(self) -> str:
        return self._word(lambda char: False)

    def _word(self, ends: Callable[[str], bool]) -> str:
        out: list[str] = []
        quote = ""
        while self._at < len(self._text):
            char = self._text[self._at]
            if not quote and ends(char):
                break
            self._at += 1
            if quote == "'":
                quote = "" if char == "'" else quote
                out.append("" if char == "'" else char)
            elif char == self._escape:
                out.append(self._escaped(quote))
            elif char == "$":
                out.append(self._variable())
            elif char == '"':
                quote = "" if quote else '"'
            elif char == "'" and not quote:
                quote = "'"
            else:
                out.append(char)
        if quote:
            raise ValueError(f"a quote {quote} is not closed")
        return "".join(out)

    def _escaped(self, quote: str) -> str:
        if self._at >= len(self._text):
            return self._escape
        char = self._text[self._at]
        self._at += 1
        if quote and char not in ('"', "$", self._escape):
            return self._escape + char
        return char

    def _variable(self) -> str:
        if not self._text.startswith("{", self._at):
            match = re.compile(r"[A-Za-z_]\w*|\d").match(self._text, self._at)
            if match is None:
                return "$"
            self._at = match.end()
            return self._values.get(match[0], "")
        end = self._closing(self._at)
        body = self._text[self._at + 1 : end]
        self._at = end + 1
        match = re.fullmatch(r"([A-Za-z_]\w*)(?:(:?[-+])(.*))?", body, re.DOTALL)
        if match is None:
            raise ValueError(f"the expansion ${{{body}}} is not supported by the local builder")
        name, operator, word = match.groups()
        value = self._values.get(name)
        if not operator:
            return value or ""
        is_set = bool(value) if operator.startswith(":") else value is not None
        if operator.endswith("-"):
            return value or "" if is_set else expand(word, self._values, self._escape)
        return expand(word, self._values, self._escape) if is_set else ""

    def _closing(self, start: int) -> int:
        depth = 0
        for index in range(start, len(self._text)):
            depth += {"{": 1, "}": -1}.get(self._text[index], 0)
            if depth == 0:
                return index
        raise ValueError("a ${ is not closed")


def pairs(value: str, values: Mapping[str, str], escape: str = "\\") -> list[tuple[str, str]]:
    """The assignments of ENV or LABEL: ``A=1 B="2 3"``, or the old form ``A 1 2 3``."""
    first = value.split(None, 1)
    if "=" not in first[0]:
        if len(first) < 2:
            raise ValueError(f"{first[0]!r} has no value")
        return [(first[0], expand(first[1], values, escape))]
    found: list[tuple[str, str]] = []
    for word in words(value, values, escape):
        key, equals, text = word.partition("=")
        if not equals or not key:
            raise ValueError(f"{word!r} is not KEY=VALUE")
        found.append((key, text))
    return found
