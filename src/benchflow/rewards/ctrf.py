"""Reading a CTRF test report: only how many tests it says were collected."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

_LIMIT = 64 * 1024 * 1024


def collected_tests(folder: Path) -> int | None:
    """Tests in the CTRF reports of a verifier's folder; ``None`` when no report can be read."""
    counts = [count for path in sorted(folder.glob("*ctrf*.json")) if (count := _count(path)) is not None]
    return sum(counts) if counts else None


def _count(path: Path) -> int | None:
    try:
        if path.is_symlink() or path.stat().st_size > _LIMIT:
            return None
        results: Any = json.loads(path.read_bytes())["results"]
        tests, summary = results.get("tests"), results.get("summary") or {}
        if isinstance(tests, list):
            return len(tests)
        return int(summary["tests"])
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


_MISSING = re.compile(
    rb"^[^\n]*: (?:line )?\d+: (?:[\w./-]*/)?(?:pytest|py\.test|uvx?): (?:command )?not found$"
    rb"|^[^\n]*: No module named '?pytest'?$",
    re.MULTILINE,
)
_SUMMARY = re.compile(rb"\d+ (?:passed|failed|skipped|deselected|errors?)\b[^\n]* in [\d.]+s")


def missing_runner(output: bytes) -> str | None:
    """The line in which the shell, or python, says that the test runner is not installed;
    None when there is none, or when the runner reported after all."""
    found = _MISSING.search(output)
    if found is None or _SUMMARY.search(output):
        return None
    return found[0].decode("utf-8", "replace")[-200:]
