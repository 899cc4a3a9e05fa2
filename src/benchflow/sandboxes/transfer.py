"""The host's side of upload and download: pack a tree, unpack a stream nobody vouches for.

Both directions keep modes and links that stay inside the tree, refuse links that leave
it, and leave out devices, FIFOs and sockets. Nothing here follows a link of the tree.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import stat
import tarfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from benchflow.contracts.errors import HostPressureError, TransferError
from benchflow.sandboxes.tarstream import BLOCK, CHUNK, END, Entry, TarStreamError, entries, header, padding

ROOT = "."
"""Name of the top entry in our own streams: the directory itself, or the single file."""
_MAX_DEPTH = 256
_MAX_NAME = 255
_MAX_PATH = 4000
_MAX_LINK_STEPS = 40


def pack(local: Path, *, skipped: list[str] | None = None) -> Iterator[bytes]:
    """Yield a tar stream of a file, or of a directory's contents, under the top name ``.``.

    The same tree gives the same bytes: names are sorted, owners are 0, modes and whole
    seconds are kept. Files are streamed. Names of special files left out are appended to
    ``skipped``. Raises ``TransferError`` for a link that leaves the tree, an unreadable
    file, or a file that shrinks while it is read; nothing but the bytes yielded so far
    has then been sent, and the stream lacks its end.
    """
    top = Path(os.path.realpath(local))
    try:
        status = top.stat()
    except OSError as error:
        raise TransferError(f"cannot upload {local}: {error.strerror}") from error
    if stat.S_ISREG(status.st_mode):
        yield from pack_file(top, ROOT, status)
    elif stat.S_ISDIR(status.st_mode):
        yield header(member(ROOT, status, tarfile.DIRTYPE))
        yield from _pack_dir(top, top, "", [] if skipped is None else skipped)
    else:
        raise TransferError(f"cannot upload {local}: neither a file nor a directory")
    yield END


def _pack_dir(top: Path, folder: Path, prefix: str, skipped: list[str]) -> Iterator[bytes]:
    try:
        found = sorted(os.scandir(folder), key=lambda item: item.name)
    except OSError as error:
        raise TransferError(f"cannot read {folder}: {error.strerror}") from error
    for item in found:
        name = prefix + item.name
        path = folder / item.name
        status = item.stat(follow_symlinks=False)
        if stat.S_ISLNK(status.st_mode):
            info = member(name, status, tarfile.SYMTYPE)
            info.linkname = inner_link(top, path)
            yield header(info)
        elif stat.S_ISDIR(status.st_mode):
            yield header(member(name, status, tarfile.DIRTYPE))
            yield from _pack_dir(top, path, f"{name}/", skipped)
        elif stat.S_ISREG(status.st_mode):
            yield from pack_file(path, name, status)
        else:
            skipped.append(name)


def inner_link(top: Path, link: Path) -> str:
    """The target of a link as it may be copied: relative, and ending inside ``top``.

    ``top`` must be a real path. Raises ``TransferError`` naming a link that leaves it.
    """
    target = os.readlink(link)
    end = Path(os.path.realpath(link))
    if end != top and top not in end.parents:
        raise TransferError(
            f"the link {link} points outside its directory, to {target}",
            fix="replace the link by a copy of what it points to",
        )
    if os.path.isabs(target):
        return os.path.relpath(end, os.path.realpath(link.parent))
    return target


def pack_file(path: Path, name: str, status: os.stat_result, mtime: int | None = None) -> Iterator[bytes]:
    """A file as a member of a stream, without following a link."""
    info = member(name, status, tarfile.REGTYPE, mtime)
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb", buffering=0) as handle:
            info.size = left = os.fstat(handle.fileno()).st_size
            yield header(info)
            while left:
                chunk = handle.read(min(CHUNK, left))
                if not chunk:
                    raise TransferError(f"{path} became shorter while it was read")
                left -= len(chunk)
                yield chunk
    except TransferError:
        raise
    except OSError as error:
        raise TransferError(f"cannot read {path}: {error.strerror}") from error
    yield padding(info.size)


def member(name: str, status: os.stat_result, kind: bytes, mtime: int | None = None) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type = kind
    info.mode = stat.S_IMODE(status.st_mode)
    info.mtime = int(status.st_mtime) if mtime is None else mtime
    return info


def unpack(
    source: BinaryIO, local: Path, *, limit: int = 1 << 30, root: str = ROOT, skipped: list[str] | None = None
) -> None:
    """Write a tar stream to ``local``, which becomes a file or a directory as the top entry is.

    ``root`` is the top entry's name; every other name must lie below it. ``limit`` bounds
    the bytes written, each entry counting at least one block. The tree is complete in a
    temporary sibling before anything appears at ``local``; an existing directory is merged
    into, existing files are replaced. Everything belongs to the caller; set-id bits are
    dropped. Raises ``TransferError`` for anything hostile, damaged or too large, and
    ``HostPressureError`` for a full disk; ``local`` is then as it was.
    """
    scratch = local.with_name(f".{local.name[:40]}.{secrets.token_hex(4)}")
    try:
        local.parent.mkdir(parents=True, exist_ok=True)
        writer = _Unpacker(scratch, limit, root, [] if skipped is None else skipped)
        for entry in entries(source):
            writer.add(entry)
        writer.finish()
        _place(scratch, local)
    except TransferError:
        raise
    except TarStreamError as error:
        raise TransferError(f"cannot write {local}: {error}") from error
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise HostPressureError(
                f"disk full while writing {local}", fix="free space, then run the same command again"
            ) from error
        raise TransferError(f"cannot write {local}: {error}") from error
    finally:
        _discard(scratch)


def _discard(path: Path) -> None:
    """Remove what is left of a tree that did not take its place, or was merged into it."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


class _Unpacker:
    """Builds the tree below ``top``. Links are made last, so no write can pass through one."""

    def __init__(self, top: Path, limit: int, root: str, skipped: list[str]) -> None:
        self.top = top
        self._left = limit
        self._limit = limit
        self._root = PurePosixPath(root)
        self._skipped = skipped
        self._dirs: dict[str, int] = {}
        self._files: set[str] = set()
        self._links: dict[str, str] = {}

    def add(self, entry: Entry) -> None:
        info = entry.info
        name = self._relative(info.name)
        self._spend(max(info.size if info.isreg() else 0, BLOCK), info.name)
        if info.isdir():
            self._make_dirs(name)
            self._dirs[name] = info.mode & 0o777
            return
        if name in self._files or name in self._links or name in self._dirs:
            raise TransferError(f"the archive holds {info.name!r} twice")
        self._make_dirs(name.rpartition("/")[0] if name else None)
        if info.issym():
            self._links[name] = info.linkname
        elif info.islnk():
            self._hardlink(name, info)
        elif info.isreg():
            self._write(name, entry)
        else:
            self._skipped.append(name)

    def finish(self) -> None:
        if "" not in self._files and "" not in self._dirs:
            raise TransferError("the archive is empty")
        for name, target in self._links.items():
            self._check_link(name, target)
        for name, target in self._links.items():
            os.symlink(target, self.top / name)
        for name in sorted(self._dirs, reverse=True):  # children first: a parent may be read-only
            os.chmod(self.top / name, self._dirs[name] | stat.S_IRWXU)

    def _relative(self, name: str) -> str:
        """The entry's place below the root, ``""`` for the root itself."""
        pure = PurePosixPath(name)
        if pure.is_absolute() or ".." in pure.parts or "\0" in name:
            raise TransferError(f"the archive names {name!r}, outside the target")
        if self._root != PurePosixPath(ROOT):
            try:
                pure = pure.relative_to(self._root)
            except ValueError as error:
                raise TransferError(f"the archive names {name!r}, outside {self._root}") from error
        parts = pure.parts
        too_long = any(len(os.fsencode(part)) > _MAX_NAME for part in parts)
        if too_long or len(parts) > _MAX_DEPTH or len(os.fsencode(name)) > _MAX_PATH:
            raise TransferError(f"the archive holds a name that is too long or too deep: {name[:80]!r}…")
        return "/".join(parts)

    def _spend(self, size: int, name: str) -> None:
        self._left -= size
        if self._left < 0:
            raise TransferError(f"the archive is larger than the limit of {self._limit} bytes, at {name!r}")

    def _make_dirs(self, name: str | None) -> None:
        """Make ``name`` and its parents directories; ``None`` (above the root) makes nothing."""
        if name is None or name in self._dirs:
            return
        if name in self._files or name in self._links:
            raise TransferError(f"the archive uses {name!r} as a directory, but it is a file or a link")
        if name:
            self._make_dirs(name.rpartition("/")[0])
        os.mkdir(self.top / name)
        self._dirs[name] = 0o755

    def _write(self, name: str, entry: Entry) -> None:
        path = self.top / name if name else self.top
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with open(os.open(path, flags, 0o600), "wb", buffering=0) as handle:
            for chunk in entry.chunks():
                view = memoryview(chunk)
                while view:
                    view = view[handle.write(view) :]
            os.fchmod(handle.fileno(), entry.info.mode & 0o777 | stat.S_IRUSR | stat.S_IWUSR)
            os.utime(handle.fileno(), (entry.info.mtime, entry.info.mtime))
        self._files.add(name)

    def _hardlink(self, name: str, info: tarfile.TarInfo) -> None:
        target = self._relative(info.linkname)
        if target not in self._files or not name:
            raise TransferError(f"the archive links {info.name!r} to {info.linkname!r}, which is not in it")
        os.link(self.top / target, self.top / name, follow_symlinks=False)
        self._files.add(name)

    def _check_link(self, name: str, target: str) -> None:
        """Follow the link through the tree as it will be; refuse it when any step leaves."""
        at = name.split("/")[:-1]
        pending = self._link_parts(name, target)
        steps = 0
        while pending:
            part = pending.pop(0)
            if part == "..":
                if not at:
                    raise _leaves(name, target)
                at.pop()
            elif (link := self._links.get("/".join([*at, part]))) is not None:
                steps += 1
                if steps > _MAX_LINK_STEPS:
                    return  # a loop never arrives anywhere
                pending = [*self._link_parts(name, link), *pending]
            elif part not in ("", "."):
                at.append(part)

    @staticmethod
    def _link_parts(name: str, target: str) -> list[str]:
        if not target or target.startswith("/") or "\0" in target or len(os.fsencode(target)) > _MAX_PATH:
            raise _leaves(name, target)
        return target.split("/")


def _leaves(name: str, target: str) -> TransferError:
    return TransferError(f"the link {name!r} points outside its directory, to {target[:200]!r}")


def _place(tree: Path, local: Path) -> None:
    """Move a finished tree to its name; merge when both are directories."""
    if tree.is_dir() and local.is_dir() and not local.is_symlink():
        for item in os.scandir(tree):
            target = local / item.name
            if item.is_dir(follow_symlinks=False):
                _place(Path(item.path), target)
                continue
            if target.is_dir() and not target.is_symlink():
                shutil.rmtree(target)
            os.replace(item.path, target)
        return
    if tree.is_dir() and os.path.lexists(local):
        local.unlink()
    elif local.is_dir() and not local.is_symlink():
        raise TransferError(f"cannot download a file to {local}: it is a directory")
    os.replace(tree, local)
