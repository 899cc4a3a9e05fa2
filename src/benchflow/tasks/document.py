"""``task.md`` and ``verifier.md``: YAML frontmatter between ``---`` lines, then markdown."""

from __future__ import annotations

import re
from pathlib import Path

from benchflow.kernel.documents import Key, YamlProblem, parse_yaml
from benchflow.tasks.problems import ConfigSource, FileProblem, read_text

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
    data, places = _frontmatter("".join(lines[1:end]), file)
    return ConfigSource(file, data, places, strict=True), "".join(lines[end + 1 :])


def _frontmatter(text: str, file: str) -> tuple[dict[str, object], dict[Key, int]]:
    """The mapping below the first line, and the line in the document of each key."""
    try:
        data, lines = parse_yaml(text)
    except YamlProblem as error:
        message = error.message if error.key else f"the frontmatter is not YAML: {error.message}"
        raise FileProblem(message, file, error.line + 1, error.key) from error
    if data is not None and not isinstance(data, dict):
        raise FileProblem("the frontmatter is not a mapping", file, 2)
    return data or {}, {key: line + 1 for key, line in lines.items()}


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
