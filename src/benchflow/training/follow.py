"""Following jobs while they run: new lines of ``results.jsonl``, and whether more can come.

Only the bytes that were appended since the last look are read. A change is told by the
file system; once a second the owner of each job is looked up too, because a process that
dies tells nobody.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import orjson

from benchflow.contracts.errors import JobDiedError
from benchflow.jobs.load import is_job
from benchflow.jobs.lock import owner_of
from benchflow.jobs.store import result_files
from benchflow.training.discover import line_rollout, read_dict
from benchflow.training.rollouts import RolloutRecord

HEARTBEAT = 1.0
"""Seconds between looks when the file system reports nothing."""
UNOWNED_GRACE = 30.0
"""Seconds without news after which an unfinished job that nobody owns counts as dead."""


class JobState(Enum):
    """Of everything under the path: can more come?"""

    LIVE = "live"
    DONE = "done"
    DIED = "died"


@dataclass(slots=True)
class Tail:
    """The end of one growing file of JSON lines."""

    path: Path
    offset: int = 0
    inode: int = 0

    def read(self) -> Iterator[dict[str, Any]]:
        """Yield the whole lines appended since the last call. A file that was replaced or
        became shorter is read from its start; a line without its end waits."""
        try:
            with self.path.open("rb") as handle:
                stat = os.fstat(handle.fileno())
                if stat.st_ino != self.inode or stat.st_size < self.offset:
                    self.inode, self.offset = stat.st_ino, 0
                if stat.st_size == self.offset:
                    return
                handle.seek(self.offset)
                data = handle.read()
        except FileNotFoundError:
            return
        whole = data[: data.rfind(b"\n") + 1]
        self.offset += len(whole)
        for line in whole.split(b"\n"):
            try:
                record = orjson.loads(line.strip(b"\0\r \t"))
            except orjson.JSONDecodeError:
                continue
            if isinstance(record, dict):
                yield record


@dataclass(slots=True)
class Feed:
    """All jobs under ``root``, also those that appear later."""

    root: Path
    jobs: dict[Path, dict[Path, Tail]] = field(default_factory=dict[Path, dict[Path, Tail]])
    states: dict[Path, JobState] = field(default_factory=dict[Path, JobState])
    folders: set[Path] = field(default_factory=set[Path])
    """The folders where something new can appear: jobs and what lies above them."""
    news: float = field(default_factory=time.monotonic)
    """When the last new line came."""

    def look(self, changed: set[Path] | None = None) -> list[RolloutRecord]:
        """Rollouts listed since the last look, oldest first. ``changed`` are the folders where
        something happened; without it every job is looked at."""
        if changed is None or not changed <= self.jobs.keys():
            self.look_for_jobs()
        new: list[RolloutRecord] = []
        for job in [job for job in self.jobs if changed is None or job in changed or job not in self.states]:
            self.states[job] = self._job_state(job)  # before the lines: what is done lists no more
            for path in result_files(job):
                tail = self.jobs[job].setdefault(path, Tail(path))
                new += (self._rollout(job, record) for record in tail.read() if line_rollout(record))
        if new:
            self.news = time.monotonic()
        return sorted(new, key=lambda rollout: rollout.finished_at)

    def state(self) -> JobState:
        """Can more come? A folder without a job yet may still get one."""
        states = set(self.states.values())
        if not states or JobState.LIVE in states:
            return JobState.LIVE
        return JobState.DIED if JobState.DIED in states else JobState.DONE

    def _job_state(self, job: Path) -> JobState:
        owner = owner_of(job)  # before the summary, which the owner writes before it leaves
        if owner is not None and owner.alive():
            return JobState.LIVE
        if _is_final(job):
            return JobState.DONE
        if owner is not None or time.monotonic() - self.news > UNOWNED_GRACE:
            return JobState.DIED
        return JobState.LIVE

    def _rollout(self, job: Path, record: dict[str, Any]) -> RolloutRecord:
        return RolloutRecord(str(job / str(line_rollout(record))), str(job), record)

    def look_for_jobs(self) -> None:
        """Find jobs and the folders to watch. What lies inside a job is not entered."""
        self.folders = set()
        stack = [self.root]
        while stack:
            folder = stack.pop()
            self.folders.add(folder)
            if is_job(folder):
                self.jobs.setdefault(folder, {})
            else:
                stack += _subfolders(folder)


def _subfolders(folder: Path) -> list[Path]:
    try:
        with os.scandir(folder) as entries:
            return [
                Path(entry.path)
                for entry in entries
                if not entry.name.startswith(".") and entry.is_dir(follow_symlinks=False)
            ]
    except FileNotFoundError:
        return []


def _is_final(job: Path) -> bool:
    return (read_dict(f"{job}/summary.json") or {}).get("final") is True


async def follow(root: Path) -> AsyncGenerator[tuple[list[RolloutRecord], JobState]]:
    """Yield what is new, and the state, at every change and heartbeat; the last one has a
    state other than ``LIVE``."""
    feed = Feed(root)
    async with aclosing(_changes(feed)) as changes:
        async for changed in changes:
            new = feed.look(changed)
            state = feed.state()
            yield new, state
            if state is not JobState.LIVE:
                return


async def _changes(feed: Feed) -> AsyncGenerator[set[Path] | None]:
    """Yield the folders where something changed; None at a heartbeat: look at everything."""
    from watchfiles import awatch

    yield None
    while True:
        watched = sorted(feed.folders)
        changes = awatch(
            *watched,
            watch_filter=None,
            recursive=False,
            debounce=100,
            step=20,
            rust_timeout=int(HEARTBEAT * 1000),
            yield_on_timeout=True,
        )
        waiting = asyncio.ensure_future(anext(changes))
        try:
            await asyncio.sleep(0)  # lets the watch begin
            yield None  # what happened before it did
            while sorted(feed.folders) == watched:
                found = await waiting
                waiting = asyncio.ensure_future(anext(changes))
                yield {Path(path).parent for _, path in found} or None
        except FileNotFoundError:
            if not feed.root.is_dir():
                raise JobDiedError(f"{feed.root} was removed") from None
            feed.look_for_jobs()  # a folder vanished between the scan and the watch
        finally:
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
            await changes.aclose()
