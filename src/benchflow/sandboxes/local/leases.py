"""One small file per live sandbox, written before anything of it exists.

It names the owner and everything that must go when the owner has gone: the process,
its control groups, its sockets. Uppers and layers carry their own owner (``layers.py``).
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchflow.kernel.ownership import Owner, process_start
from benchflow.kernel.storage import dumps, read_lines, write_bytes
from benchflow.sandboxes.local.cgroups import remove_folders

_GONE_DEADLINE = 10.0


@dataclass(slots=True)
class Lease:
    """``process`` is ``(pid, start time)`` of bubblewrap, once it runs."""

    path: Path
    name: str
    job: str
    owner: Owner
    created: float
    process: tuple[int, int] | None = None
    cgroups: list[Path] = field(default_factory=list[Path])
    sockets: list[Path] = field(default_factory=list[Path])

    @classmethod
    def take(cls, folder: Path, name: str, job: str, cgroups: list[Path], sockets: list[Path]) -> Lease:
        lease = cls(folder / f"{name}.json", name, job, Owner.current(), time.time(), None, cgroups, sockets)
        lease._write()
        return lease

    @classmethod
    def read(cls, path: Path) -> Lease:
        record, *later = read_lines(path)
        process = later[-1] if later else None
        return cls(
            path,
            record["name"],
            record["job"],
            Owner.parse(record["owner"]),
            float(record["created"]),
            (int(process[0]), int(process[1])) if process else None,
            [Path(item) for item in record["cgroups"]],
            [Path(item) for item in record["sockets"]],
        )

    def _write(self) -> None:
        record: dict[str, Any] = {
            "schema_version": 1,
            "name": self.name,
            "job": self.job,
            "owner": self.owner.record(),
            "created": self.created,
            "cgroups": [str(path) for path in self.cgroups],
            "sockets": [str(path) for path in self.sockets],
        }
        write_bytes(self.path, dumps(record) + b"\n", sync=False)

    def started(self, pid: int) -> None:
        """The process is a second line: to replace a file costs more than the rest of a lease."""
        start = process_start(pid)
        if start is not None:
            self.process = (pid, start)
            with self.path.open("ab") as handle:
                handle.write(dumps(list(self.process)) + b"\n")

    def release(self) -> None:
        self.path.unlink(missing_ok=True)

    def clear(self) -> None:
        """Remove what the lease names, then the lease. For leases of dead owners."""
        if self.process is not None:
            _end_process(*self.process)
        remove_folders(self.cgroups)
        for path in self.sockets:
            path.unlink(missing_ok=True)
        self.release()


def leases(folder: Path) -> list[Lease]:
    """All readable leases; a damaged file names nothing that could be removed for it."""
    found: list[Lease] = []
    for path in sorted(folder.glob("*.json")):
        with suppress(OSError, ValueError, KeyError, TypeError, IndexError):
            found.append(Lease.read(path))
    return found


def children(pid: int) -> list[int]:
    """Direct children of a process."""
    try:
        return [int(item) for item in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def last_children(pid: int) -> list[int]:
    """Direct children of a process that is stopped first. Killed while it clones, it would
    leave a child that nobody knows of, waiting for it for ever."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGSTOP)
        _wait_until(lambda: _state(pid) in ("T", "t", "Z", "X", ""))
    return children(pid)


def _state(pid: int) -> str:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    return stat[stat.rindex(")") + 2]


def real_uid(pid: int) -> int | None:
    """The real uid of a process, as the host sees it; None when it is gone."""
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("Uid:"):
                return int(line.split()[1])
    except OSError:
        pass
    return None


def _end_process(pid: int, start: int) -> None:
    """Kill bubblewrap and the sandbox's first process, whose death takes the rest along."""
    if process_start(pid) != start:
        return
    for target in (*last_children(pid), pid):
        with suppress(ProcessLookupError):
            os.kill(target, signal.SIGKILL)
    _wait_until(lambda: process_start(pid) != start)


def _wait_until(reached: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _GONE_DEADLINE
    while not reached() and time.monotonic() < deadline:
        time.sleep(0.0005)
