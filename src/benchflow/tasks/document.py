"""``task.md`` and ``verifier.md``: YAML frontmatter between ``---`` lines, then markdown."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from benchflow.tasks.problems import ConfigSource, FileProblem, Key, read_text

_HEADING = re.compile(r"^##[ \t]+(prompt|role:.*|scene:.*|user-persona)[ \t]*$", re.IGNORECASE)
_LINE = re.compile(r"[^\n]*\n|[^\n]+")
_FENCE = re.compile(r"^ {0,3}(```+|~~~+)")


def read_document(path: Path, file: str) -> tuple[ConfigSource, str]:
    """Split a document into its configuration and its body. Raises ``FileProblem``."""
    text = read_text(path, file)
    lines = _LINE.findall(text)
    if not lines or lines[0].rstrip() != "---":
        raise FileProblem("must start with a `---` line and YAML frontmatter", file, 1)
    end = next((i for i, line in enumerate(lines[1:], 1) if line.rstrip() == "---"), None)
    if end is None:
        raise FileProblem("the frontmatter is not closed by a `---` line", file, 1)
    data, places = parse_yaml("".join(lines[1:end]), file, first_line=2)
    return ConfigSource(file, data, places, strict=True), "".join(lines[end + 1 :])


# libyaml's loader is ten times faster; PyYAML can be built without it.
_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def parse_yaml(text: str, file: str, *, first_line: int) -> tuple[dict[str, object], dict[Key, int]]:
    """A YAML mapping and the line of each key. Duplicate keys are refused."""
    places: dict[Key, int] = {}
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return {}, {}
        if not isinstance(node, yaml.MappingNode):
            raise FileProblem("the frontmatter is not a mapping", file, first_line)
        _note_lines(node, (), places, file, first_line, set())
        return loader.construct_document(node), places
    except yaml.MarkedYAMLError as error:
        raise _yaml_problem(error, file, first_line) from error
    except yaml.reader.ReaderError as error:
        line = first_line + text.count("\n", 0, error.position)
        message = f"the character U+{error.character:04X} is not allowed in YAML"
        raise FileProblem(message, file, line) from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        message = str(error).splitlines()[0]
        raise FileProblem(f"the frontmatter is not YAML: {message}", file, first_line) from error


def base_prompt(body: str, file: str, *, first_line: int = 1) -> str:
    """The prompt in a ``task.md`` body: its ``## prompt`` section, or all of it.

    The other reserved sections (role, scene, user-persona) need several prompts and
    are refused; headings inside a code fence are text.
    """
    sections: dict[str, list[str]] = {"": []}
    current, fence = "", ""
    for number, line in enumerate(_LINE.findall(body), first_line):
        mark = _FENCE.match(line)
        if mark and not fence:
            fence = mark[1]
        elif mark and mark[1].startswith(fence):
            fence = ""
        heading = None if fence else _HEADING.match(line.rstrip("\r\n"))
        if heading is None:
            sections[current].append(line)
            continue
        current = heading[1].strip().lower()
        if current != "prompt":
            message = f"the section `## {heading[1]}` is not run yet; one prompt per task is"
            raise FileProblem(message, file, number)
        if current in sections:
            raise FileProblem("the section `## prompt` appears twice", file, number)
        sections[current] = []
    return "".join(sections.get("prompt", sections[""])).strip("\r\n")


def _note_lines(
    node: yaml.Node, at: Key, places: dict[Key, int], file: str, first_line: int, seen: set[int]
) -> None:
    if id(node) in seen:
        return
    seen.add(id(node))
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            places[(*at, index)] = item.start_mark.line + first_line
            _note_lines(item, (*at, index), places, file, first_line, seen)
    if not isinstance(node, yaml.MappingNode):
        return
    here: set[str] = set()
    for key_node, value in node.value:
        name, line = str(key_node.value), key_node.start_mark.line + first_line
        if name in here and name != "<<":
            raise FileProblem("the key appears twice", file, line, name)
        here.add(name)
        places[(*at, name)] = line
        _note_lines(value, (*at, name), places, file, first_line, seen)


def _yaml_problem(error: yaml.MarkedYAMLError, file: str, first_line: int) -> FileProblem:
    mark: Any = error.problem_mark or error.context_mark
    place, line = (f" (column {mark.column + 1})", mark.line + first_line) if mark else ("", first_line)
    return FileProblem(f"the frontmatter is not YAML: {error.problem}{place}", file, line)
