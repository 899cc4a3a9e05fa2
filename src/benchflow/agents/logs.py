"""Raw output of an agent kept on the host: bounded, and redacted line by line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

TAIL = 64 * 1024
"""Bytes of the end that are kept once a log is over its limit."""
_LONG_LINE = 1024 * 1024
_HELD_BACK = 1024
"""Bytes kept behind when an endless line is cut, so that a secret across the cut is still seen."""


class RawLog:
    """Keeps the first ``limit`` bytes and the last ``TAIL`` of what is written to it. The file
    is opened at the first byte and complete after ``close``."""

    def __init__(self, path: Path, redact: Callable[[bytes], bytes], *, limit: int = 8 * 1024 * 1024) -> None:
        self._path = path
        self._redact = redact
        self._left = limit
        self._file: BinaryIO | None = None
        self._line = bytearray()
        self._end = bytearray()
        self._dropped = 0

    def write(self, data: bytes) -> None:
        self._line += data
        cut = self._line.rfind(b"\n") + 1
        if not cut and len(self._line) > _LONG_LINE:
            cut = len(self._line) - _HELD_BACK
        if cut:
            self._keep(self._redact(bytes(self._line[:cut])))
            del self._line[:cut]

    def tail(self, size: int = 4000) -> str:
        """The last ``size`` bytes, as text."""
        last = bytes(self._end[-size:]) + bytes(self._line[-size:])
        return self._redact(last[-size:]).decode("utf-8", "replace").strip()

    def close(self) -> None:
        if self._line:
            self._keep(self._redact(bytes(self._line)))
            self._line.clear()
        if self._file is None:
            return
        if self._dropped:
            lost = max(self._dropped - len(self._end), 0)
            self._file.write(b"\n[... %d bytes left out ...]\n" % lost + self._end[-self._dropped :])
        self._file.close()
        self._file = None

    def _keep(self, data: bytes) -> None:
        self._end += data
        if len(self._end) > TAIL:
            del self._end[:-TAIL]
        head = data[: self._left]
        if head:
            if self._file is None:
                # A second session of the same rollout continues the file of the first.
                self._file = self._path.open("ab", buffering=0)
            self._file.write(head)
            self._left -= len(head)
        self._dropped += len(data) - len(head)
