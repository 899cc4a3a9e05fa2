"""Put files of COPY and ADD into an upper, as if written inside the container.

The destination is resolved in the merged tree (layers below plus this upper), so links
of the image are followed inside it, and parents keep the permissions they have below.
"""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchflow.contracts.errors import ImageBuildError
from benchflow.sandboxes.local.layers import Rootfs
from benchflow.sandboxes.local.merge import View, is_whiteout


@dataclass(frozen=True, slots=True)
class Placed:
    """One thing to write: ``target`` is its absolute path inside, ``link`` its link target."""

    source: Path
    target: str
    status: os.stat_result
    link: str | None = None


class UpperWriter:
    """Writes into ``upper`` on top of ``rootfs``. ``owner`` and ``mode`` apply to everything
    written when given; otherwise owner 0:0 and the source's permissions.

    ``foreign`` collects the paths inside whose owner the caller may not set on the host.
    """

    def __init__(
        self, rootfs: Rootfs, upper: Path, *, owner: tuple[int, int] | None = None, mode: int | None = None
    ) -> None:
        self.view = View((*rootfs.lowers, upper), rootfs.binds)
        self.foreign: list[str] = []
        self._upper = upper
        self._owner = owner or (0, 0)
        self._mode = mode
        self._resolutions: dict[str, str] = {}
        """Parents resolved so far; forgotten when a link is written."""

    def directory(self, path: str) -> None:
        """Make a directory and its parents where there is none; existing ones stay as they are."""
        where = self._resolved(path)
        if self.view.find(where) is None:
            self._refuse_read_only(where)
            self._parents(where)
            self._make(where)
            self._own(where, self._mode if self._mode is not None else 0o755)

    def put(self, item: Placed) -> None:
        """Write one file, directory or link, replacing a file or link that is there."""
        parent, _, name = item.target.rstrip("/").rpartition("/")
        where = f"{self._resolved(parent or '/').rstrip('/')}/{name}"
        if item.link is None and stat.S_ISDIR(item.status.st_mode):
            self._put_directory(where, item)
            return
        below = self.view.find(where)
        if below is not None and below.is_dir() and not below.is_symlink():
            raise ImageBuildError(f"cannot replace the directory {where} by a file")
        self._refuse_read_only(where)
        self._parents(where)
        target = self._on_upper(where)
        if os.path.lexists(target):
            target.unlink()
        if item.link is not None:
            target.symlink_to(item.link)
            self._resolutions.clear()
            self._own(where, None)
            return
        shutil.copyfile(item.source, target)
        self._own(where, self._mode if self._mode is not None else stat.S_IMODE(item.status.st_mode))
        os.utime(target, ns=(item.status.st_mtime_ns, item.status.st_mtime_ns))

    def _put_directory(self, where: str, item: Placed) -> None:
        where = self._resolved(where)
        below = self.view.find(where)
        if below is not None and not below.is_dir():
            raise ImageBuildError(f"cannot replace the file {where} by a directory")
        self._refuse_read_only(where)
        if below is None:
            self._parents(where)
            self._make(where)
        else:
            self._parents(f"{where.rstrip('/')}/.")
        if where != "/" and (below is None or self._mode is not None):
            self._own(where, self._mode if self._mode is not None else stat.S_IMODE(item.status.st_mode))

    def _resolved(self, path: str) -> str:
        known = self._resolutions.get(path)
        if known is None:
            try:
                known = self._resolutions[path] = self.view.resolve(path)
            except OSError as error:
                raise ImageBuildError(f"cannot write {path}: {error.strerror}") from error
        return known

    def _on_upper(self, path: str) -> Path:
        return self._upper / path.lstrip("/")

    def _make(self, where: str) -> None:
        target = self._on_upper(where)
        if os.path.lexists(target):
            if not is_whiteout(target, target.lstat()):
                raise ImageBuildError(f"cannot make the directory {where}: a file is in the way")
            target.unlink()
        target.mkdir()

    def _parents(self, where: str) -> None:
        """Make the upper's own copies of the directories above ``where``."""
        parts = [part for part in where.split("/")[:-1] if part]
        for end in range(1, len(parts) + 1):
            path = "/" + "/".join(parts[:end])
            target = self._on_upper(path)
            if target.is_dir() and not target.is_symlink():
                continue
            below = self.view.find(path)
            if below is not None and not below.is_dir():
                raise ImageBuildError(f"cannot write {where}: {path} is a file")
            self._make(path)
            if below is None:
                self._own(path, 0o755)
                continue
            status = below.stat()
            if os.geteuid() == 0:
                os.chown(target, status.st_uid, status.st_gid)
            target.chmod(stat.S_IMODE(status.st_mode))

    def _refuse_read_only(self, where: str) -> None:
        bound = self.view.bind_of(where)
        if bound is not None:
            raise ImageBuildError(
                f"cannot write {where}: the host base shows {bound[1]} read-only",
                fix="import a base for this image (bench sandbox image import), or use --sandbox docker",
            )

    def _own(self, where: str, mode: int | None) -> None:
        target = self._on_upper(where)
        if os.geteuid() == 0:
            os.chown(target, *self._owner, follow_symlinks=False)
        elif self._owner != (0, 0):
            self.foreign.append(where)
        if mode is not None:
            target.chmod(mode)


def parse_owner(view: View, text: str) -> tuple[int, int]:
    """``user[:group]`` by the image's own accounts. Without a group, a user's own group, or
    the number of a numeric user. Raises ``ValueError`` for an unknown name."""
    user, colon, group = text.partition(":")
    accounts = _table(view, "/etc/passwd")
    account = accounts.get(user)
    if account is None and user.isdigit():
        account = next((row for row in accounts.values() if len(row) > 3 and row[2] == user), None)
    if account is None and not user.isdigit():
        raise ValueError(f"the image has no user {user!r}")
    uid = int(user) if user.isdigit() else int(account[2] if account else 0)
    if not colon:
        return uid, uid if account is None or user.isdigit() else int(account[3])
    if group.isdigit():
        return uid, int(group)
    row = _table(view, "/etc/group").get(group)
    if row is None:
        raise ValueError(f"the image has no group {group!r}")
    return uid, int(row[2])


def _table(view: View, path: str) -> dict[str, Sequence[str]]:
    rows = (line.split(":") for line in (view.read_text(path) or "").splitlines())
    return {row[0]: row for row in rows if len(row) > 2}
