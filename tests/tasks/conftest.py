from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from textwrap import dedent

import pytest

Write = Callable[..., Path]


def put(root: Path, files: dict[str, str | None]) -> None:
    for name, text in files.items():
        if text is not None:
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(dedent(text), encoding="utf-8")


@pytest.fixture
def native(tmp_path: Path) -> Write:
    """Writes a native package: ``native(frontmatter, body, **{file: text or None to leave out})``."""

    def write(frontmatter: str = "", body: str = "Do it.\n", *, at: str = "pkg", **files: str | None) -> Path:
        root = tmp_path / at
        put(
            root,
            {
                "task.md": f"---\n{dedent(frontmatter)}---\n{body}",
                "environment/Dockerfile": "FROM debian:12-slim\nWORKDIR /app\n",
                "verifier/test.sh": "#!/bin/sh\necho 1 > /logs/verifier/reward.txt\n",
                "oracle/solve.sh": "#!/bin/sh\n",
            }
            | files,
        )
        return root

    return write


@pytest.fixture
def split(tmp_path: Path) -> Write:
    """Writes a split package: ``split(toml, **{file: text or None to leave out})``."""

    def write(toml: str = "", *, at: str = "pkg", **files: str | None) -> Path:
        root = tmp_path / at
        put(
            root,
            {
                "task.toml": dedent(toml),
                "instruction.md": "Do it.\n",
                "environment/Dockerfile": "FROM debian:12-slim\nWORKDIR /app\n",
                "tests/test.sh": "#!/bin/sh\necho 1 > /logs/verifier/reward.txt\n",
                "solution/solve.sh": "#!/bin/sh\n",
            }
            | files,
        )
        return root

    return write
