"""``index.sqlite``: a cache of what lists and metrics need, rebuilt whenever a job's files differ.

The files are the truth. A job is read again when the size or time of its ``results*.jsonl``
or ``job.json`` changed; a folder that cannot be written to is read without a cache.
"""

from __future__ import annotations

import os
import sqlite3
from collections import Counter
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import orjson

from benchflow.contracts.errors import UsageError
from benchflow.jobs.load import current_records, find_jobs
from benchflow.jobs.metrics import Row, mean, read_row
from benchflow.jobs.store import read_job, result_files
from benchflow.kernel.storage import dumps

INDEX_NAME = "index.sqlite"
VERSION = 2

_SCHEMA = """
CREATE TABLE IF NOT EXISTS jobs (
    path TEXT PRIMARY KEY, stamp TEXT, name TEXT, agent TEXT, model TEXT, sandbox TEXT,
    created_at TEXT, trial INTEGER, planned INTEGER, finished INTEGER, passed INTEGER,
    failed INTEGER, errored INTEGER, cancelled INTEGER, mean_reward REAL, columns BLOB
);
"""
"""``columns`` is JSON: one list for each field of ``Row``, which loads faster than rows of a table."""


@dataclass(frozen=True, slots=True)
class Listed:
    """One line of ``bench eval list``. ``finished`` counts rollouts with a result."""

    path: str
    name: str
    agent: str | None
    model: str | None
    sandbox: str | None
    created_at: str | None
    trial: int
    planned: int | None
    finished: int
    passed: int
    failed: int
    errored: int
    cancelled: int
    mean_reward: float | None


class Index:
    """Opens, refreshes and answers. Use as a context manager."""

    def __init__(self, root: Path) -> None:
        if not root.is_dir():
            raise UsageError(f"no such folder: {root}", fix="give a folder that `bench run` wrote to")
        self._root = root
        self._folders = list(find_jobs(root))
        # A folder that holds no job is somebody else's: nothing is left in it.
        self._db = _open(root) if self._folders else _in_memory()
        try:
            self._refresh()
        except sqlite3.OperationalError:  # read-only, locked, or no room: answer without a cache
            self._db.close()
            self._db = _in_memory()
            self._refresh()

    def __enter__(self) -> Index:
        return self

    def __exit__(self, *exc: object) -> None:
        self._db.close()

    def jobs(self) -> list[Listed]:
        listed = ", ".join(Listed.__slots__)
        return [Listed(*row) for row in self._db.execute(f"SELECT {listed} FROM jobs ORDER BY path")]

    def rows(self) -> list[Row]:
        """Every rollout under the root."""
        found: list[Row] = []
        for (columns,) in self._db.execute("SELECT columns FROM jobs ORDER BY rowid"):
            found.extend(map(partial(tuple.__new__, Row), zip(*orjson.loads(columns), strict=True)))
        return found

    def _refresh(self) -> None:
        known = dict(self._db.execute("SELECT path, stamp FROM jobs"))
        with self._db:
            for folder in self._folders:
                path = os.fsencode(os.path.relpath(folder, self._root)).decode("utf-8", "replace")
                stamp = _stamp(folder)
                if known.pop(path, None) != stamp:
                    self._read(folder, path, stamp)
            for path in known:
                self._forget(path)

    def _read(self, folder: Path, path: str, stamp: str) -> None:
        self._forget(path)
        try:
            job = read_job(folder)
        except UsageError:
            job = {}
        records = current_records(folder)
        first = records[0] if records else {}
        if len(records) < len(job.get("rollouts", ())):
            stamp = ""  # a rollout's own file may complete it, which no stamp of the job's files shows
        rows = list(map(read_row, records))
        kinds = Counter(row.kind for row in rows)
        self._db.execute(
            f"INSERT INTO jobs VALUES ({', '.join('?' * 16)})",
            (
                path,
                stamp,
                job.get("job_name") or folder.name,
                job.get("agent") or first.get("agent"),
                job.get("model") or first.get("model"),
                job.get("sandbox") or (first.get("sandbox") or {}).get("provider"),
                job.get("created_at") or first.get("started_at"),
                job.get("trial") or 1,
                len(job["rollouts"]) if "rollouts" in job else None,
                len(rows),
                kinds["passed"],
                kinds["failed"],
                kinds["errored"] + kinds["verifier_errored"] + kinds["unscored"],
                kinds["cancelled"],
                mean(row.reward for row in rows if row.reward is not None and not row.masked),
                dumps(list(zip(*rows, strict=True))),
            ),
        )

    def _forget(self, path: str) -> None:
        self._db.execute("DELETE FROM jobs WHERE path = ?", (path,))


def _open(root: Path) -> sqlite3.Connection:
    """The cache in ``root``; in memory when that cannot be written or is not ours."""
    path = root / INDEX_NAME
    try:
        db = sqlite3.connect(path, timeout=10)
        _prepare(db)
    except sqlite3.DatabaseError as error:
        if not _replaceable(error, path):
            return _in_memory()
        path.unlink(missing_ok=True)
        db = sqlite3.connect(path, timeout=10)
        _prepare(db)
    return db


def _in_memory() -> sqlite3.Connection:
    db = sqlite3.connect(":memory:")
    _prepare(db)
    return db


def _replaceable(error: sqlite3.DatabaseError, path: Path) -> bool:
    """A damaged cache is made again; one that is locked or read-only is left alone."""
    return not isinstance(error, sqlite3.OperationalError) and os.access(path.parent, os.W_OK)


def _prepare(db: sqlite3.Connection) -> None:
    with closing(db.execute("PRAGMA user_version")) as cursor:
        version = cursor.fetchone()[0]
    if version != VERSION:
        db.executescript("DROP TABLE IF EXISTS jobs; DROP TABLE IF EXISTS rollouts;" + _SCHEMA)
        db.execute(f"PRAGMA user_version = {VERSION}")
        db.commit()


def _stamp(folder: Path) -> str:
    parts: list[str] = []
    for path in [*result_files(folder), folder / "job.json"]:
        try:
            found = path.stat()
        except FileNotFoundError:
            continue
        parts.append(f"{path.name}:{found.st_size}:{found.st_mtime_ns}")
    return ",".join(parts)
