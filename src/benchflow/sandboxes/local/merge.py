"""What stacked overlay layers mean, read without mounting them.

A whiteout hides a name of the layers below: a character device 0/0, or an empty file
with the attribute ``overlay.whiteout``. An opaque directory hides everything below it.
"""

from __future__ import annotations

import errno
import os
import posixpath
import shutil
import stat
from collections.abc import Sequence
from pathlib import Path

from benchflow.sandboxes.local.trees import copy

_SPACES = ("user.overlay.", "trusted.overlay.")
_MAX_LINKS = 40


def is_whiteout(path: str | Path, status: os.stat_result) -> bool:
    if stat.S_ISCHR(status.st_mode):
        return status.st_rdev == 0
    if stat.S_ISREG(status.st_mode) and status.st_size == 0:
        return any(_attribute(path, space + "whiteout") is not None for space in _SPACES)
    return False


def is_opaque(directory: str | Path) -> bool:
    return any(_attribute(directory, space + "opaque") == b"y" for space in _SPACES)


def make_whiteout(path: str | Path) -> None:
    """Needs no privilege since Linux 5.8."""
    os.mknod(path, stat.S_IFCHR, 0)


def make_opaque(directory: str | Path) -> None:
    os.setxattr(directory, "user.overlay.opaque", b"y", follow_symlinks=False)


def merge_onto(layer: str | Path, target: str | Path) -> None:
    """Apply ``layer`` on the directory ``target``, as if stacked on it. Whiteouts and opaque
    marks stay, because layers below ``target`` may still need hiding. Files are hard links
    where the file system allows, as layers never change, and copies elsewhere."""
    _merge(os.fspath(layer), os.fspath(target), fresh=False)


def _merge(layer: str, target: str, *, fresh: bool) -> None:
    """``fresh``: ``target`` is known to be empty, so nothing in it needs looking at."""
    if is_opaque(layer):
        if not fresh:
            _empty(target)
        make_opaque(target)
    with os.scandir(layer) as items:
        for item in items:
            place = f"{target}/{item.name}"
            below = None if fresh else _status(place)
            if item.is_dir(follow_symlinks=False):
                _merge_directory(item.path, place, below)
                continue
            if below is not None:
                _remove(place, below)
            _link_or_copy(item.path, place)
    _copy_metadata(layer, target)


def _merge_directory(source: str, target: str, below: os.stat_result | None) -> None:
    exists = below is not None and stat.S_ISDIR(below.st_mode)
    if not exists:
        if below is not None:
            os.unlink(target)
        os.mkdir(target)
        if below is not None:
            make_opaque(target)  # what stood here also hid the layers below
    _merge(source, target, fresh=not exists)


def _link_or_copy(source: str, target: str) -> None:
    """A whiteout is linked like any file: its kind, or its attribute, is the inode's."""
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError as error:
        if error.errno not in (errno.EXDEV, errno.EMLINK):
            raise
        copy(source, target)


def _copy_metadata(source: str, target: str) -> None:
    status = os.lstat(source)
    ours = os.lstat(target)
    if (ours.st_uid, ours.st_gid) != (status.st_uid, status.st_gid):
        os.chown(target, status.st_uid, status.st_gid)
    for name in os.listxattr(source, follow_symlinks=False):
        if not name.startswith(_SPACES):
            os.setxattr(target, name, os.getxattr(source, name, follow_symlinks=False))
    os.chmod(target, stat.S_IMODE(status.st_mode))
    os.utime(target, ns=(status.st_atime_ns, status.st_mtime_ns))


def _empty(directory: str) -> None:
    with os.scandir(directory) as items:
        for item in items:
            _remove(item.path, item.stat(follow_symlinks=False))


def _status(path: str) -> os.stat_result | None:
    try:
        return os.lstat(path)
    except FileNotFoundError:
        return None


def _remove(path: str, status: os.stat_result) -> None:
    if stat.S_ISDIR(status.st_mode):
        shutil.rmtree(path)
    else:
        os.unlink(path)


def _attribute(path: str | Path, name: str) -> bytes | None:
    try:
        return os.getxattr(path, name, follow_symlinks=False)
    except OSError:
        return None


class View:
    """The file tree that a stack of layers shows, for reading from the host.

    Paths are absolute inside. Links are followed inside the tree only, ``..`` stops at
    its root, so no path of an image can lead to a file of the host.
    """

    def __init__(self, layers: Sequence[Path], binds: Sequence[tuple[Path, str]] = ()) -> None:
        self._top_first = tuple(reversed(layers))
        self._binds = tuple((source, target.rstrip("/")) for source, target in reversed(binds))

    def find(self, path: str) -> Path | None:
        """The host path of what a canonical ``path`` (no links in it) shows; None when absent."""
        bound = self.bind_of(path)
        if bound is not None:
            source, target = bound
            place = source / path[len(target) :].lstrip("/")
            return place if os.path.lexists(place) else None
        parts = [part for part in path.split("/") if part]
        for layer in self._top_first:
            place, final = _look(layer, parts)
            if final:
                return place
        return None

    def bind_of(self, path: str) -> tuple[Path, str] | None:
        """The read-only bind that covers ``path``, innermost first."""
        for source, target in self._binds:
            if path == target or path.startswith(f"{target}/"):
                return source, target
        return None

    def resolve(self, path: str) -> str:
        """Follow every link of ``path``; parts that do not exist are kept as they are."""
        pending = [part for part in path.split("/") if part]
        at: list[str] = []
        links = 0
        while pending:
            part = pending.pop(0)
            if part in ("", "."):
                continue
            if part == "..":
                at = at[:-1]
                continue
            place = self.find("/" + "/".join([*at, part]))
            if place is not None and place.is_symlink():
                links += 1
                if links > _MAX_LINKS:
                    raise OSError(errno.ELOOP, f"too many links in {path}")
                target = os.readlink(place)
                if target.startswith("/"):
                    at = []
                pending = [*target.split("/"), *pending]
            else:
                at.append(part)
        return "/" + "/".join(at)

    def is_dir(self, path: str) -> bool:
        place = self.find(self.resolve(path))
        return place is not None and place.is_dir() and not place.is_symlink()

    def read_text(self, path: str) -> str | None:
        """The text of a regular file, following links inside; None when there is none."""
        place = self.find(self.resolve(path))
        if place is None or place.is_symlink() or not place.is_file():
            return None
        return place.read_text("utf-8", "replace")


def _look(layer: Path, parts: list[str]) -> tuple[Path | None, bool]:
    """Where a layer has ``parts``, and whether that answer is final (nothing below counts)."""
    place = str(layer)
    opaque = False
    for index, part in enumerate(parts):
        place = posixpath.join(place, part)
        try:
            status = os.lstat(place)
        except (FileNotFoundError, NotADirectoryError):
            return None, opaque
        if is_whiteout(place, status):
            return None, True
        if stat.S_ISDIR(status.st_mode):
            opaque = opaque or is_opaque(place)
        elif index < len(parts) - 1:
            return None, True
    return Path(place), True
