"""From what a user types (a task, a folder of tasks, a glob) to task folders."""

from __future__ import annotations

import glob
from collections.abc import Iterable
from pathlib import Path

from benchflow.contracts.errors import TaskError, UsageError
from benchflow.contracts.task import Task
from benchflow.tasks.load import load_task
from benchflow.tasks.package import is_task


def find_tasks(patterns: Iterable[str | Path]) -> list[Path]:
    """Task folders, in the order given and sorted within a folder or glob, each once.

    A folder that is a task stands for itself, any other folder for the tasks directly in
    it. Raises ``UsageError`` saying what was looked for when a pattern gives nothing, and
    for a name that is not UTF-8.
    """
    found: dict[Path, Path] = {}
    for pattern in patterns:
        for folder in _expand(str(pattern)):
            found.setdefault(folder.resolve(), folder)
    for path in map(str, found):
        if path.encode("utf-8", "replace").decode() != path:
            raise UsageError(
                f"the folder name {path!r} is not UTF-8, so no record can hold it", fix="rename it"
            )
    return list(found.values())


def load_tasks(patterns: Iterable[str | Path]) -> list[Task]:
    """Read every task found; raises one ``TaskError`` that names each broken one."""
    folders = find_tasks(patterns)
    tasks: list[Task] = []
    broken: list[str] = []
    for folder in folders:
        try:
            tasks.append(load_task(folder))
        except TaskError as error:
            broken.append(str(error))
    if broken:
        head = "" if len(broken) == 1 else f"{len(broken)} of {len(folders)} tasks are broken:\n  "
        raise TaskError(head + "\n  ".join(broken))
    return tasks


def _expand(pattern: str) -> list[Path]:
    path = Path(pattern)
    if path.exists():
        tasks = _matched(path)
        where = "looked for task.md or task.toml in it and in the folders directly in it"
        nothing = f"no task in {pattern}: {where}"
    elif glob.has_magic(pattern):
        matches = [Path(match) for match in sorted(glob.glob(pattern, recursive=True))]
        tasks = [folder for match in matches for folder in _matched(match)]
        nothing = f"nothing matches {pattern!r} that has a task.md or task.toml"
    else:
        raise UsageError(f"no such task or folder: {pattern}")
    if not tasks:
        raise UsageError(nothing)
    return tasks


def _matched(path: Path) -> list[Path]:
    if path.is_file():
        return [path.parent] if path.name in ("task.md", "task.toml") else []
    if is_task(path):
        return [path]
    children = sorted(path.iterdir(), key=lambda child: child.name)
    return [child for child in children if not child.name.startswith(".") and is_task(child)]
