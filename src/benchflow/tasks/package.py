"""Where the parts of a task package are, in either layout."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from benchflow.contracts.errors import UsageError
from benchflow.tasks.problems import Findings, Problem

_COMPOSE = ("docker-compose.yaml", "docker-compose.yml", "compose.yaml", "compose.yml")


@dataclass(frozen=True, slots=True)
class Folder:
    """A part that enters the sandbox in its own phase, and the path it gets there."""

    path: Path
    target: str


@dataclass(frozen=True, slots=True)
class Package:
    root: Path
    layout: Literal["task.md", "split"]

    @property
    def definition(self) -> str:
        return "task.md" if self.layout == "task.md" else "task.toml"

    def file(self, path: Path) -> str:
        return path.relative_to(self.root).as_posix()

    def environment(self) -> Path | None:
        folder = self.root / "environment"
        return folder if folder.is_dir() else None

    def dockerfile(self) -> Path | None:
        file = self.root / "environment" / "Dockerfile"
        return file if file.is_file() else None

    def compose(self) -> Path | None:
        return next((f for name in _COMPOSE if (f := self.root / "environment" / name).is_file()), None)

    def verifier(self, named: str | None = None) -> Folder | None:
        return self._folder(named, ("verifier", "tests"))

    def oracle(self, named: str | None = None) -> Folder | None:
        return self._folder(named, ("oracle", "solution"))

    def _folder(self, named: str | None, names: tuple[str, str]) -> Folder | None:
        """The native name wins when both exist, however empty it is; a split package has
        the second name only."""
        if named:
            inside = _inside(self.root, named)
            return Folder(inside, f"/{names[0]}") if inside and inside.is_dir() else None
        for name in names if self.layout == "task.md" else names[1:]:
            if (self.root / name).is_dir():
                return Folder(self.root / name, f"/{name}")
        return None


def is_task(folder: Path) -> bool:
    """True for a folder that means to be a task, complete or not."""
    return any((folder / name).is_file() for name in ("task.md", "task.toml", "instruction.md"))


def open_package(path: Path | str) -> Package:
    """Find the definition. ``task.md`` wins when both layouts are there.

    Raises ``UsageError`` for a path that is no task folder.
    """
    root = Path(path)
    if root.is_file() and root.name in ("task.md", "task.toml"):
        root = root.parent
    if not root.is_dir():
        kind = "is not a folder" if root.exists() else "does not exist"
        raise UsageError(f"task {str(path)!r} {kind}", fix="give the folder of a task")
    root = root.resolve()
    if (root / "task.md").is_file():
        return Package(root, "task.md")
    if is_task(root):
        return Package(root, "split")
    raise UsageError(
        f"{str(path)!r} is not a task: it has neither task.md nor task.toml",
        fix="give the folder of a task, or a folder of such folders",
    )


def check_links(package: Package, findings: Findings) -> None:
    """Report symbolic links that leave the package: their targets would be copied into
    images and sandboxes."""
    for folder, folders, files in os.walk(package.root):
        for name in sorted([*folders, *files]):
            path = Path(folder, name)
            if path.is_symlink() and not Path(os.path.realpath(path)).is_relative_to(package.root):
                file = package.file(path)
                findings.problems.append(Problem(f"a link that leaves the task: {os.readlink(path)}", file))


def _inside(root: Path, named: str) -> Path | None:
    path = Path(os.path.realpath(root / named))
    return path if path.is_relative_to(root) and path != root else None
