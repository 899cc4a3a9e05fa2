"""The build context: which files a COPY may take, what they hold, what is left out.

Every link must end inside the context; the content of a file is hashed once per state of
that file.
"""

from __future__ import annotations

import fnmatch
import hashlib
import os
import re
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from benchflow.contracts.errors import ImageBuildError, TransferError
from benchflow.sandboxes.transfer import inner_link

Signature = tuple[tuple[str, int, int, int, int, int], ...]


@dataclass(frozen=True, slots=True)
class Item:
    """A file, directory or link; ``name`` is relative to the context, ``""`` its root."""

    name: str
    path: Path
    status: os.stat_result
    link: str | None = None

    @property
    def is_dir(self) -> bool:
        return stat.S_ISDIR(self.status.st_mode)

    def fingerprint(self) -> str:
        """Changes with kind, permissions or content."""
        mode = stat.S_IMODE(self.status.st_mode)
        if self.link is not None:
            return f"l {self.link}"
        if self.is_dir:
            return f"d {mode:o}"
        at = self.status
        content = _content(str(self.path), at.st_size, at.st_mtime_ns, at.st_ctime_ns, at.st_ino)
        return f"f {mode:o} {content}"


@lru_cache(maxsize=100_000)
def _content(path: str, size: int, mtime: int, ctime: int, inode: int) -> str:
    """The arguments but the path serve as the cache's key."""
    with open(path, "rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


class BuildContext:
    """A snapshot of the folder's listing, taken when made. Special files are left out.

    Raises ``ImageBuildError`` for a link that leaves the folder, unless ``keep_links``: then
    it stays a link, for a builder that follows none on this machine.
    """

    def __init__(self, root: Path, exclude: Sequence[str] = (), *, keep_links: bool = False) -> None:
        self.root = Path(os.path.realpath(root))
        self._keep_links = keep_links
        self._ignored = ignore_matcher(_ignore_lines(self.root), exclude)
        self.items: dict[str, Item] = {}
        for item in self._walk(self.root, ""):
            self.items[item.name] = item

    def _walk(self, folder: Path, name: str) -> Iterator[Item]:
        yield Item(name, folder, os.stat(folder))
        for entry in sorted(os.scandir(folder), key=lambda found: found.name):
            inner = f"{name}/{entry.name}" if name else entry.name
            path = folder / entry.name
            ignored = self._ignored(inner)
            if entry.is_dir(follow_symlinks=False):
                if ignored and not self._ignored.has_exceptions:
                    continue
                found = list(self._walk(path, inner))
                if not ignored or len(found) > 1:
                    yield from found
            elif not ignored:
                yield from self._leaf(inner, path)

    def _leaf(self, name: str, path: Path) -> Iterator[Item]:
        status = path.lstat()
        if stat.S_ISLNK(status.st_mode):
            try:
                yield Item(name, path, status, inner_link(self.root, path))
            except TransferError as error:
                if self._keep_links:
                    yield Item(name, path, status, os.readlink(path))
                    return
                raise ImageBuildError(f"build context: {error.message}", fix=error.fix) from error
        elif stat.S_ISREG(status.st_mode):
            yield Item(name, path, status)

    def match(self, pattern: str) -> list[Item]:
        """The items a COPY source names, links among them followed inside the context.
        An empty list when nothing matches; ``ImageBuildError`` for a source outside."""
        name = os.path.normpath(pattern.lstrip("/"))
        if name == "." or not name:
            return [self.items[""]]
        if name.startswith(".."):
            raise ImageBuildError(f"the source {pattern!r} is outside the build context")
        if name in self.items or self._through_link(name) is not None:
            found = [self.items.get(name) or self._through_link(name)]
        else:
            parts = name.split("/")
            found = [item for item in self.items.values() if _matches(item.name, parts)]
        return [followed for item in found if item and (followed := self._followed(item))]

    def below(self, item: Item) -> Iterator[Item]:
        """Everything inside a directory item, parents first."""
        prefix = f"{item.name}/" if item.name else ""
        for name, inner in self.items.items():
            if name and name.startswith(prefix) and name != item.name:
                yield inner

    def _followed(self, item: Item) -> Item | None:
        return self._through_link(item.name) if item.link is not None else item

    def _through_link(self, name: str) -> Item | None:
        end = Path(os.path.realpath(self.root / name))
        if end != self.root and self.root not in end.parents:
            return None
        inside = "" if end == self.root else str(end.relative_to(self.root))
        found = self.items.get(inside)
        return found if found is not None and found.link is None else None


def signature(root: Path) -> Signature:
    """Cheap identity of a folder's state: names, kinds, sizes and change times of all in it."""
    found: list[tuple[str, int, int, int, int, int]] = []
    pending = [str(root)]
    while pending:
        folder = pending.pop()
        with os.scandir(folder) as entries:
            for entry in entries:
                status = entry.stat(follow_symlinks=False)
                found.append(
                    (
                        entry.path,
                        status.st_mode,
                        status.st_size,
                        status.st_mtime_ns,
                        status.st_ctime_ns,
                        status.st_ino,
                    )
                )
                if stat.S_ISDIR(status.st_mode):
                    pending.append(entry.path)
    found.sort()
    return tuple(found)


class _Ignore:
    """Decides by the last pattern that matches a path or one of its parents."""

    def __init__(self, rules: list[tuple[re.Pattern[str], bool]]) -> None:
        self._rules = rules
        self.has_exceptions = any(not ignore for _, ignore in rules)

    def __call__(self, name: str) -> bool:
        parts = name.split("/")
        prefixes = ["/".join(parts[:end]) for end in range(1, len(parts) + 1)]
        ignored = False
        for pattern, ignore in self._rules:
            if ignore != ignored and any(pattern.fullmatch(prefix) for prefix in prefixes):
                ignored = ignore
        return ignored


def ignore_matcher(lines: Sequence[str], exclude: Sequence[str] = ()) -> _Ignore:
    """Patterns of a ``.dockerignore``, then plain paths that nothing can bring back."""
    rules: list[tuple[re.Pattern[str], bool]] = []
    for raw in lines:
        line = raw.strip()
        if not line or raw.startswith("#"):
            continue
        ignore = not line.startswith("!")
        pattern = os.path.normpath(line.removeprefix("!").strip()).lstrip("/")
        if pattern not in ("", "."):
            rules.append((_glob(pattern), ignore))
    rules += [(re.compile(re.escape(os.path.normpath(path).lstrip("/"))), True) for path in exclude]
    return _Ignore(rules)


def _ignore_lines(root: Path) -> list[str]:
    try:
        return (root / ".dockerignore").read_text("utf-8-sig").splitlines()
    except FileNotFoundError:
        return []


_WILD = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
"""``*`` and ``?`` stay within a path component; ``**`` spans any number of them."""
_PIECE = re.compile(r"\*\*/|\*\*|\[.[^\]]*\]|\\.|.", re.DOTALL)


def _glob(pattern: str) -> re.Pattern[str]:
    return re.compile("".join(map(_translated, _PIECE.findall(pattern))), re.DOTALL)


def _translated(piece: str) -> str:
    if piece in _WILD:
        return _WILD[piece]
    if piece[0] == "[" and len(piece) > 1:
        inner = piece[1:-1].replace("\\", r"\\")
        return f"[^{inner[1:]}]" if inner.startswith(("!", "^")) else f"[{inner}]"
    return re.escape(piece[-1])


def _matches(name: str, parts: list[str]) -> bool:
    own = name.split("/")
    return len(own) == len(parts) and all(
        fnmatch.fnmatchcase(piece, pattern) for piece, pattern in zip(own, parts, strict=True)
    )
