"""What each Dockerfile instruction means: settings carried along, files to copy."""

from __future__ import annotations

import os
import posixpath
import tarfile
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchflow.contracts.errors import ImageBuildError
from benchflow.sandboxes.context import BuildContext, Item
from benchflow.sandboxes.dockerfile import DOCKER_ADVICE, Instruction, expand, pairs, words
from benchflow.sandboxes.local.copying import Placed, UpperWriter
from benchflow.sandboxes.local.oci import uncompressed
from benchflow.sandboxes.local.rootfs_tar import unpack_rootfs
from benchflow.sandboxes.runtime import MACHINE


@dataclass(slots=True)
class BuildState:
    """The settings in force at a point of the Dockerfile."""

    escape: str = "\\"
    env: dict[str, str] = field(default_factory=dict[str, str])
    args: dict[str, str | None] = field(default_factory=dict[str, str | None])
    global_args: dict[str, str | None] = field(default_factory=dict[str, str | None])
    workdir: str | None = None
    user: str | None = None
    shell: list[str] = field(default_factory=lambda: ["/bin/sh", "-c"])
    notes: list[str] = field(default_factory=list[str])
    in_stage: bool = False

    def values(self) -> dict[str, str]:
        """What ``$NAME`` means here: ENV wins over ARG."""
        return {**self.declared_args(), **self.env}

    def declared_args(self) -> dict[str, str]:
        known = self.args if self.in_stage else self.global_args
        return {name: value for name, value in known.items() if value is not None and name not in self.env}

    def expand(self, text: str) -> str:
        return expand(text, self.values(), self.escape)

    def words(self, text: str) -> list[str]:
        return words(text, self.values(), self.escape)

    def absolute(self, path: str) -> str:
        """``path`` below the working directory, without ``.`` and ``..``; a trailing slash stays."""
        joined = posixpath.normpath(posixpath.join("/", self.workdir or "/", path))
        joined = "/" + joined.lstrip("/")
        return joined + "/" if path.endswith(("/", "/.")) and joined != "/" else joined

    def begin_stage(self, instruction: Instruction) -> str:
        """The image that FROM names."""
        parts = self.words(instruction.value)
        wanted = self.expand(instruction.flags.get("platform", ""))
        if wanted not in ("", f"linux/{MACHINE}"):
            raise ImageBuildError(f"FROM --platform={wanted} is not this machine's", fix=DOCKER_ADVICE)
        if (
            not parts
            or not parts[0]
            or (len(parts) != 1 and not (len(parts) == 3 and parts[1].upper() == "AS"))
        ):
            raise ValueError("expected FROM IMAGE or FROM IMAGE AS NAME")
        self.in_stage = True
        return parts[0]


def apply_setting(state: BuildState, instruction: Instruction) -> None:
    """ENV, ARG, USER, SHELL and those that only describe. Raises ``ValueError`` when malformed."""
    match instruction.keyword:
        case "ENV":
            state.env |= dict(pairs(instruction.value, state.values(), state.escape))
        case "ARG":
            _declare(state, instruction)
        case "USER":
            state.user = state.expand(instruction.value) or None
        case "SHELL":
            if not instruction.argv:
                raise ValueError('SHELL needs a list, such as ["/bin/bash", "-c"]')
            state.shell = instruction.argv
        case "LABEL":
            pairs(instruction.value, state.values(), state.escape)
        case "VOLUME":
            state.notes.append(f"VOLUME {instruction.value}: kept as an ordinary directory")
        case "ENTRYPOINT":
            state.notes.append("ENTRYPOINT is not started: a sandbox runs only what is executed in it")
        case _:
            return  # CMD, EXPOSE, STOPSIGNAL, HEALTHCHECK, MAINTAINER say nothing about files


def _declare(state: BuildState, instruction: Instruction) -> None:
    known = state.args if state.in_stage else state.global_args
    for word in state.words(instruction.value):
        name, equals, default = word.partition("=")
        if not name:
            raise ValueError("expected ARG NAME or ARG NAME=VALUE")
        inherited = state.global_args.get(name) if state.in_stage else None
        known[name] = default if equals else inherited or _PREDEFINED.get(name)


_PREDEFINED: Mapping[str, str] = {
    **{f"{side}OS": "linux" for side in ("TARGET", "BUILD")},
    **{f"{side}ARCH": MACHINE for side in ("TARGET", "BUILD")},
    **{f"{side}PLATFORM": f"linux/{MACHINE}" for side in ("TARGET", "BUILD")},
}


@dataclass(frozen=True, slots=True)
class CopyPlan:
    """What a COPY or ADD takes from the context, and where it goes."""

    context: BuildContext
    sources: tuple[Item, ...]
    destination: str
    into_directory: bool
    extract: bool
    owner: str | None
    mode: int | None

    def material(self) -> Any:
        """Everything that decides the result, for the layer's name."""
        files = [
            [item.name, [[inner.name, inner.fingerprint()] for inner in (item, *self._inside(item))]]
            for item in self.sources
        ]
        return [files, self.destination, self.into_directory, self.extract, self.mode]

    def write(self, writer: UpperWriter) -> None:
        """Put it all into the writer's upper. Runs for as long as the files take."""
        into = self.into_directory or writer.view.is_dir(self.destination)
        for item in self.sources:
            if item.is_dir:
                self._write_tree(writer, item)
            elif self.extract and _is_archive(item.path):
                self._write_archive(writer, item)
            else:
                name = f"{self.destination.rstrip('/')}/{item.path.name}" if into else self.destination
                writer.put(Placed(item.path, name, item.status))

    def _inside(self, item: Item) -> list[Item]:
        return list(self.context.below(item)) if item.is_dir else []

    def _write_tree(self, writer: UpperWriter, top: Item) -> None:
        root = self.destination.rstrip("/")
        writer.directory(root or "/")
        for item in self.context.below(top):
            name = item.name[len(top.name) + 1 :] if top.name else item.name
            writer.put(Placed(item.path, f"{root}/{name}", item.status, item.link))

    def _write_archive(self, writer: UpperWriter, item: Item) -> None:
        root = self.destination.rstrip("/")
        writer.directory(root or "/")
        with tempfile.TemporaryDirectory(prefix="benchflow-add-") as scratch:
            with uncompressed(item.path.open("rb")) as stream:
                unpack_rootfs(stream, Path(scratch))
            for folder, names, files in os.walk(scratch):
                names.sort()
                for name in sorted([*names, *files]):
                    path = Path(folder, name)
                    link = os.readlink(path) if path.is_symlink() else None
                    writer.put(Placed(path, f"{root}/{path.relative_to(scratch)}", path.lstat(), link))


def copy_plan(state: BuildState, instruction: Instruction, context: BuildContext) -> CopyPlan:
    """Read a COPY or ADD. Raises ``ValueError`` or ``ImageBuildError`` for what is not there."""
    listed = instruction.argv
    parts = [state.expand(part) for part in listed] if listed else state.words(instruction.value)
    if len(parts) < 2:
        raise ValueError("expected at least one source and a destination")
    *patterns, destination = parts
    found: list[Item] = []
    for pattern in patterns:
        if instruction.keyword == "ADD" and ("://" in pattern or pattern.startswith("git@")):
            raise ImageBuildError(f"ADD of the address {pattern} is not supported locally", fix=DOCKER_ADVICE)
        matched = context.match(pattern)
        if not matched:
            raise ImageBuildError(f"{pattern!r} is not in the build context, or is left out by .dockerignore")
        found += matched
    path = state.absolute(destination)
    several = len(found) > 1
    if several and not path.endswith("/") and path != "/":
        raise ValueError("several sources need a destination that ends with /")
    return CopyPlan(
        context=context,
        sources=tuple(found),
        destination=path,
        into_directory=path.endswith("/"),
        extract=instruction.keyword == "ADD",
        owner=state.expand(instruction.flags.get("chown", "")) or None,
        mode=_mode(state.expand(instruction.flags.get("chmod", ""))),
    )


def _mode(text: str) -> int | None:
    if not text:
        return None
    if not text.isdigit() or len(text) > 4 or any(digit in "89" for digit in text):
        raise ValueError(f"--chmod={text} is not an octal mode")
    return int(text, 8)


def _is_archive(path: Path) -> bool:
    try:
        return tarfile.is_tarfile(path)
    except (OSError, EOFError):
        return False
