"""Finding rollouts under a path: a jobs folder, an agent's folder, a job, or one rollout.

A rollout is a folder that holds ``result.json`` or ``config.json``, is named like one, or
is named by its job: in the plan of ``job.json`` or in a line of ``results.jsonl``. One that
has no readable ``result.json`` is unfinished, even when it never got a folder; it is found
all the same, because its group must know of it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import orjson

from benchflow.contracts.errors import UsageError
from benchflow.jobs.load import is_job
from benchflow.jobs.store import result_files
from benchflow.kernel.storage import read_lines

ROLLOUT_NAME = re.compile(r".+__[0-9a-f]{8}$")
"""``<task>__<8 hex>``."""


@dataclass(frozen=True, slots=True)
class Found:
    """A rollout's folder and the folder of its job. ``path`` starts as the user typed it."""

    path: str
    job_dir: str

    @property
    def name(self) -> str:
        return os.path.basename(self.path)


def find_rollouts(path: str | Path) -> Iterator[Found]:
    """Yield every rollout under ``path`` once, sorted by folder at each level. Branch
    children lie inside a rollout and are found only when ``path`` points at them."""
    root = check_path(path)
    if is_rollout(root):
        yield Found(root, os.path.dirname(os.path.abspath(root)))
        return
    yield from _walk(root)


def check_path(path: str | Path) -> str:
    """The path as a string; ``UsageError`` when it is no folder."""
    root = os.fspath(path)
    if not os.path.isdir(root):
        what = "is a file, not a folder" if os.path.exists(root) else "does not exist"
        raise UsageError(f"{root} {what}", fix="give a job, a jobs folder or a rollout folder")
    return root


def read_dict(path: str) -> dict[str, Any] | None:
    """The JSON object in a file; None when there is none that can be read."""
    try:
        with open(path, "rb", buffering=0) as handle:
            record = orjson.loads(handle.read())
    except (OSError, orjson.JSONDecodeError):
        return None
    return record if isinstance(record, dict) else None


def _plan(job_dir: str) -> dict[str, dict[str, Any]]:
    """Planned rollouts by name, in the field names of ``config.json``."""
    path = os.path.join(job_dir, "job.json")
    try:
        return _read_plan(path, os.stat(path).st_mtime_ns)
    except OSError:
        return {}


@lru_cache(maxsize=8)
def _read_plan(path: str, _modified: int) -> dict[str, dict[str, Any]]:
    job = read_dict(path) or {}
    listed = job.get("rollouts")
    shared = {"agent": job.get("agent"), "model": job.get("model"), "job": job.get("job_name")}
    return {
        item["name"]: {**item, "task_name": item.get("task"), **shared}
        for item in (listed if isinstance(listed, list) else ())
        if isinstance(item, dict) and isinstance(item.get("name"), str)
    }


def planned(found: Found) -> dict[str, Any]:
    """What the job planned for this rollout; empty when it planned nothing."""
    return _plan(found.job_dir).get(found.name, {})


def line_rollout(line: object) -> str | None:
    """The rollout named by one line of ``results.jsonl``."""
    if not isinstance(line, dict):
        return None
    name = line.get("rollout_name") or line.get("rollout")
    return name if isinstance(name, str) and name and "/" not in name else None


def is_rollout(folder: str | Path) -> bool:
    """Does the folder hold a rollout's own records?"""
    if is_job(Path(folder)):
        return False
    names = ("result.json", "config.json")
    return any(os.path.isfile(os.path.join(folder, name)) for name in names)


def _walk(folder: str) -> Iterator[Found]:
    present: set[str] = set()
    results = False
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith("results."):
                results = True
            elif not entry.name.startswith(".") and entry.is_dir(follow_symlinks=False):
                present.add(entry.name)
    listed = set(_plan(folder))
    if results and not listed:
        listed.update(_named_in_results(folder))
    for name in sorted(present | listed):
        child = os.path.join(folder, name)
        if name in listed or _named_like_one(child) or is_rollout(child):
            yield Found(child, folder)
        else:
            yield from _walk(child)


def _named_like_one(folder: str) -> bool:
    """It died before its first record. A job may be named so too."""
    return ROLLOUT_NAME.match(os.path.basename(folder)) is not None and not is_job(Path(folder))


def _named_in_results(job_dir: str) -> Iterator[str]:
    for path in result_files(Path(job_dir)):
        for line in read_lines(path):
            name = line_rollout(line)
            if name is not None:
                yield name
