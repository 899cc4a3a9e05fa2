"""Every message that the troubleshooting page explains is one that the engine says."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
QUOTED = re.findall(r"^### `(.*)`$", (ROOT / "docs" / "troubleshooting.md").read_text(), re.MULTILINE)


def said() -> list[str]:
    """Every string of the source, with ``…`` for what is filled in."""
    found = []
    for path in sorted((ROOT / "src" / "benchflow").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
            elif isinstance(node, ast.JoinedStr):
                parts = (p.value if isinstance(p, ast.Constant) else "…" for p in node.values)
                found.append("".join(map(str, parts)))
    return found


SAID = said()


def test_there_are_messages_to_check():
    assert len(QUOTED) > 30 and len(set(QUOTED)) == len(QUOTED)


@pytest.mark.parametrize("message", QUOTED)
def test_a_message_on_the_page_is_said_by_the_engine(message):
    pattern = re.compile(".*?".join(re.escape(part) for part in message.split("…")), re.DOTALL)
    assert [text for text in SAID if pattern.search(text)], f"nothing says {message!r} any more"
