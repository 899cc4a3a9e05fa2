"""The output of one image build: kept whole in a file, its end kept for the error."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

from benchflow.kernel.storage import Redactor
from benchflow.sandboxes.dockerfile import Instruction

_TAIL = 2048
"""Bytes of a failed command's output kept in the error."""
_LONGEST_LINE = 1 << 20
_COLOUR = re.compile(r"\x1b\[[\d;]*[A-Za-z]|\r")


class BuildLog:
    """The output of one build, masked line by line; the file appears with the first RUN."""

    def __init__(self, folder: Path, task: str) -> None:
        safe = "".join(char if char.isalnum() or char in "-_." else "_" for char in task)[:60]
        self.path = folder / f"{time.strftime('%Y%m%d-%H%M%S')}-{safe}-{os.urandom(3).hex()}.log"
        self._redact = Redactor()
        self._file: BinaryIO | None = None
        self._line = b""
        self._kept = b""

    @property
    def used(self) -> bool:
        return self._file is not None

    def begin(self, instruction: Instruction, secrets: Sequence[str]) -> None:
        self._redact.add(*secrets)
        if self._file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("wb")
        self._put(f"--- line {instruction.line}: {instruction}\n".encode())
        self._kept = b""

    def write(self, data: bytes) -> None:
        lines, newline, self._line = (self._line + data).rpartition(b"\n")
        if newline or len(self._line) > _LONGEST_LINE:
            self._put(lines + newline or self._take())

    def tail(self) -> str:
        """The end of the last command's output."""
        self._put(self._take())
        return self._kept.decode("utf-8", "replace")

    def reason(self) -> str:
        """``: `` and the last line that the last command wrote, for the one line of an error."""
        lines = _COLOUR.sub("", self.tail()).split("\n")
        said = next((line.strip() for line in reversed(lines) if line.strip()), "")
        return f": {said[:200]}" if said else ""

    def close(self) -> None:
        if self._file is not None:
            self._put(self._take())
            self._file.close()

    def _take(self) -> bytes:
        line, self._line = self._line, b""
        return line

    def _put(self, data: bytes) -> None:
        data = self._redact(data)
        self._kept = (self._kept + data)[-_TAIL:]
        if self._file is not None:
            self._file.write(data)


def where(instruction: Instruction) -> str:
    """The start of an error message about an instruction."""
    text = " ".join(str(instruction).split())
    return f"Dockerfile line {instruction.line}: {text if len(text) <= 120 else text[:119] + '…'}"
