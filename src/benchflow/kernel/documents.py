# pyright: basic
# PyYAML's nodes have no types.
"""What a user wrote in YAML, with the line of each key, and what is wrong with it in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml

Key = tuple[str | int, ...]
"""The way to a value from the top: keys of mappings, indices of lists."""

_LONGEST = 80
"""Characters of a wrong value that are worth repeating."""
# libyaml's loader is ten times faster; PyYAML can be built without it.
_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class YamlProblem(ValueError):
    """``line`` counts from 1. ``key`` is set when the text is YAML, but repeats that key."""

    def __init__(self, message: str, line: int = 1, key: str | None = None) -> None:
        super().__init__(message)
        self.message, self.line, self.key = message, line, key


def parse_yaml(text: str) -> tuple[Any, dict[Key, int]]:
    """The document (None for an empty one), and the line of each key and list item in it.
    Raises ``YamlProblem`` for what is no YAML, and for a key that a mapping holds twice."""
    lines: dict[Key, int] = {}
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return None, {}
        _note_lines(node, (), lines, set())
        return loader.construct_document(node), lines
    except yaml.MarkedYAMLError as error:
        mark: Any = error.problem_mark or error.context_mark
        column = f" (column {mark.column + 1})" if mark else ""
        line = min(mark.line, len(text.splitlines()) - 1) if mark else 0  # libyaml counts one past the end
        raise YamlProblem(f"{error.problem}{column}", line + 1) from error
    except yaml.reader.ReaderError as error:
        message = f"the character U+{error.character:04X} is not allowed in YAML"
        raise YamlProblem(message, 1 + text.count("\n", 0, error.position)) from error
    except YamlProblem:
        raise
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise YamlProblem(str(error).splitlines()[0]) from error


def _note_lines(node: yaml.Node, at: Key, lines: dict[Key, int], seen: set[int]) -> None:
    if id(node) in seen:
        return
    seen.add(id(node))
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            lines[(*at, index)] = item.start_mark.line + 1
            _note_lines(item, (*at, index), lines, seen)
    if not isinstance(node, yaml.MappingNode):
        return
    here: set[str] = set()
    for key_node, value in node.value:
        name, line = str(key_node.value), key_node.start_mark.line + 1
        if name in here and name != "<<":
            raise YamlProblem("the key appears twice", line, name)
        here.add(name)
        lines[(*at, name)] = line
        _note_lines(value, (*at, name), lines, seen)


def line_of(lines: Mapping[Key, int], key: Key) -> int | None:
    """The line of ``key``, or of the nearest enclosing key that has one."""
    while key:
        if key in lines:
            return lines[key]
        key = key[:-1]
    return None


def reason(error: Mapping[str, Any]) -> str:
    """One of pydantic's ``errors()`` in words, with the value that was given, cut short."""
    said = str(error["msg"]).removeprefix("Value error, ")
    said = said[:1].lower() + said[1:]
    if not error["loc"] or isinstance(error["input"], Mapping):
        return said
    given = repr(error["input"])
    return f"{said}, not {given if len(given) <= _LONGEST else given[:_LONGEST] + '…'}"
