"""The one place that writes records, so that atomicity and redaction hold everywhere.

Documents are written to a temporary file, synced and renamed; lines are appended with
one ``write`` each. A reader survives a last line that was cut by a crash. Injected
secrets are masked by value, and well-known token shapes by pattern.
"""

from __future__ import annotations

import base64
import errno
import json
import os
import re
import tempfile
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import quote, quote_plus

import orjson

from benchflow.contracts.errors import HostPressureError

MASK = "[REDACTED]"
_MIN_SECRET = 6
"""Shorter values would mask ordinary words."""
_MIN_LINE = 12

_TOKEN_SHAPES = re.compile(
    rb"(?:sk-ant-|sk-proj-|sk-or-|sk-|dtn_|gsk_|xai-|hf_|ghp_|gho_|ghs_|github_pat_|glpat-|AIza|AKIA|ASIA|xox[abpr]-|ya29\.)"
    rb"[A-Za-z0-9_\-\.]{16,}"
)
_TOKEN_STARTS = tuple(
    map(
        re.compile,
        (
            rb"-(?:(?<=sk-)|(?<=xai-)|(?<=glpat-)|(?<=xox[abpr]-))",
            rb"_(?:(?<=dtn_)|(?<=gsk_)|(?<=hf_)|(?<=gh[pos]_)|(?<=github_pat_))",
            rb"A(?:Iza|KIA|SIA)",
            rb"ya29\.",
        ),
    )
)
"""How those shapes begin, each told by one letter that is looked for fast: finding none of these is
twenty times faster than trying the pattern."""


class Redactor:
    """Masks secret values in bytes about to be written. Add values before they can leak.

    A value is found raw, JSON-escaped up to three times (a tool's JSON inside a message inside
    a record), percent-encoded, and in base64 at any alignment, also where ``base64`` breaks
    its lines. Of a value of several lines each long line counts.
    """

    def __init__(self, secrets: Iterable[str] = ()) -> None:
        self._needles: list[bytes] = []
        self._wrapped: dict[bytes, re.Pattern[bytes]] = {}
        self._starts: frozenset[bytes] = frozenset()
        self._longest = 0
        self.add(*secrets)

    def add(self, *secrets: str) -> None:
        forms: set[bytes] = set(self._needles)
        for secret in secrets:
            if len(secret) < _MIN_SECRET:
                continue
            lines = [line for line in secret.splitlines() if len(line) >= _MIN_LINE and line[:3] != "---"]
            for value in {secret, *lines}:
                forms |= _spellings(value)
                cores = _base64_cores(value.encode("utf-8", "surrogatepass"))
                forms |= cores
                self._wrapped |= {probe: _across_lines(core) for core in cores for probe in _probes(core)}
        if len(forms) == len(self._needles):
            return
        # Longest first: a short secret inside a long one must not leave the long one's tail.
        self._needles = sorted(forms, key=len, reverse=True)
        self._starts = frozenset(form[:n] for form in forms for n in range(1, len(form)))
        self._longest = len(self._needles[0])

    def __call__(self, data: bytes) -> bytes:
        for needle in self._needles:
            if needle in data:
                data = data.replace(needle, MASK.encode())
        for probe, pattern in self._wrapped.items():
            if probe in data:
                data = pattern.sub(MASK.encode(), data)
        if any(start.search(data) for start in _TOKEN_STARTS):
            data = _TOKEN_SHAPES.sub(MASK.encode(), data)
        return data

    def text(self, value: str) -> str:
        return self(value.encode("utf-8", "surrogatepass")).decode("utf-8", "replace")

    def may_go_on(self, data: bytes) -> bool:
        """True when ``data`` ends with the beginning of a secret: what follows may complete it."""
        most = min(len(data), self._longest - 1)
        return any(data[-n:] in self._starts for n in range(1, most + 1))


def _spellings(value: str) -> set[bytes]:
    """``value`` as text, in JSON and in URLs."""
    raw = value.encode("utf-8", "surrogatepass")
    forms = {raw, quote(raw, safe="").encode(), quote(raw).encode(), quote_plus(raw).encode()}
    for ascii_only in (False, True):
        text = value
        for _ in range(3):
            text = json.dumps(text, ensure_ascii=ascii_only)[1:-1]
            forms.add(text.encode("utf-8", "surrogatepass"))
    return forms


def _base64_cores(raw: bytes) -> set[bytes]:
    """Base64 of ``raw`` at each of the three alignments, without the borrowed edges."""
    cores: set[bytes] = set()
    if len(raw) < 9:
        return cores
    for shift in range(3):
        encoded = base64.b64encode(b"\0" * shift + raw)
        head = 0 if shift == 0 else 4
        core = encoded[head : len(encoded) - 4]
        if len(core) >= 8:
            cores |= {core, core.translate(bytes.maketrans(b"+/", b"-_"))}
    return cores


def _probes(core: bytes) -> tuple[bytes, ...]:
    """Pieces of which a single line break leaves one whole."""
    half = min(len(core) // 2, 16)
    return (core[:half], core[half : 2 * half]) if half >= 8 else ()


def _across_lines(core: bytes) -> re.Pattern[bytes]:
    line_break = rb"(?:\r?\n|(?:\\+r)?\\+n)?"
    return re.compile(line_break.join(re.escape(bytes([byte])) for byte in core))


NO_REDACTION = Redactor()


def dumps(record: Any, *, indent: bool = False) -> bytes:
    """Strict JSON: NaN and infinities become null, as JSON has no word for them."""
    option = orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY
    return orjson.dumps(record, default=_encode, option=option | (orjson.OPT_INDENT_2 if indent else 0))


def _encode(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, (set, frozenset)):
        return sorted(value)  # pyright: ignore[reportUnknownArgumentType,reportUnknownVariableType]
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    if hasattr(value, "items"):
        return dict(value)
    raise TypeError(f"{type(value).__name__} is not a record value")


def write_bytes(path: Path, data: bytes, *, sync: bool = True) -> None:
    """Replace ``path`` atomically. A full disk raises ``HostPressureError`` and leaves
    neither a half file nor the temporary one."""
    try:
        fd, temporary = tempfile.mkstemp(prefix=f".{path.name[:40]}.", dir=path.parent)
    except OSError as error:
        raise _pressure(error, path) from error
    try:
        try:
            os.fchmod(fd, 0o644)
            view = memoryview(data)
            while view:
                view = view[os.write(fd, view) :]
            if sync:
                os.fsync(fd)
        finally:
            os.close(fd)
        os.replace(temporary, path)
    except BaseException as error:
        _unlink_quietly(temporary)
        if isinstance(error, OSError):
            raise _pressure(error, path) from error
        raise


@contextmanager
def replacing(path: Path, *, sync: bool = True) -> Generator[BinaryIO]:
    """A file to write piece by piece that takes ``path``'s place at the end of the block.
    Whatever goes wrong inside leaves ``path`` as it was and no temporary file."""
    try:
        fd, temporary = tempfile.mkstemp(prefix=f".{path.name[:40]}.", dir=path.parent)
    except OSError as error:
        raise _pressure(error, path) from error
    try:
        with open(fd, "wb", buffering=1 << 18) as handle:
            os.fchmod(fd, 0o644)
            yield handle
            handle.flush()
            if sync:
                os.fsync(fd)
        os.replace(temporary, path)
    except BaseException as error:
        _unlink_quietly(temporary)
        if isinstance(error, OSError):
            raise _pressure(error, path) from error
        raise


def write_json(path: Path, record: Any, redact: Redactor = NO_REDACTION, *, sync: bool = True) -> None:
    write_bytes(path, redact(dumps(record, indent=True)) + b"\n", sync=sync)


class LineWriter:
    """Appends JSON lines, one ``write`` call each, to a file opened once.

    A file whose last line was cut by a crash gets a newline first, so that nothing is
    ever glued onto a partial line.
    """

    def __init__(self, path: Path, redact: Redactor = NO_REDACTION) -> None:
        self.path = path
        self._redact = redact
        self._fd = -1

    def append(self, record: Any) -> None:
        self.append_raw(dumps(record))

    def append_raw(self, line: bytes) -> None:
        data = self._redact(line) + b"\n"
        try:
            if self._fd < 0:
                self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
                if _ends_inside_a_line(self._fd):
                    data = b"\n" + data
            written = os.write(self._fd, data)
            while written < len(data):
                written += os.write(self._fd, data[written:])
        except OSError as error:
            raise _pressure(error, self.path) from error

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def read_json(path: Path) -> Any:
    return orjson.loads(path.read_bytes())


def read_lines(path: Path) -> Iterator[Any]:
    """Yield the complete records of a JSONL file. A cut last line, NUL padding and lines
    that are not JSON are passed over."""
    with path.open("rb") as handle:
        for line in handle:
            line = line.strip(b"\0\r\n \t")
            if not line:
                continue
            try:
                yield orjson.loads(line)
            except orjson.JSONDecodeError:
                continue


def _ends_inside_a_line(fd: int) -> bool:
    size = os.fstat(fd).st_size
    return size > 0 and os.pread(fd, 1, size - 1) != b"\n"


def _unlink_quietly(path: str) -> None:
    try:
        os.unlink(path)
    except OSError:
        pass


def _pressure(error: OSError, path: Path) -> OSError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return HostPressureError(
            f"disk full while writing {path}", fix="free space, then run the same command again"
        )
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return HostPressureError(
            f"out of file descriptors while writing {path}", fix="raise `ulimit -n` or lower --concurrency"
        )
    error.filename = os.fspath(path)  # what was asked for, not the temporary file beside it
    return error
