"""Finished rollouts as a stream, from any process, while the job runs or afterwards.

Each rollout comes once, in the order they finished. With a group size they come when their
group is complete, every one with its advantage; a group that cannot be trained on is held
back with a reason.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchflow.contracts.errors import JobDiedError, StreamTimeoutError, UsageError
from benchflow.jobs.load import find_jobs
from benchflow.kernel.storage import LineWriter, read_lines
from benchflow.training.discover import check_path, find_rollouts
from benchflow.training.follow import JobState
from benchflow.training.follow import follow as follow_jobs
from benchflow.training.formats import Source
from benchflow.training.groups import Group, Key, check_formula, group_key, make_member, parse_by
from benchflow.training.records import STREAM_VERSION
from benchflow.training.rollouts import RolloutRecord, read_rollout

Note = Callable[[str], None]
Part = tuple[int, list[RolloutRecord]]
"""A group that was held back: its part and its members."""


async def stream_rollouts(
    path: str | Path,
    *,
    follow: bool = True,
    group_size: int | None = None,
    group_by: str | Sequence[str] | None = None,
    group_advantage: str | None = None,
    since: str | Path | None = None,
    timeout: float | None = None,
    with_segments: bool = True,
    on_note: Note | None = None,
) -> AsyncGenerator[dict[str, Any]]:
    """Yield each finished rollout under ``path`` once, as a dict in the shape of
    ``training.records.StreamRecord``.

    ``follow`` waits for more until every job there is done; otherwise what is finished now is
    all. ``group_size`` makes groups of that many members, with advantages by
    ``group_advantage`` (``grpo`` or ``loo``) over groups ``group_by`` (keys, by default the
    planned group). ``since`` names a file that remembers what was delivered, so that another
    stream with it goes on where this one stopped; a record counts as delivered when the next
    one is asked for. ``timeout`` is in seconds without anything new. ``with_segments`` puts the
    exact tokens into each record. ``on_note`` is told why groups are held back.

    Raises ``UsageError`` for a path or option that means nothing, ``JobDiedError`` when a job
    ended without finishing, and ``StreamTimeoutError``.
    """
    root = Path(check_path(path))
    if timeout is not None and not 0 < timeout < math.inf:
        raise UsageError(f"--timeout {timeout:g} is not a time", fix="give seconds above 0, or leave it out")
    groups = _assembler(group_size, group_by, group_advantage, on_note or (lambda _: None))
    cursor = Cursor(since)
    batches = _followed(root, timeout) if follow and _may_grow(root) else _finished(root)
    try:
        async with aclosing(batches):
            async for batch in batches:
                for source in _standings(batch, groups):
                    if cursor.delivered(source.rollout):
                        continue
                    replaces = cursor.replaced(source.rollout)
                    yield await asyncio.to_thread(make_record, source, replaces, with_segments)
                    cursor.mark(source.rollout)
    except JobDiedError:
        if groups:
            groups.report_incomplete()
        raise
    finally:
        cursor.close()
    if groups:
        groups.report_incomplete()


def make_record(source: Source, replaces: str | None, with_segments: bool) -> dict[str, Any]:
    rollout, segmented = source.rollout, source.segmented
    return {
        **source.in_group(source.named()),
        "schema_version": STREAM_VERSION,
        "job": rollout.job,
        "rollout_path": rollout.path,
        "group_id": rollout.group_id,
        "scored": rollout.score is not None,
        "outcome": rollout.outcome,
        "error": rollout.error,
        "finished_at": rollout.finished_at,
        "policy_version": rollout.policy_version,
        "attribution": rollout.result.get("attribution"),
        "token_capture": segmented.capture_status(),
        "segments": [segment.record() for segment in segmented.segments] if with_segments else None,
        "group_complete": source.group is not None,
        "replaces": replaces,
        "retried": rollout.result.get("retries", 0),
    }


@dataclass(slots=True)
class Assembler:
    """Collects members until a group is complete. When more rollouts share a key than a group
    holds, the next ones make another group, told apart by ``part=2`` and so on in its id."""

    size: int
    by: tuple[str, ...]
    formula: str
    note: Note
    _open: dict[Key, list[RolloutRecord]] = field(default_factory=dict[Key, list[RolloutRecord]])
    _withheld: dict[Key, list[Part]] = field(default_factory=dict[Key, list[Part]])
    _parts: Counter[Key] = field(default_factory=Counter[Key])

    def add(self, rollout: RolloutRecord) -> list[Source]:
        """The members of the group that this rollout completes, else nothing. A rollout that
        ran again takes the place of its earlier attempt, also in a group held back."""
        key = group_key(rollout, self.by)
        for held in self._withheld.get(key, ()):
            part, members = held
            if _replace(members, rollout):
                self._withheld[key].remove(held)
                return self._close(key, part, members)
        members = self._open.setdefault(key, [])
        if not _replace(members, rollout):
            members.append(rollout)
        if len(members) < self.size:
            return []
        del self._open[key]
        self._parts[key] += 1
        return self._close(key, self._parts[key], members)

    def report_incomplete(self) -> None:
        for key, members in self._open.items():
            group = Group(self.by, key, self.formula)
            self.note(f"withheld {group.id}: {len(members)} of {self.size} members finished")

    def _close(self, key: Key, part: int, members: list[RolloutRecord]) -> list[Source]:
        group = Group(self.by, key, self.formula, part, [make_member(m) for m in members]).close()
        if group.withheld:
            self._withheld.setdefault(key, []).append((part, members))
            self.note(f"withheld {group.id}: {group.withheld}")
            return []
        return [
            Source(rollout, member.advantage, group.row_block(member))
            for rollout, member in zip(members, group.members, strict=True)
        ]


def _replace(members: list[RolloutRecord], rollout: RolloutRecord) -> bool:
    for index, member in enumerate(members):
        if member.path == rollout.path:
            members[index] = rollout
            return True
    return False


class Cursor:
    """Remembers what was delivered, in a file when one is given."""

    def __init__(self, path: str | Path | None) -> None:
        self._times: dict[str, str] = {}
        """``<job>/<rollout>`` to the ``finished_at`` of what was delivered last."""
        self._writer: LineWriter | None = None
        if path is None:
            return
        file = Path(path)
        if file.is_dir():
            raise UsageError(f"--since {file} is a folder", fix="name a file; it is made when absent")
        if file.exists():
            lines = list(read_lines(file))
            if not lines and file.stat().st_size:
                self._load(None, file)  # whatever it holds, it is not ours to append to
            for line in lines:
                self._load(line, file)
        file.parent.mkdir(parents=True, exist_ok=True)
        self._writer = LineWriter(file)

    def _load(self, line: object, file: Path) -> None:
        if not isinstance(line, dict) or not {"job", "rollout", "finished_at"} <= line.keys():
            raise UsageError(
                f"--since {file} is not a cursor of this stream",
                fix="name a new file, or lines of the stream",
            )
        self._times[f"{line['job']}/{line['rollout']}"] = line["finished_at"]

    def delivered(self, rollout: RolloutRecord) -> bool:
        return self._times.get(_name(rollout)) == rollout.finished_at

    def replaced(self, rollout: RolloutRecord) -> str | None:
        """Where the attempt is now that was delivered before this one."""
        if _name(rollout) not in self._times:
            return None
        return f"{rollout.path}/attempts/{rollout.result.get('retries', 0)}"

    def mark(self, rollout: RolloutRecord) -> None:
        self._times[_name(rollout)] = rollout.finished_at
        if self._writer is not None:
            self._writer.append(
                {"job": rollout.job, "rollout": rollout.name, "finished_at": rollout.finished_at}
            )

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


def _name(rollout: RolloutRecord) -> str:
    return f"{rollout.job}/{rollout.name}"


def _standings(batch: Iterable[RolloutRecord], groups: Assembler | None) -> Iterator[Source]:
    """What can be delivered once these rollouts are finished. An interrupted rollout is not
    finished: it runs again, or spoils its group."""
    for rollout in batch:
        if groups:
            yield from groups.add(rollout)
        elif rollout.outcome != "cancelled":
            yield Source(rollout)


def _may_grow(root: Path) -> bool:
    """False for rollouts outside of any job: nobody will say when there are no more."""
    return any(find_jobs(root)) or not any(find_rollouts(root))


async def _finished(root: Path) -> AsyncGenerator[Iterable[RolloutRecord]]:
    """One batch: what is finished now, in the order it finished."""
    found = {item.path: item for item in find_rollouts(root)}
    order = sorted(
        (rollout.finished_at, rollout.path)
        for rollout in map(read_rollout, found.values())
        if rollout.problem is None
    )
    yield (read_rollout(found[path]) for _, path in order)


async def _followed(root: Path, timeout: float | None) -> AsyncGenerator[Iterable[RolloutRecord]]:
    last = time.monotonic()
    async with aclosing(follow_jobs(root)) as looks:
        async for new, state in looks:
            if new:
                yield new
                last = time.monotonic()
            if state is JobState.DIED:
                raise JobDiedError(
                    f"a job under {root} ended without finishing",
                    fix="run the same command again to resume it",
                )
            if timeout is not None and state is JobState.LIVE and time.monotonic() - last > timeout:
                raise StreamTimeoutError(
                    f"nothing new under {root} for {timeout:g} s", fix="check the job, or raise --timeout"
                )


def _assembler(
    size: int | None, by: str | Sequence[str] | None, advantage: str | None, note: Note
) -> Assembler | None:
    if size is None:
        for value, flag in ((by, "--group-by"), (advantage, "--group-advantage")):
            if value is not None:
                raise UsageError(f"{flag} needs groups", fix="add --group-size N")
        return None
    if size < 1:
        raise UsageError(f"--group-size {size} is not a size", fix="give at least 1")
    return Assembler(size, parse_by(by), check_formula(advantage or "grpo"), note)
