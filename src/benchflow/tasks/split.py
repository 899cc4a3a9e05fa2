"""``task.toml`` of the split layout."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from benchflow.kernel.documents import Key
from benchflow.tasks.problems import ConfigSource, FileProblem, read_text

_TABLE = re.compile(r"^\s*(\[\[?)\s*([^\[\]]+?)\s*\]\]?\s*(?:#.*)?\r?$")
_PAIR = re.compile(r"""^\s*((?:[\w-]+|"[^"]*"|'[^']*')(?:\s*\.\s*(?:[\w-]+|"[^"]*"|'[^']*'))*)\s*=(.*)$""")
_PART = re.compile(r"""[\w-]+|"[^"]*"|'[^']*'""")
_WHERE = re.compile(r"\(at line (\d+), column (\d+)\)")


def read_toml(path: Path, file: str) -> ConfigSource:
    """Parse ``task.toml``; unknown keys will be warnings. Raises ``FileProblem``."""
    text = read_text(path, file)
    try:
        data = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        where = _WHERE.search(str(error))
        line = int(where[1]) if where else None
        raise FileProblem(f"not TOML: {error}", file, line) from error
    return ConfigSource(file, data, toml_lines(text), strict=False)


def toml_lines(text: str) -> dict[Key, int]:
    """Line of each table and key of a document that ``tomllib`` accepted.

    Inline tables count as their own key's line; text inside multi-line strings is skipped.
    """
    lines: dict[Key, int] = {}
    table: Key = ()
    counts: dict[Key, int] = {}
    closing = ""
    for number, line in enumerate(text.split("\n"), 1):
        if closing:
            closing = "" if closing in line else closing
            continue
        if header := _TABLE.match(line):
            table = _parts(header[2])
            if header[1] == "[[":
                lines.setdefault(table, number)
                counts[table] = counts.get(table, -1) + 1
                table = (*table, counts[table])
            lines.setdefault(table, number)
        elif pair := _PAIR.match(line):
            lines.setdefault((*table, *_parts(pair[1])), number)
            closing = _opens_multiline(pair[2])
    return lines


def _parts(dotted: str) -> Key:
    return tuple(part.strip("\"'") for part in _PART.findall(dotted))


def _opens_multiline(value: str) -> str:
    for quotes in ('"""', "'''"):
        if value.strip().startswith(quotes) and value.count(quotes) % 2:
            return quotes
    return ""
