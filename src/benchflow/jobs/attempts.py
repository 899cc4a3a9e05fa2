"""Earlier attempts of a rollout, kept as evidence inside the folder of the one that counts."""

from __future__ import annotations

from pathlib import Path

FOLDER = "attempts"


def set_aside(rollout: Path) -> int:
    """Move what an earlier attempt left to ``<rollout>/attempts/N`` and return N; 0 when
    there was nothing. Killed half-way, it is finished by the next call."""
    staging = rollout.with_name(f".{rollout.name}.attempt")
    if not staging.exists():
        if not _has_content(rollout):
            return _count(rollout)
        rollout.rename(staging)
    kept = rollout / FOLDER
    older = staging / FOLDER
    if older.exists():
        rollout.mkdir(exist_ok=True)
        older.rename(kept)
    kept.mkdir(parents=True, exist_ok=True)
    number = _count(rollout) + 1
    staging.rename(kept / str(number))
    return number


def _has_content(rollout: Path) -> bool:
    return rollout.is_dir() and any(entry.name != FOLDER for entry in rollout.iterdir())


def _count(rollout: Path) -> int:
    kept = rollout / FOLDER
    return sum(1 for _ in kept.iterdir()) if kept.is_dir() else 0
