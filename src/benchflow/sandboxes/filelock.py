"""Locks between the processes of one user, by name."""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import os
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from weakref import WeakValueDictionary


class FileLocks:
    """Names share 256 files of ``folder``. A holder takes one lock at a time, so that sharing a
    file can delay it but never block it for good."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._here: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._waiters = ThreadPoolExecutor(thread_name_prefix="file-lock")

    @asynccontextmanager
    async def hold(self, name: str) -> AsyncIterator[None]:
        """Only one holder of a name at once, here and in other processes."""
        here = self._here.setdefault(name, asyncio.Lock())
        async with here, self._hold(name):  # a thread waits for the file, so one at a time
            yield

    @asynccontextmanager
    async def _hold(self, name: str) -> AsyncIterator[None]:
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / hashlib.sha256(name.encode()).hexdigest()[:2]
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                waiting = asyncio.get_running_loop().run_in_executor(
                    self._waiters, fcntl.flock, fd, fcntl.LOCK_EX
                )
                try:
                    await asyncio.shield(waiting)
                except asyncio.CancelledError:
                    late, fd = fd, -1
                    waiting.add_done_callback(lambda _: os.close(late))
                    raise
            yield
        finally:
            if fd >= 0:
                os.close(fd)
