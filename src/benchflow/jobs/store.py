"""The files of one job. Whatever is interrupted, what they say is true.

job.json        what was asked, resolved; versions, host facts, the plan; secrets by name
results.jsonl   one line per finished rollout, append-only
summary.json    aggregate, replaced as rollouts finish
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import Any

import orjson

from benchflow.contracts.errors import UsageError
from benchflow.contracts.records import RESULT_VERSION, Result, Summary, check_version
from benchflow.jobs.plan import Plan, PlannedJob, PlannedRollout
from benchflow.kernel.clock import utc_now
from benchflow.kernel.storage import LineWriter, Redactor, read_json, write_bytes, write_json

JOB_VERSION = 1
QUARANTINE = "results.cut.jsonl"


class JobStore:
    """Writes one job folder; the caller holds its lock. Only a rollout's own ``result.json``
    is synced to disk: everything here can be made again from those."""

    def __init__(self, folder: Path, redact: Redactor) -> None:
        self.folder = folder
        self._redact = redact
        self._lines = LineWriter(folder / "results.jsonl", redact)

    def write_job(self, record: dict[str, Any]) -> None:
        write_json(self.folder / "job.json", record, self._redact, sync=False)

    def append(self, result: Result) -> None:
        """One line, in one write, for a rollout whose ``result.json`` is already there."""
        self._lines.append(result.model_dump())

    def write_summary(self, summary: Summary) -> None:
        write_json(self.folder / "summary.json", summary.model_dump(), self._redact, sync=False)

    def repair(self) -> list[str]:
        """Make ``results.jsonl`` whole after a crash: broken lines go to ``results.cut.jsonl``
        and results that were written but not yet listed are listed. Returns what was done."""
        said: list[str] = []
        path = self.folder / "results.jsonl"
        if path.exists():
            good, bad = _split_lines(path.read_bytes())
            if bad:
                with (self.folder / QUARANTINE).open("ab") as kept:
                    kept.writelines(line + b"\n" for line in bad)
                write_bytes(path, b"".join(line + b"\n" for line in good))
                said.append(f"{len(bad)} cut line(s) of results.jsonl moved to {QUARANTINE}")
        listed = {(r["rollout_name"], r.get("finished_at")) for r in iter_records(self.folder)}
        unlisted = [
            record
            for record in scan_results(self.folder)
            if (record["rollout_name"], record.get("finished_at")) not in listed
        ]
        for record in sorted(unlisted, key=lambda record: record.get("finished_at") or ""):
            self._lines.append(record)
        if unlisted:
            said.append(f"{len(unlisted)} result(s) were written but not listed")
        return said

    def close(self) -> None:
        self._lines.close()


def job_record(
    plan: Plan, job: PlannedJob, *, probe: dict[str, Any] | None, created_at: str | None = None
) -> dict[str, Any]:
    """The content of ``job.json``."""
    return {
        "schema_version": JOB_VERSION,
        "job_name": job.folder.name,
        "sweep": plan.sweep,
        "trial": job.trial,
        "trials": plan.config.trials,
        "created_at": created_at or utc_now(),
        "agent": plan.config.agent,
        "model": plan.config.model,
        "sandbox": plan.settings["sandbox"],
        "settings": plan.settings,
        "config": plan.config.public(),
        "endpoint": probe,
        "versions": {**_versions(), "agent": plan.settings.get("agent_version")},
        "host": _host(),
        "resumes": [],
        "rollouts": [asdict(planned) for planned in job.rollouts],
    }


@lru_cache(maxsize=1)
def _versions() -> dict[str, str]:
    from importlib.metadata import version

    return {"benchflow": version("benchflow"), "python": platform.python_version()}


@lru_cache(maxsize=1)
def _host() -> dict[str, Any]:
    return {
        "name": platform.node(),
        "system": platform.platform(),
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        "memory_mb": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 20,
    }


def read_job(folder: Path) -> dict[str, Any]:
    """``job.json``. Raises ``UsageError`` when it is not there or cannot be read."""
    path = folder / "job.json"
    try:
        found = read_json(path)
    except FileNotFoundError:
        raise UsageError(f"{folder} is no job: it has no job.json", fix="give the folder of a job") from None
    except (OSError, orjson.JSONDecodeError) as error:
        raise UsageError(f"{path} cannot be read: {error}", fix="run the tasks again as a new job") from None
    if not isinstance(found, dict):
        raise UsageError(f"{path} is not a job record", fix="run the tasks again as a new job")
    check_version(found, JOB_VERSION, str(path))
    wrong = [key for key, sound in _JOB_SHAPE.items() if key in found and not sound(found[key])]
    if wrong:
        raise UsageError(
            f"{path} is not a job record: {', '.join(wrong)}", fix="run the tasks again as a new job"
        )
    return found


def _is_plan(value: Any) -> bool:
    needed = set(PlannedRollout.__slots__)
    return isinstance(value, list) and all(isinstance(item, dict) and needed <= item.keys() for item in value)


_JOB_SHAPE: dict[str, Callable[[Any], bool]] = {
    "rollouts": _is_plan,
    "config": lambda value: isinstance(value, dict),
    "settings": lambda value: isinstance(value, dict),
}


def planned_rollouts(job: dict[str, Any]) -> tuple[PlannedRollout, ...]:
    return tuple(PlannedRollout.parse(item) for item in job.get("rollouts", ()))


def iter_records(folder: Path) -> Iterator[dict[str, Any]]:
    """The result on every complete line of ``results.jsonl`` and of its shards, oldest first.
    A cut line is passed over; one of a newer schema is refused."""
    for path in result_files(folder):
        with path.open("rb") as handle:
            for line in handle:
                record = _parse(line, path)
                if record is not None:
                    yield record


def result_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("results*.jsonl") if path.name != QUARANTINE)


def scan_results(folder: Path, skip: Container[str] = ()) -> Iterator[dict[str, Any]]:
    """Results from the rollouts' own folders; for what a crash kept out of ``results.jsonl``."""
    with os.scandir(folder) as entries:
        names = sorted(e.name for e in entries if not e.name.startswith(".") and e.is_dir())
    for name in names:
        record = None if name in skip else _read_record(folder / name)
        if record is not None:
            yield record


def read_result(folder: Path) -> Result | None:
    """``result.json`` of a rollout; None when it is missing or cut, which means unfinished."""
    record = _read_record(folder)
    if record is None:
        return None
    result = Result.model_validate(record)
    result.rollout_path = str(folder)
    return result


def latest(records: Iterable[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The last result of each rollout: a resumed one has several lines."""
    return {record["rollout_name"]: record for record in records}


def _read_record(folder: Path) -> dict[str, Any] | None:
    path = folder / "result.json"
    try:
        return _parse(path.read_bytes(), path)
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return None


_NEEDED = ("task_name", "rollout_name", "agent", "outcome")


def _parse(line: bytes, path: Path) -> dict[str, Any] | None:
    try:
        record = orjson.loads(line.strip(b"\0\r\n \t"))
    except orjson.JSONDecodeError:
        return None
    if not isinstance(record, dict) or not all(isinstance(record.get(name), str) for name in _NEEDED):
        return None
    check_version(record, RESULT_VERSION, str(path))
    return record if _is_scored_or_not(record.get("rewards")) else None


def _is_scored_or_not(rewards: Any) -> bool:
    """Null, or an object whose ``reward`` is a number or null."""
    reward = rewards.get("reward") if isinstance(rewards, dict) else rewards
    return reward is None or (
        isinstance(rewards, dict) and isinstance(reward, (int, float)) and not isinstance(reward, bool)
    )


def _split_lines(data: bytes) -> tuple[list[bytes], list[bytes]]:
    good: list[bytes] = []
    bad: list[bytes] = []
    for raw in data.split(b"\n"):
        line = raw.strip(b"\0\r\n \t")
        if line:
            (good if _is_record(line) else bad).append(line)
        elif raw.strip(b"\r \t"):
            bad.append(raw)
    return good, bad


def _is_record(line: bytes) -> bool:
    try:
        return isinstance(orjson.loads(line), dict)
    except orjson.JSONDecodeError:
        return False


class SummaryPacer:
    """Decides when a running summary is worth writing again: at most once a second, and at
    most a twentieth of the time goes into it."""

    def __init__(self) -> None:
        self._next = 0.0

    def due(self) -> bool:
        return time.monotonic() >= self._next

    def wrote(self, took: float) -> None:
        self._next = time.monotonic() + max(1.0, 20 * took)
