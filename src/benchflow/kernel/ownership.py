"""Who owns what: a process identity that survives pid reuse, and the state folder."""

from __future__ import annotations

import os
import socket
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from benchflow.contracts.errors import PrerequisiteError


@dataclass(frozen=True, slots=True)
class Owner:
    """A process, told apart from a later one with the same pid by its start time
    (clock ticks since boot), the boot id and the host name."""

    pid: int
    start: int
    boot: str
    host: str

    @classmethod
    def current(cls) -> Owner:
        return _current(os.getpid())

    @classmethod
    def parse(cls, record: dict[str, Any]) -> Owner:
        return cls(int(record["pid"]), int(record["start"]), str(record["boot"]), str(record["host"]))

    def record(self) -> dict[str, Any]:
        return asdict(self)

    def alive(self) -> bool:
        """True also for an owner on another host: nobody here can tell that it died."""
        if self.host != _host():
            return True
        return self.boot == _boot() and process_start(self.pid) == self.start

    def __str__(self) -> str:
        return f"pid {self.pid} on {self.host}"


@lru_cache(maxsize=4)
def _current(pid: int) -> Owner:
    return Owner(pid, process_start(pid) or 0, _boot(), _host())


def process_start(pid: int) -> int | None:
    """Start time of a live process in clock ticks since boot; None when it is gone or a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    fields = stat[stat.rindex(b")") + 2 :].split()
    return None if fields[0] in (b"Z", b"X") else int(fields[19])


@lru_cache(maxsize=1)
def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return "unknown"


@lru_cache(maxsize=1)
def _host() -> str:
    return socket.gethostname()


def state_dir() -> Path:
    """``$BENCHFLOW_HOME``, else ``$XDG_CACHE_HOME/benchflow``, else ``~/.cache/benchflow``:
    images, layers, leases, bundles. Absolute, and everything in it can be made again."""
    explicit = os.environ.get("BENCHFLOW_HOME")
    if explicit:
        return Path(explicit).absolute()
    try:
        cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError:
        raise PrerequisiteError(
            "this user has no home directory for caches", fix="export BENCHFLOW_HOME=FOLDER"
        ) from None
    return Path(cache).absolute() / "benchflow"
