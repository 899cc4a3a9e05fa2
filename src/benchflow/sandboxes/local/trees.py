"""Directory trees of layers: copying and removing them whole, and the disk they are on."""

from __future__ import annotations

import errno
import os
import subprocess
import uuid
from pathlib import Path

from benchflow.contracts.errors import HostPressureError, SandboxStartError

_LONGEST = 1024
"""Characters of a path that may get one more name; the kernel takes 4095 bytes."""


def copy_tree(source: Path, target: Path) -> None:
    """Copy the contents of a directory to ``target``, which exists; else as ``copy``."""
    copy(f"{source}/.", target)


def copy(source: str | Path, target: str | Path) -> None:
    """Copy a file or a tree with owners, modes, links, attributes and whiteouts, sharing blocks
    where the file system can. Raises ``HostPressureError`` for a full disk, else
    ``SandboxStartError``."""
    argv = ["cp", "-a", "--reflink=auto", "--", str(source), str(target)]
    done = subprocess.run(argv, capture_output=True, env={**os.environ, "LC_ALL": "C"}, check=False)
    if done.returncode:
        reason = done.stderr.decode("utf-8", "replace").strip().splitlines() or ["cp failed"]
        if "No space left" in reason[-1]:
            raise HostPressureError(f"disk full while copying {source}", fix="free space, then run again")
        raise SandboxStartError(f"cannot copy {source}: {reason[0]}")


def remove_tree(path: Path) -> None:
    """Remove a tree that nothing writes to, however deep: an agent may have nested folders
    beyond what a path, a call stack or one descriptor per level could hold. Overlay leaves
    its work folder with mode 000, and an agent may do the same to its own; root passes, an
    ordinary owner opens them first."""
    try:
        _remove(os.fspath(path), opening=os.geteuid() != 0)
    except FileNotFoundError:
        if path.exists():
            raise


def _remove(top: str, *, opening: bool) -> None:
    folders = [top]
    for folder in folders:  # grows meanwhile: parents come before what is in them
        if opening:
            os.chmod(folder, 0o700)
        with os.scandir(folder) as items:
            for item in items:
                if not item.is_dir(follow_symlinks=False):
                    os.unlink(item.path)
                elif len(item.path) < _LONGEST:
                    folders.append(item.path)
                else:
                    folders.append(f"{top}/{uuid.uuid4().hex}")
                    os.rename(item.path, folders[-1])
    for folder in reversed(folders):
        os.rmdir(folder)


def is_tmpfs(path: Path) -> bool:
    """Whether a tmpfs is mounted at exactly ``path``."""
    kind = ""
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields, _, rest = line.partition(" - ")
        if fields.split()[4] == str(path):
            kind = rest.split()[0]  # a later mount covers an earlier one
    return kind == "tmpfs"


def pressure(error: OSError, path: Path) -> OSError:
    """``error`` itself, or what it means when the disk is full."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return HostPressureError(f"disk full while writing {path}", fix="free space, then run again")
    return error
