"""Unpack the tar of a root file system, or one layer of an image, into a directory.

Unlike a download, such a tree keeps owners, links to anywhere (they mean places inside)
and, as a layer, deletes by whiteouts. Links are never followed out of the directory.
"""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from benchflow.sandboxes.local.merge import View
from benchflow.sandboxes.tarstream import Entry, TarStreamError, entries

_WHITEOUT = ".wh."
_OPAQUE = ".wh..wh..opq"


def unpack_rootfs(
    source: BinaryIO, top: Path, *, whiteouts: bool = False, note: Callable[[str], None] = lambda text: None
) -> None:
    """Unpack on what is there. Owners are kept when the caller is root; devices, FIFOs and
    sockets are left out with a ``note``. Raises ``TarStreamError`` for a damaged archive or a
    name that leaves ``top``, ``OSError`` from the disk."""
    writer = _Writer(top, whiteouts, note)
    for entry in entries(source):
        writer.add(entry)


class _Writer:
    def __init__(self, top: Path, whiteouts: bool, note: Callable[[str], None]) -> None:
        self._top = top
        self._whiteouts = whiteouts
        self._note = note
        self._view = View([top])
        self._root = os.geteuid() == 0
        self._real: set[str] = {""}
        """Paths known to be real directories; emptied whenever one may have stopped being so."""
        self._written: set[Path] = set()

    def add(self, entry: Entry) -> None:
        info = entry.info
        path = self._place(info.name)
        if path is None:
            if info.isdir():
                self._set_metadata(self._top, entry)
            return
        if self._whiteouts and path.name.startswith(_WHITEOUT):
            self._delete(path)
            return
        self._written.add(path)
        if info.isdir():
            if not path.is_dir() or path.is_symlink():
                self._clear(path)
                path.mkdir()
        elif info.issym():
            self._clear(path)
            os.symlink(info.linkname, path)
        elif info.islnk():
            source = self._place(info.linkname)
            if source is None or not os.path.lexists(source) or (source.is_dir() and not source.is_symlink()):
                raise TarStreamError(f"{info.name!r} is a hard link to {info.linkname!r}, which is missing")
            if source != path:
                self._clear(path)
                os.link(source, path, follow_symlinks=False)
            return
        elif info.isreg():
            self._clear(path)
            with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as out:
                shutil.copyfileobj(entry, out)
        else:
            self._note(f"left out the special file /{path.relative_to(self._top)}")
            return
        self._set_metadata(path, entry)

    def _place(self, name: str) -> Path | None:
        """Where a member goes, its parents made and followed inside; None for the root itself."""
        parts = [part for part in PurePosixPath(name).parts if part != "/"]
        if ".." in parts or "\0" in name:
            raise TarStreamError(f"the archive names {name!r}, outside its root")
        if not parts:
            return None
        parent = "/".join(parts[:-1])
        if parent not in self._real:
            parent = self._view.resolve(f"/{parent}").lstrip("/")
            self._make_parents(parent)
            self._real.add(parent)
        return self._top / parent / parts[-1]

    def _make_parents(self, parent: str) -> None:
        at = self._top
        for part in PurePosixPath(parent).parts:
            at = at / part
            if at.is_symlink() or (os.path.lexists(at) and not at.is_dir()):
                raise TarStreamError(
                    f"the archive uses {parent!r} as a directory, but it is a file or a loop"
                )
            at.mkdir(exist_ok=True)

    def _delete(self, path: Path) -> None:
        if path.name == _OPAQUE:
            for item in list(path.parent.iterdir()):
                if item not in self._written:
                    self._clear(item)
            return
        hidden = path.with_name(path.name.removeprefix(_WHITEOUT))
        if hidden.name and not hidden.name.startswith(_WHITEOUT) and hidden not in self._written:
            self._clear(hidden)

    def _clear(self, path: Path) -> None:
        """Remove what stands at ``path``."""
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
            self._real = {""}
        elif os.path.lexists(path):
            path.unlink()
            self._real = {""}

    def _set_metadata(self, path: Path, entry: Entry) -> None:
        info = entry.info
        if self._root:
            os.chown(path, info.uid, info.gid, follow_symlinks=False)
        if info.issym():
            return
        mode = stat.S_IMODE(info.mode)
        if not self._root:
            mode = mode & 0o777 | (0o700 if info.isdir() else 0o600)
        path.chmod(mode)
        if not info.isdir():
            os.utime(path, (info.mtime, info.mtime))
