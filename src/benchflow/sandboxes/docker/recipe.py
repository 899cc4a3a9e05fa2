"""What decides a task's image, and what the engine is sent to build it.

The engine gets the task's own Dockerfile with two changes: a label after each FROM, which
marks every half-made image and build container as ours, and the images that the user wants
in place of those it names.
"""

from __future__ import annotations

import hashlib
import json
import re
import tarfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchflow.contracts.errors import ImageBuildError, TransferError
from benchflow.contracts.sandbox import ImageSource
from benchflow.kernel.storage import dumps
from benchflow.sandboxes.context import BuildContext, Item
from benchflow.sandboxes.docker.engine import api_version
from benchflow.sandboxes.dockerfile import (
    LOCAL,
    Dialect,
    Dockerfile,
    Instruction,
    expand,
    pairs,
    parse,
    words,
)
from benchflow.sandboxes.lent import TARGET
from benchflow.sandboxes.tarstream import END, header, padding
from benchflow.sandboxes.transfer import member, pack_file

_RUN = re.compile(r"\s*RUN\b\s*", re.IGNORECASE)
LABEL = "benchflow.image"
"""Label of everything a build makes, half-made or whole."""
SENT_AS = ".benchflow.Dockerfile"
_VERSION = "1"
"""Counts changes of what is sent, so that older images are not reused."""
_MTIME = 1_577_836_800
"""Every file's time in the image (2020-01-01): the same task gives the same layers anywhere,
and archives of it keep working, which cannot hold times before 1980."""
_DIALECT = Dialect("docker", None, keywords=LOCAL.keywords | {"ONBUILD"})
_NEED_BUILDKIT = {"RUN": ("mount", "network", "security"), "COPY": ("chmod", "link", "parents", "exclude"),
                  "ADD": ("chmod", "link", "checksum", "keep-git-dir")}  # fmt: skip
_NEED_NEW_BUILDKIT = ("link", "parents", "exclude", "checksum", "keep-git-dir")
_BUILDKIT_API, _NEW_BUILDKIT_API = (1, 39), (1, 42)
"""Docker 18.09 has BuildKit; 23.0 is the first whose own BuildKit knows heredocs and --link."""
_NAME = re.compile(
    r"(?:[A-Za-z0-9.-]+(?::\d+)?/)?[a-z0-9]+(?:(?:[._]|__|-+|/)[a-z0-9]+)*"
    r"(?::\w[\w.-]{0,127})?(?:@sha256:[0-9a-f]{64})?|sha256:[0-9a-f]{64}"
)


@dataclass(frozen=True, slots=True)
class Stage:
    """One FROM. ``image`` is what it starts from, None for an earlier stage or nothing."""

    instruction: Instruction
    image: str | None
    parent: str
    """The image or stage that FROM names, in lower case."""
    alias: str
    platform: str


class Recipe:
    """A task's Dockerfile, read and checked. Raises ``ImageBuildError`` naming the line."""

    def __init__(self, source: ImageSource) -> None:
        self.source = source
        if source.dockerfile is None:
            raise ImageBuildError(
                f"task {source.name!r} has neither a Dockerfile nor docker_image",
                fix="add environment/Dockerfile to the task",
            )
        try:
            self.text = source.dockerfile.read_bytes()
        except OSError as error:
            raise ImageBuildError(f"cannot read {source.dockerfile}: {error.strerror}") from error
        self.dockerfile: Dockerfile = parse(self.text, _DIALECT)
        self.stages = _stages(self.dockerfile, source)
        self.base = _root(self.stages).image or "scratch"

    @property
    def bases(self) -> list[tuple[str, str]]:
        """The images it starts from, each with the platform asked for or ``""``."""
        return list(dict.fromkeys((stage.image, stage.platform) for stage in self.stages if stage.image))

    def needs_buildkit(self, api: str) -> bool:
        """True when only BuildKit can build it. Raises ``ImageBuildError`` naming the line when
        the engine, which speaks version ``api`` of the interface, has none that can."""
        version, wanted = api_version(api), False
        for instruction in self.dockerfile.instructions:
            keyword = instruction.keyword
            flags = [name for name in instruction.flags if name in _NEED_BUILDKIT.get(keyword, ())]
            new = [f"--{name}" for name in flags if name in _NEED_NEW_BUILDKIT]
            if instruction.heredoc:
                new.append("with a heredoc")
            if new and version < _NEW_BUILDKIT_API:
                raise ImageBuildError(
                    f"Dockerfile line {instruction.line}: {keyword} {new[0]} cannot be built by this docker "
                    f"engine (API {api})",
                    fix="use Docker 23 or newer, or write it without",
                )
            if flags and version < _BUILDKIT_API:
                raise ImageBuildError(
                    f"Dockerfile line {instruction.line}: {keyword} --{flags[0]} needs BuildKit, which this "
                    "docker engine lacks",
                    fix="use Docker 18.09 or newer, or write it without",
                )
            wanted = wanted or bool(new or flags)
        return wanted

    @staticmethod
    def can_mount(api: str) -> bool:
        """Whether the engine's own BuildKit knows ``RUN --mount``: Docker 20.10 is the first."""
        return api_version(api) >= (1, 41)

    def context(self) -> BuildContext | None:
        """The files of the build, as they are now."""
        folder = self.source.context
        if folder is None:
            return None
        try:
            return BuildContext(folder, self.source.exclude, keep_links=True)
        except OSError as error:
            raise ImageBuildError(f"cannot read {error.filename}: {error.strerror}") from error

    def digest(self, context: BuildContext | None, machine: str) -> str:
        """Names everything that decides the image. Hex."""
        try:
            files = [(item.name, item.fingerprint()) for item in context.items.values()] if context else []
        except OSError as error:
            raise ImageBuildError(f"cannot read {error.filename}: {error.strerror}") from error
        bases = [stage.image for stage in self.stages]
        parts = (_VERSION, self.text.hex(), bases, machine, files)
        return hashlib.sha256(dumps(parts)).hexdigest()

    def sent(self, lent: str = "", env: Mapping[str, str] = {}) -> tuple[bytes, list[Instruction | None]]:
        """The Dockerfile for the engine, and for each of its steps the task's own instruction
        (None for our label). Each RUN gets the image ``lent`` mounted, and ``env``."""
        lines = list(self.dockerfile.lines)
        steps: list[Instruction | None] = []
        stages = {stage.instruction.line: stage for stage in self.stages}
        after: dict[int, list[str]] = {}
        args = [f"ARG {name}={json.dumps(value)}" for name, value in env.items()]
        mount = f"RUN --mount=type=bind,from={lent},target={TARGET} "
        for instruction in self.dockerfile.instructions:
            steps.append(instruction)
            stage = stages.get(instruction.line)
            if lent and instruction.keyword == "RUN":
                at = instruction.line - 1
                lines[at] = _RUN.sub(lambda _: mount, lines[at], count=1)
            if instruction.keyword != "FROM" or stage is None:
                continue
            first, last = instruction.line - 1, instruction.last_line - 1
            if stage.image:
                lines[first : last + 1] = [_from(stage.image, stage), *[""] * (last - first)]
            after[last] = [f"LABEL {LABEL}=1", *args]
            steps.append(None)
        out: list[str] = []
        for index, line in enumerate(lines):
            out.append(line)
            out += after.get(index, ())
        return "".join(f"{line}\n" for line in out).encode(), steps


def tar(context: BuildContext | None, dockerfile: bytes) -> Iterator[bytes]:
    """The build context as a stream; the same files give the same bytes. The engine takes the
    names in ``.dockerignore`` out again before it copies anything. Raises ``ImageBuildError``."""
    ignore = [*(_ignore_file(context)), SENT_AS]
    if context is None or ".dockerignore" not in context.items:
        ignore.append(".dockerignore")
    yield from whole(SENT_AS, dockerfile)
    yield from whole(".dockerignore", "".join(f"{line}\n" for line in ignore).encode())
    for item in context.items.values() if context else ():
        if item.name and item.name != ".dockerignore":
            yield from _member(item)
    yield END


def is_image_name(name: str) -> bool:
    return _NAME.fullmatch(name) is not None


def _ignore_file(context: BuildContext | None) -> Sequence[str]:
    """Empty unless the file itself goes into the image: what it names is left out already."""
    if context is None or ".dockerignore" not in context.items:
        return ()
    return context.items[".dockerignore"].path.read_text("utf-8-sig").splitlines()


def whole(name: str, data: bytes) -> Iterator[bytes]:
    """A file of a tar stream."""
    info = tarfile.TarInfo(name)
    info.size, info.mtime = len(data), _MTIME
    yield header(info) + data + padding(len(data))


def _member(item: Item) -> Iterator[bytes]:
    if item.link is None and not item.is_dir:
        try:
            yield from pack_file(item.path, item.name, item.status, _MTIME)
        except TransferError as error:
            raise ImageBuildError(error.message) from error
        return
    info = member(item.name, item.status, tarfile.DIRTYPE if item.is_dir else tarfile.SYMTYPE, _MTIME)
    info.linkname = item.link or ""
    yield header(info)


def _stages(dockerfile: Dockerfile, source: ImageSource) -> list[Stage]:
    values: dict[str, str] = {}
    named: list[Stage] = []
    for instruction in dockerfile.instructions:
        if instruction.keyword == "ARG" and not named and "=" in instruction.value:
            values |= dict(_told(instruction, pairs, instruction.value, values, dockerfile.escape))
        if instruction.keyword == "FROM":
            named.append(_stage(instruction, dockerfile, values, [item.alias for item in named]))
    root = _root(named)
    return [
        replace(stage, image=source.base_for(stage.image, last=stage is root)) if stage.image else stage
        for stage in named
    ]


def _root(stages: Sequence[Stage]) -> Stage:
    """The stage whose base is the base of the image: the last, or what it starts from."""
    stage = stages[-1]
    for earlier in reversed(stages[:-1]):
        if earlier.alias and stage.parent == earlier.alias:
            stage = earlier
    return stage


def _stage(
    instruction: Instruction, dockerfile: Dockerfile, values: Mapping[str, str], aliases: list[str]
) -> Stage:
    parts = _told(instruction, words, instruction.value, values, dockerfile.escape)
    platform = _told(
        instruction, expand, instruction.flags.get("platform", ""), _platforms(values), dockerfile.escape
    )
    if len(parts) not in (1, 3) or not parts[0] or (len(parts) == 3 and parts[1].upper() != "AS"):
        raise ImageBuildError(
            f"Dockerfile line {instruction.line}: FROM {instruction.value}: expected FROM IMAGE [AS NAME]"
        )
    alias = parts[2].lower() if len(parts) == 3 else ""
    inner = parts[0] == "scratch" or parts[0].lower() in aliases
    if not inner and not is_image_name(parts[0]):
        raise ImageBuildError(f"Dockerfile line {instruction.line}: {parts[0]!r} is not an image name")
    return Stage(instruction, None if inner else parts[0], parts[0].lower(), alias, platform)


def _platforms(values: Mapping[str, str]) -> dict[str, str]:
    """BUILDPLATFORM and TARGETPLATFORM are the engine's own: as if no platform were given."""
    return {"BUILDPLATFORM": "", "TARGETPLATFORM": "", **values}


def _told(instruction: Instruction, function: Callable[..., Any], *given: Any) -> Any:
    """What ``function`` makes of a value, its complaint told with the line."""
    try:
        return function(*given)
    except ValueError as error:
        raise ImageBuildError(f"Dockerfile line {instruction.line}: {instruction}: {error}") from error


def _from(image: str, stage: Stage) -> str:
    flag = f"--platform={stage.instruction.flags['platform']} " if stage.platform else ""
    return f"FROM {flag}{image}" + (f" AS {stage.alias}" if stage.alias else "")
