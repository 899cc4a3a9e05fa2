"""Bases: what ``FROM name`` means to the local sandbox.

A name means a root file system imported under it, or, with consent only, this machine's
own programs. Nothing is downloaded. Records live in ``bases/<name>.json`` of the store,
their files in its layers.
"""

from __future__ import annotations

import errno
import lzma
import os
import stat
import tarfile
import time
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

from benchflow.contracts.errors import (
    BenchflowError,
    HostPressureError,
    PrerequisiteError,
    SandboxStartError,
    UsageError,
)
from benchflow.kernel.storage import read_json, write_json
from benchflow.sandboxes.local.hostbase import DEFAULT_PATH, host_base, make_mount_points
from benchflow.sandboxes.local.layers import LayerStore, LocalImage, Rootfs, Upper
from benchflow.sandboxes.local.oci import ImageConfig, read_image

_DAMAGED = (ValueError, KeyError, TypeError, EOFError, tarfile.TarError, lzma.LZMAError, zlib.error)
HOST = "host"
SCRATCH = "scratch"


@dataclass(frozen=True, slots=True)
class Base:
    """An imported root file system. ``source`` tells where it came from, for people."""

    name: str
    digest: str
    layer: str
    source: str
    imported_at: float
    size_bytes: int
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    workdir: str | None = None
    user: str | None = None
    notes: tuple[str, ...] = ()


def canonical(name: str) -> str:
    """One spelling per image: ``debian`` is ``debian:latest``, the default registry is left out."""
    name = name.strip()
    for prefix in ("docker.io/", "index.docker.io/", "library/"):
        name = name.removeprefix(prefix)
    if "@" not in name and ":" not in name.rpartition("/")[2]:
        name += ":latest"
    return name


def resolve_base(store: LayerStore, name: str, consent: str | None) -> LocalImage:
    """The base that ``FROM name`` means. ``consent`` is ``local_base`` of the task or the
    command line: ``host``, or the name of an imported base to use instead of one that is
    missing. Raises ``PrerequisiteError`` with the ways out when there is none."""
    if name == SCRATCH:
        return _scratch(store)
    found = find_base(store, name)
    if found is not None:
        return found
    if consent == HOST:
        return host_base(store)
    if consent:
        other = find_base(store, consent)
        if other is not None:
            return other
        raise UsageError(
            f"local base {consent!r} is neither 'host' nor an imported base",
            fix="see `bench sandbox image list`",
        )
    raise PrerequisiteError(
        f"the local sandbox has no base for the image {name!r}",
        fix=f"import one with `bench sandbox image import {name} PATH`, or allow this machine's own programs "
        "with --local-base host (in the task: local_base: host), or use --sandbox docker",
    )


def find_base(store: LayerStore, name: str) -> LocalImage | None:
    """The imported base of that name as an image; None when there is none."""
    try:
        base = _parse(read_json(_record_path(store, canonical(name))))
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise PrerequisiteError(
            f"the record of the imported base {name!r} is damaged", fix=f"import it again: {error}"
        ) from error
    layer = store.built(base.layer)
    if layer is None:
        return None
    return LocalImage(
        digest=base.digest,
        base=base.name,
        rootfs=Rootfs("dir", (layer,)),
        env={"PATH": DEFAULT_PATH, **base.env},
        workdir=base.workdir,
        user=base.user,
        notes=base.notes,
    )


def import_base(store: LayerStore, name: str, source: Path) -> Base:
    """Import a root file system directory or tar, an OCI layout (directory or archive) or a
    ``docker save`` archive under ``name``, replacing an earlier one of that name.

    Raises ``UsageError`` when ``source`` is none of these or is damaged, and
    ``HostPressureError`` when the disk is full; nothing is then left behind.
    """
    if name in (HOST, SCRATCH) or not name.strip() or any(char.isspace() for char in name):
        raise UsageError(f"{name!r} cannot be the name of a base", fix="use an image name such as debian:12")
    if not source.exists():
        raise UsageError(f"no file or directory {source}")
    notes: list[str] = []
    upper = store.new_upper()
    try:
        config = _fill(upper, source, name, notes)
        make_mount_points(upper.upper)
        size = _drop_specials(upper.upper, notes)
        layer_name = "base-" + config.digest.removeprefix("sha256:")[:32]
        store.freeze(upper, name=layer_name, owned=False)
    finally:
        store.discard(upper)
    base = Base(
        name=canonical(name),
        digest=config.digest,
        layer=layer_name,
        source=str(source.resolve()),
        imported_at=time.time(),
        size_bytes=size,
        env=config.env,
        workdir=config.workdir,
        user=config.user,
        notes=tuple(_shortened(notes)),
    )
    path = _record_path(store, base.name)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, {"schema_version": 1, **asdict(base)})
    return base


def list_bases(store: LayerStore) -> list[Base]:
    folder = store.root / "bases"
    return [_parse(read_json(path)) for path in sorted(folder.glob("*.json"))] if folder.is_dir() else []


def remove_base(store: LayerStore, name: str) -> Base:
    """Forget a base, and the images built on it. Its files go too, unless another name has
    the same. Raises ``UsageError`` for an unknown name or a base in use."""
    path = _record_path(store, canonical(name))
    if not path.exists():
        raise UsageError(f"no imported base {name!r}", fix="see `bench sandbox image list`")
    base = _parse(read_json(path))
    if not any(other.layer == base.layer and other.name != base.name for other in list_bases(store)):
        store.remove_layer(base.layer)
    path.unlink()
    return base


def _fill(upper: Upper, source: Path, name: str, notes: list[str]) -> ImageConfig:
    try:
        return read_image(source, upper.upper, name, notes.append)
    except SandboxStartError as error:
        raise UsageError(f"cannot import {source}: {error.message}") from error
    except BenchflowError:
        raise
    except _DAMAGED as error:
        raise UsageError(f"cannot import {source}: {error}") from error
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise HostPressureError(f"disk full while importing {source}", fix="free space") from error
        raise UsageError(f"cannot import {source}: {error}") from error


def _drop_specials(top: Path, notes: list[str]) -> int:
    """Remove devices, FIFOs and sockets; return the bytes of all regular files."""
    size = 0
    for folder, _, files in os.walk(top):
        for file in files:
            path = Path(folder, file)
            status = path.lstat()
            if stat.S_ISREG(status.st_mode):
                size += status.st_size
            elif not stat.S_ISLNK(status.st_mode):
                path.unlink()
                notes.append(f"left out the special file /{path.relative_to(top)}")
    return size


def _shortened(notes: list[str], keep: int = 10) -> list[str]:
    return notes if len(notes) <= keep else [*notes[:keep], f"and {len(notes) - keep} more"]


def _scratch(store: LayerStore) -> LocalImage:
    layer = store.built("base-scratch")
    if layer is None:
        upper = store.new_upper()
        make_mount_points(upper.upper)
        layer = store.freeze(upper, name="base-scratch", owned=False)
    return LocalImage(
        digest="sha256:" + "0" * 64, base=SCRATCH, rootfs=Rootfs("dir", (layer,)), env={"PATH": DEFAULT_PATH}
    )


def _record_path(store: LayerStore, name: str) -> Path:
    return store.root / "bases" / f"{quote(name, safe='')}.json"


def _parse(record: dict[str, Any]) -> Base:
    if record.pop("schema_version") != 1:
        raise ValueError("written by a newer benchflow")
    return Base(**{**record, "notes": tuple(record["notes"])})
