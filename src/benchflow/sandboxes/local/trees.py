"""Directory trees of layers: copying and removing them whole, and the disk they are on."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from pathlib import Path

from benchflow.contracts.errors import HostPressureError, SandboxStartError


def copy_tree(source: Path, target: Path) -> None:
    """Copy the contents of a directory with owners, modes, links, attributes and whiteouts,
    sharing blocks where the file system can. ``target`` exists. Raises ``HostPressureError``
    for a full disk, else ``SandboxStartError``."""
    argv = ["cp", "-a", "--reflink=auto", "--", f"{source}/.", str(target)]
    done = subprocess.run(argv, capture_output=True, env={**os.environ, "LC_ALL": "C"}, check=False)
    if done.returncode:
        reason = done.stderr.decode("utf-8", "replace").strip().splitlines() or ["cp failed"]
        if "No space left" in reason[-1]:
            raise HostPressureError(f"disk full while copying {source}", fix="free space, then run again")
        raise SandboxStartError(f"cannot copy {source}: {reason[0]}")


def remove_tree(path: Path) -> None:
    """Overlay leaves its work folder with mode 000, and an agent may do the same to its own;
    root passes, an ordinary owner opens them first."""
    try:
        shutil.rmtree(path)
    except FileNotFoundError:
        if path.exists():
            raise
    except PermissionError:
        for folder, names, _ in os.walk(path):
            for name in names:
                inner = os.path.join(folder, name)
                if not os.path.islink(inner):
                    os.chmod(inner, 0o700)
        shutil.rmtree(path)


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
