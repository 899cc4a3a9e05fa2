"""Tar as a stream: write headers, read entries of archives nobody vouches for.

The reader never seeks, holds at most one chunk of data, and bounds every header, so a
hostile archive can neither exhaust memory nor hide an entry. It interprets nothing:
what a name or a link may be is decided by the caller.
"""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import BinaryIO

BLOCK = 512
CHUNK = 1 << 20
END = b"\0" * (2 * BLOCK)
_MAX_HEADER = 1 << 20
"""Bytes of one extended header (long names, attributes)."""


class TarStreamError(ValueError):
    """The bytes are not a complete, plain tar archive."""


@dataclass(slots=True)
class Entry:
    """One archive member. ``read`` gives its data and must be used before the next entry."""

    info: tarfile.TarInfo
    attributes: dict[str, str]
    _source: BinaryIO
    _left: int = field(default=0)

    @property
    def name(self) -> str:
        return self.info.name

    def read(self, size: int = CHUNK) -> bytes:
        """Up to ``size`` bytes of data, ``b""`` at its end."""
        want = min(size, self._left)
        if not want:
            return b""
        data = self._source.read(want)
        if not data:
            raise TarStreamError(f"the archive ends inside {self.info.name!r}")
        self._left -= len(data)
        return data

    def chunks(self) -> Iterator[bytes]:
        while chunk := self.read():
            yield chunk


def header(info: tarfile.TarInfo) -> bytes:
    """The header blocks of one member, in PAX format (any name, any size)."""
    return info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")


def padding(size: int) -> bytes:
    return b"\0" * (-size % BLOCK)


def entries(source: BinaryIO) -> Iterator[Entry]:
    """Yield the members in order. Raises ``TarStreamError`` for a truncated or damaged archive."""
    extended: dict[str, str] = {}
    while True:
        block = _exactly(source, BLOCK, "a header")
        if block == b"\0" * BLOCK:
            _drain(source)
            return
        info = _parse(block)
        if info.type in (tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE):
            records = _pax_records(_extended_data(source, info))
            if info.type != tarfile.XGLTYPE:
                extended.update(records)
            continue
        if info.type in (tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK):
            key = "path" if info.type == tarfile.GNUTYPE_LONGNAME else "linkpath"
            extended[key] = _text(_extended_data(source, info).rstrip(b"\0"))
            continue
        _apply(info, extended)
        size = info.size if info.isreg() else 0
        entry = Entry(info, extended, source, size)
        yield entry
        for _ in entry.chunks():  # what the caller did not read
            pass
        _exactly(source, -size % BLOCK, "padding")
        extended = {}


def _parse(block: bytes) -> tarfile.TarInfo:
    try:
        info = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
    except tarfile.HeaderError as error:
        raise TarStreamError(f"not a tar header: {error}") from error
    if info.size < 0:
        raise TarStreamError("a member has a negative size")
    return info


def _apply(info: tarfile.TarInfo, extended: dict[str, str]) -> None:
    if info.type == tarfile.GNUTYPE_SPARSE or any(key.startswith("GNU.sparse") for key in extended):
        raise TarStreamError(f"{info.name!r} is a sparse member, which is not supported")
    info.name = extended.get("path", info.name)
    info.linkname = extended.get("linkpath", info.linkname)
    try:
        info.size = int(extended.get("size", info.size))
        info.uid = int(extended.get("uid", info.uid))
        info.gid = int(extended.get("gid", info.gid))
        info.mtime = float(extended.get("mtime", info.mtime))
    except ValueError as error:
        raise TarStreamError(f"{info.name!r} has a damaged extended header") from error
    if info.size < 0:
        raise TarStreamError(f"{info.name!r} has a negative size")


def _extended_data(source: BinaryIO, info: tarfile.TarInfo) -> bytes:
    if info.size > _MAX_HEADER:
        raise TarStreamError(f"an extended header of {info.size} bytes is too large")
    data = _exactly(source, info.size, "an extended header")
    _exactly(source, -info.size % BLOCK, "padding")
    return data


def _pax_records(data: bytes) -> dict[str, str]:
    """Parse ``LENGTH KEY=VALUE\\n`` records."""
    records: dict[str, str] = {}
    at = 0
    while at < len(data) and data[at]:
        space = data.find(b" ", at, at + 20)
        length = data[at:space] if space > 0 else b""
        if not length.isdigit() or not 0 < int(length) <= len(data) - at:
            raise TarStreamError("a damaged extended header")
        key, equals, value = data[space + 1 : at + int(length) - 1].partition(b"=")
        if not equals:
            raise TarStreamError("a damaged extended header")
        records[_text(key)] = _text(value)
        at += int(length)
    return records


def _text(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")


def _exactly(source: BinaryIO, size: int, what: str) -> bytes:
    parts: list[bytes] = []
    while size:
        part = source.read(size)
        if not part:
            raise TarStreamError(f"the archive is cut off inside {what}")
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def _drain(source: BinaryIO) -> None:
    """Read to the end, so that a writer at the other end of a pipe can finish."""
    while source.read(CHUNK):
        pass
