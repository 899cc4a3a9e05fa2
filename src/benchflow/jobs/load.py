"""Reading jobs back: ``bf.load_job(path)``."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchflow.contracts.errors import UsageError
from benchflow.contracts.records import Result
from benchflow.jobs.store import iter_records, latest, read_job, read_result, scan_results

__all__ = ["Job", "find_jobs", "load_job"]


@dataclass(frozen=True, slots=True)
class Job:
    """The rollouts under a path, each with its ``rollout_path`` set, in order of path.

    ``folders`` are the jobs they came from; ``config`` is the first one's ``job.json``.
    """

    path: Path
    folders: tuple[Path, ...]
    rollouts: list[Result]
    config: dict[str, Any] = field(default_factory=dict[str, Any], repr=False)

    @property
    def rewards(self) -> list[float | None]:
        """One per rollout, in the same order; None where there is no score."""
        return [result.reward for result in self.rollouts]


def load_job(path: str | os.PathLike[str]) -> Job:
    """Load a job, every job under a folder, or a single rollout. A rollout without a whole
    ``result.json`` is unfinished and left out. Raises ``UsageError`` when there is nothing."""
    root = Path(path)
    if not root.is_dir():
        raise UsageError(f"no such folder: {root}", fix="give a job, a jobs folder or a rollout folder")
    single = None if is_job(root) else read_result(root)
    if single is not None:
        return Job(root, (root.parent,), [single], _config(root.parent))
    folders = tuple(find_jobs(root))
    rollouts = [result for folder in folders for result in load_rollouts(folder)]
    if not folders:
        rollouts = load_rollouts(root)
        folders = (root,) if rollouts else ()
    if not folders:
        raise UsageError(f"no job under {root}", fix="give a folder that `bench run` wrote to")
    return Job(root, folders, rollouts, _config(folders[0]))


def load_rollouts(folder: Path) -> list[Result]:
    """The current result of each rollout of one job, in order of name."""
    results = [Result.model_validate(record) for record in current_records(folder)]
    for result in results:
        result.rollout_path = str(folder / result.rollout_name)
    return results


def current_records(folder: Path) -> list[dict[str, Any]]:
    """The fields of those results. The rollouts' own files complete what a crash kept out of
    ``results.jsonl``."""
    found = latest(iter_records(folder))
    for record in scan_results(folder, skip=found.keys()):
        found[record["rollout_name"]] = record
    return [found[name] for name in sorted(found)]


def find_jobs(root: Path) -> Iterator[Path]:
    """Job folders at or under ``root``, sorted; what lies inside a job is not entered."""
    if is_job(root):
        yield root
        return
    with os.scandir(root) as entries:
        names = sorted(e.name for e in entries if e.is_dir(follow_symlinks=False))
    for name in names:
        if not name.startswith("."):
            yield from find_jobs(root / name)


def is_job(folder: Path) -> bool:
    """A folder with ``job.json`` or ``results.jsonl``. The copy of the latest summary that a
    jobs folder holds does not make it one."""
    return any((folder / name).is_file() for name in ("job.json", "results.jsonl"))


def _config(folder: Path) -> dict[str, Any]:
    return read_job(folder) if (folder / "job.json").is_file() else {}
