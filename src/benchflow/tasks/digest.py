"""The content digest that public dataset registries pin."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from stat import S_ISREG

_LEFT_OUT = ".benchflow-source.json"

Signature = tuple[tuple[str, int, int, int], ...]
_cache: dict[Path, tuple[Signature, str]] = {}


def task_digest(task: Path) -> str:
    """``sha256:<hex>`` over every regular file below ``task``, at any depth.

    Files are taken in code-point order of their POSIX relative path; each feeds its path,
    a zero byte and the raw sha256 of its content. Links are neither read nor followed;
    modes and empty folders do not count. Read again only when a size, time or inode changed.
    """
    files = sorted(_regular_files(task))
    signature = tuple((name, stat.st_size, stat.st_mtime_ns, stat.st_ino) for name, stat in files)
    known = _cache.get(task)
    if known and known[0] == signature:
        return known[1]
    total = hashlib.sha256()
    for name, _ in files:
        with (task / name).open("rb") as handle:
            content = hashlib.file_digest(handle, "sha256").digest()
        total.update(os.fsencode(name) + b"\0" + content)
    digest = f"sha256:{total.hexdigest()}"
    _cache[task] = signature, digest
    return digest


def _regular_files(root: Path) -> Iterator[tuple[str, os.stat_result]]:
    stack = [""]
    while stack:
        folder = stack.pop()
        with os.scandir(root / folder) as entries:
            for entry in entries:
                name = folder + entry.name
                stat = entry.stat(follow_symlinks=False)
                if entry.is_dir(follow_symlinks=False):
                    stack.append(f"{name}/")
                elif S_ISREG(stat.st_mode) and entry.name != _LEFT_OUT:
                    yield name, stat
