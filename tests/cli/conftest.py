"""Running ``bench`` as a user does: a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

Bench = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def bench(tmp_path) -> Bench:
    """``bench("run", …)`` in an empty working directory; returns the finished process."""

    def call(*args: object, cwd: Path | None = None, env: dict[str, str] | None = None):
        return subprocess.run(
            [sys.executable, "-m", "benchflow.cli.main", *map(str, args)],
            cwd=cwd or tmp_path,
            env={**os.environ, **(env or {})},
            capture_output=True,
            text=True,
            timeout=120,
        )

    return call


@pytest.fixture
def examples() -> Path:
    return ROOT / "examples" / "tasks"
