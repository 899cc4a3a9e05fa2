"""Agents that are installed once per host and version, and shown read-only to every sandbox.

A bundle is a folder ``<bundles>/<name>-<version>-<digest>/`` whose digest covers the recipe and
every byte of it. It brings its own loader and C library (``lib/``), so that it runs in images
with another libc, or none. It is built in a temporary folder under a lock between processes and
appears by one rename, with ``bundle.json`` inside: a folder without that file does not exist.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import hashlib
import os
import platform
import shutil
import stat
import tempfile
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from benchflow.agents.declaration import Declaration
from benchflow.contracts.errors import HostPressureError, PrerequisiteError, UsageError
from benchflow.contracts.sandbox import Mount
from benchflow.kernel import storage
from benchflow.kernel.ownership import state_dir

INSIDE = "/opt/benchflow/agents"
"""Where bundles appear in a sandbox: off every PATH."""
FORMAT = 1
"""Raised when the layout of a bundle changes; older ones are then installed again."""
MARKER = "bundle.json"
Say = Callable[[str], None]

_in_use: dict[Path, int] = {}
"""Bundles this process has handed out, each with a shared lock that ``remove`` respects."""


@dataclass(frozen=True, slots=True)
class Bundle:
    """An installed one. ``facts`` is what ``bundle.json`` holds."""

    folder: Path
    facts: dict[str, Any] = field(repr=False)

    @property
    def mount(self) -> Mount:
        return Mount(self.folder, f"{INSIDE}/{self.facts['name']}")

    def argv(self, declared: Declaration, root: str) -> list[str]:
        """The start command with the bundle at ``root``, through the bundle's own loader."""
        return declared.prepared(command(declared, root, loader=bool(self.facts.get("libc"))))


@dataclass(frozen=True, slots=True)
class BundleStatus:
    """What there is to say without installing. ``needed`` is False for agents that need none."""

    name: str
    version: str | None
    needed: bool
    installed: bool
    folder: Path | None = None
    size_bytes: int | None = None
    proof: dict[str, Any] | None = None


def command(declared: Declaration, root: str, *, loader: bool) -> list[str]:
    words = [word.replace("{bundle}", root).replace("{node}", f"{root}/bin/node") for word in declared.start]
    through = [f"{root}/lib/ld.so", "--library-path", f"{root}/lib"] if loader else []
    return [*through, *words]


def bundles_dir() -> Path:
    """``$BENCHFLOW_BUNDLES``, else ``bundles/`` in the state folder."""
    explicit = os.environ.get("BENCHFLOW_BUNDLES")
    return Path(explicit).absolute() if explicit else state_dir() / "bundles"


def status(declared: Declaration) -> BundleStatus:
    if declared.install is None:
        return BundleStatus(declared.name, declared.version, needed=False, installed=False)
    found = _find(declared.name, declared.version, recipe(declared))
    if found is None:
        return BundleStatus(declared.name, declared.version, needed=True, installed=False)
    size, proof = found.facts["size_bytes"], found.facts.get("proof")
    return BundleStatus(declared.name, declared.version, True, True, found.folder, size, proof)


async def ensure(declared: Declaration, say: Say | None = None) -> Bundle:
    """The bundle of this declaration, installed now if it is not. Raises ``PrerequisiteError``
    with one line when that cannot be done here."""
    from benchflow.agents import install  # what installs is read only when something may be

    if declared.install is None:
        raise UsageError(f"agent {declared.name} needs no installing")

    async def make(place: Path) -> dict[str, Any]:
        if say is not None:
            say(f"installing agent {declared.name} {declared.version}, once on this host")
        return await install.make(declared, place)

    bundle = await build_once(declared.name, declared.version, recipe(declared), make)
    _hold(bundle.folder)
    return bundle


def remove(name: str, version: str | None = None) -> list[Path]:
    """Remove the bundles of this agent, of any version when none is given. Raises
    ``PrerequisiteError`` while a job uses one."""
    gone: list[Path] = []
    for folder in sorted(bundles_dir().glob(f"{name}-*-*")):
        bundle = _read(folder)
        if bundle is None or bundle.facts["name"] != name or version not in (None, bundle.facts["version"]):
            continue
        _give_up(folder)
        lock = os.open(folder / MARKER, os.O_RDONLY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise PrerequisiteError(
                f"agent {name} {bundle.facts['version']} is in use", fix="end the job that runs it"
            ) from None
        finally:
            os.close(lock)
        # Without its marker it is not installed any more, whatever happens next.
        (folder / MARKER).unlink()
        shutil.rmtree(folder)
        gone.append(folder)
    return gone


def whole(folder: Path, size_bytes: int | None) -> bool:
    """Whether no file of a bundle is gone or cut short since it was installed."""
    files = (path.lstat() for path in folder.rglob("*") if path != folder / MARKER)
    return sum(found.st_size for found in files if stat.S_ISREG(found.st_mode)) == size_bytes


def recipe(declared: Declaration) -> str:
    """Digest of all that decides what an installation gives on this machine."""
    install = declared.install
    parts = (FORMAT, platform.machine(), declared.version, declared.start)
    text = repr((*parts, install and (install.npm, install.node, install.scripts, install.drop)))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


async def build_once(
    name: str, version: str | None, recipe: str, make: Callable[[Path], Awaitable[dict[str, Any]]]
) -> Bundle:
    """The bundle made by ``recipe``. One process makes it; others wait, and find it made.

    ``make`` fills an empty folder and returns what to record. Whatever ends it, a kill included,
    leaves nothing that looks installed; what a kill left is removed by the next try.
    """
    found = _find(name, version, recipe)
    if found is not None:
        return found
    root, stem = bundles_dir(), f"{name}-{version}"
    try:
        root.mkdir(parents=True, exist_ok=True)
        async with _lock(root / f".{stem}.lock"):
            found = _find(name, version, recipe)
            return found or await _build(
                root, stem, make, {"name": name, "version": version, "recipe": recipe}
            )
    except OSError as error:
        raise _prerequisite(error, stem, root) from error


async def _build(
    root: Path, stem: str, make: Callable[[Path], Awaitable[dict[str, Any]]], facts: dict[str, Any]
) -> Bundle:
    for left in root.glob(f".tmp-{stem}-*"):
        await asyncio.to_thread(shutil.rmtree, left, ignore_errors=True)
    place, began = Path(tempfile.mkdtemp(prefix=f".tmp-{stem}-", dir=root)), time.monotonic()
    try:
        facts |= await make(place)
        digest, size, files = await asyncio.to_thread(_seal, place, facts["recipe"])
        facts |= {
            "schema_version": FORMAT,
            "digest": digest,
            "size_bytes": size,
            "files": files,
            "install_sec": round(time.monotonic() - began, 1),
        }
        storage.write_json(place / MARKER, facts)
        (place / MARKER).chmod(0o644)
        folder = root / f"{stem}-{digest[:16]}"
        place.rename(folder)
    except BaseException:
        await asyncio.to_thread(shutil.rmtree, place, ignore_errors=True)
        raise
    return Bundle(folder, facts)


def _seal(place: Path, recipe: str) -> tuple[str, int, int]:
    """Make the tree readable for every user and durable; return its digest, bytes and files."""
    digest, size, files = hashlib.blake2b(recipe.encode(), digest_size=32), 0, 0
    for path in sorted([place, *place.rglob("*")]):
        state = path.lstat()
        digest.update(f"\0{path.relative_to(place)}\0{stat.S_IFMT(state.st_mode)}\0".encode())
        if stat.S_ISLNK(state.st_mode):
            digest.update(os.readlink(path).encode())
            continue
        runs = 0o111 if stat.S_ISDIR(state.st_mode) or state.st_mode & 0o100 else 0
        path.chmod(stat.S_IMODE(state.st_mode) & ~0o022 | 0o644 | runs)
        if stat.S_ISREG(state.st_mode):
            with path.open("rb") as handle:
                digest.update(hashlib.file_digest(handle, "blake2b").digest())
                os.fsync(handle.fileno())
            size, files = size + state.st_size, files + 1
    return digest.hexdigest(), size, files


def _find(name: str, version: str | None, recipe: str) -> Bundle | None:
    for folder in sorted(bundles_dir().glob(f"{name}-{version}-*")):
        bundle = _read(folder)
        if bundle is not None and bundle.facts.get("recipe") == recipe:
            return bundle
    return None


def _read(folder: Path) -> Bundle | None:
    try:
        facts = orjson.loads((folder / MARKER).read_bytes())
    except (OSError, orjson.JSONDecodeError):
        return None
    return Bundle(folder, facts)


def _hold(folder: Path) -> None:
    if folder not in _in_use:
        descriptor = os.open(folder / MARKER, os.O_RDONLY | os.O_CLOEXEC)
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        _in_use[folder] = descriptor


def _give_up(folder: Path) -> None:
    descriptor = _in_use.pop(folder, None)
    if descriptor is not None:
        os.close(descriptor)


@asynccontextmanager
async def _lock(path: Path) -> AsyncGenerator[None]:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                await asyncio.sleep(0.1)  # another process installs; waiting stays cancellable
        yield
    finally:
        os.close(descriptor)


def _prerequisite(error: OSError, stem: str, root: Path) -> PrerequisiteError:
    if isinstance(error, HostPressureError) or error.errno in (errno.ENOSPC, errno.EDQUOT):
        return PrerequisiteError(
            f"no space left to install {stem} in {root}", fix="free some, or set BENCHFLOW_BUNDLES=FOLDER"
        )
    return PrerequisiteError(
        f"cannot install {stem} in {root}: {error.strerror or error}",
        fix="make it writable, or set BENCHFLOW_BUNDLES=FOLDER",
    )
