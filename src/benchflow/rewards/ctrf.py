"""Reading a CTRF test report: only how many tests it says were collected."""

from __future__ import annotations

import json
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
