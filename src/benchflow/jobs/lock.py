"""One owner per job folder. A dead owner's lock is taken over; a live one's is respected."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import orjson

from benchflow.contracts.errors import OwnedElsewhereError
from benchflow.kernel.ownership import Owner
from benchflow.kernel.storage import dumps

LOCK_NAME = "owner.lock"

_held: set[Path] = set()
"""Locks of this process: a second job object on the same folder is a second owner too."""


class JobLock:
    """``owner.lock`` names the process that plans and owns the job. The file is truth, and a
    short ``flock`` guards reading and replacing it, so that two processes cannot both take
    over a dead owner's lock (and no child that inherited a descriptor can keep it)."""

    def __init__(self, job: Path) -> None:
        self.path = (job / LOCK_NAME).resolve()

    def acquire(self) -> Owner | None:
        """Own the job. Returns the dead owner it was taken from, if any. Raises
        ``OwnedElsewhereError`` when a live process, or one on another host, owns it."""
        me = Owner.current()
        with self._guarded() as handle:
            previous = _read(handle)
            if previous is not None and previous.alive() and (previous != me or self.path in _held):
                raise OwnedElsewhereError(
                    f"{self.path.parent} is owned by {previous}",
                    fix=f"wait for it, stop it, or remove {self.path} when that machine is gone",
                )
            try:
                os.ftruncate(handle, 0)
                os.pwrite(handle, dumps(me.record()) + b"\n", 0)
            except OSError as error:  # a full disk; it says where
                raise OSError(error.errno, error.strerror, os.fspath(self.path)) from error
            _held.add(self.path)
        return previous if previous != me else None

    def release(self) -> None:
        """Give the job up. Harmless when not held."""
        if self.path in _held:
            _held.discard(self.path)
            with self._guarded():
                self.path.unlink(missing_ok=True)

    @contextmanager
    def _guarded(self) -> Iterator[int]:
        """The open lock file, exclusively; opened again if it was removed while we waited."""
        while True:
            handle = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX)
                if _same_file(handle, self.path):
                    yield handle
                    return
            finally:
                os.close(handle)


def owner_of(job: Path) -> Owner | None:
    """Who owns the job now, dead or alive; None when nobody does."""
    try:
        handle = os.open(job / LOCK_NAME, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        return _read(handle)
    finally:
        os.close(handle)


def _same_file(handle: int, path: Path) -> bool:
    try:
        return os.fstat(handle).st_ino == path.stat().st_ino
    except FileNotFoundError:
        return False


def _read(handle: int) -> Owner | None:
    """A file cut by a crash names nobody."""
    try:
        return Owner.parse(orjson.loads(os.pread(handle, 4096, 0)))
    except (ValueError, KeyError, TypeError):
        return None
