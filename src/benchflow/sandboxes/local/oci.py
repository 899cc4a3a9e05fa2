"""Read a root file system out of what tools write: a directory, a tar of one, an OCI
layout or archive, a ``docker save`` archive.

The digest of the result is the image's own (the hash of its configuration), or a hash of
the tree when there is none. Every blob that an image names by hash is checked against it.
"""

from __future__ import annotations

import bz2
import gzip
import hashlib
import io
import lzma
import os
import re
import stat
import tarfile
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, cast

import orjson

from benchflow.contracts.errors import UsageError
from benchflow.sandboxes.local.merge import View
from benchflow.sandboxes.local.rootfs_tar import unpack_rootfs
from benchflow.sandboxes.local.trees import copy_tree
from benchflow.sandboxes.runtime import MACHINE

Note = Callable[[str], None]
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_COMPRESSIONS: dict[bytes, Callable[[Any], Any]] = {
    b"\x1f\x8b": lambda stream: gzip.GzipFile(fileobj=stream),
    b"BZh": bz2.BZ2File,
    b"\xfd7zXZ\0": lzma.LZMAFile,
}
_MAX_DOCUMENT = 8 << 20


@dataclass(frozen=True, slots=True)
class ImageConfig:
    """What an image says besides its files."""

    digest: str
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    workdir: str | None = None
    user: str | None = None


def read_image(source: Path, top: Path, name: str, note: Note) -> ImageConfig:
    """Fill ``top`` from ``source``. ``name`` chooses among several images of one archive, whose
    parts are unpacked beside ``top`` first."""
    if source.is_dir():
        if (source / "oci-layout").is_file() and (source / "index.json").is_file():
            return _read_oci(View([source]), top, name, note)
        if not any((source / part).is_dir() for part in ("usr", "bin", "etc")):
            raise UsageError(
                f"{source} is neither an OCI layout nor a root file system",
                fix="expected usr, bin or etc in it",
            )
        copy_tree(source, top)
        return ImageConfig(_tree_digest(top))
    names = _names(source)
    if names & {"manifest.json", "index.json"}:
        read = _read_docker if "manifest.json" in names else _read_oci
        with tempfile.TemporaryDirectory(dir=top.parent) as scratch:
            with uncompressed(source.open("rb")) as stream:
                unpack_rootfs(stream, Path(scratch))
            return read(View([Path(scratch)]), top, name, note)
    with uncompressed(source.open("rb")) as stream:
        unpack_rootfs(stream, top, note=note)
    if not any((top / part).exists() for part in ("usr", "bin", "etc")):
        raise UsageError(f"{source} holds no root file system", fix="expected usr, bin or etc in it")
    return ImageConfig(_tree_digest(top))


def _names(archive: Path) -> set[str]:
    """What lies at an archive's top or below it."""
    try:
        with tarfile.open(archive, "r:*") as tar:
            return {name.removeprefix("./") for name in tar.getnames()}
    except (tarfile.TarError, EOFError) as error:
        raise UsageError(
            f"{archive} is not a tar archive",
            fix="give a directory, a tar, an OCI layout or `docker save` output",
        ) from error


def _read_docker(parts: View, top: Path, name: str, note: Note) -> ImageConfig:
    images = _document(_part(parts, "manifest.json"))
    tags = {tag: image for image in images for tag in image.get("RepoTags") or ()}
    image = tags.get(name) or (images[0] if len(images) == 1 else None)
    if image is None:
        raise UsageError(
            f"the archive holds several images: {', '.join(sorted(tags))}",
            fix="import under one of these names",
        )
    config = _part(parts, image["Config"])
    return _fill(top, config, _sha256(config), [_part(parts, layer) for layer in image["Layers"]], note)


def _read_oci(parts: View, top: Path, name: str, note: Note) -> ImageConfig:
    manifest = _choose(parts, _document(_part(parts, "index.json")), name)
    digest = manifest["config"]["digest"]
    layers = (_blob(parts, layer["digest"]) for layer in manifest["layers"])
    return _fill(top, _blob(parts, digest), digest, layers, note)


def _fill(top: Path, config: Path, digest: str, layers: Iterable[Path], note: Note) -> ImageConfig:
    document = _document(config)
    if document.get("architecture", MACHINE) != MACHINE:
        raise UsageError(f"the image is for {document['architecture']}, this machine is {MACHINE}")
    for layer in layers:
        with uncompressed(layer.open("rb")) as stream:
            unpack_rootfs(stream, top, whiteouts=True, note=note)
    settings = document.get("config") or {}
    env = dict(item.split("=", 1) for item in settings.get("Env") or () if "=" in item)
    return ImageConfig(digest, env, settings.get("WorkingDir") or None, settings.get("User") or None)


def _choose(parts: View, index: dict[str, Any], name: str) -> dict[str, Any]:
    """The manifest for this machine, descending through indexes of platforms."""
    found = [item for item in index["manifests"] if _fits(item.get("platform"))]
    if len(found) > 1:
        tag = name.rpartition(":")[2]
        label = "org.opencontainers.image.ref.name"
        found = [item for item in found if item.get("annotations", {}).get(label) in (name, tag)]
    if len(found) != 1:
        raise UsageError(f"the OCI layout holds {len(found)} images that could be {name!r} on this machine")
    document = _document(_blob(parts, found[0]["digest"]))
    return _choose(parts, document, name) if "manifests" in document else document


def _fits(platform_: dict[str, str] | None) -> bool:
    if platform_ is None:
        return True
    return platform_.get("os") == "linux" and platform_.get("architecture") == MACHINE


def _document(path: Path) -> Any:
    with path.open("rb") as stream:
        return orjson.loads(stream.read(_MAX_DOCUMENT))


def _part(parts: View, name: str) -> Path:
    """The file of that name, links followed among the parts only."""
    place = parts.find(parts.resolve(name))
    if place is None or not place.is_file() or place.is_symlink():
        raise UsageError(f"the archive lacks its own part {name!r}")
    return place


def _blob(parts: View, digest: str) -> Path:
    if not _DIGEST.fullmatch(digest):
        raise UsageError(f"the image names a blob by {digest[:80]!r}, not by sha256")
    path = _part(parts, "/blobs/" + digest.replace(":", "/"))
    if _sha256(path) != digest:
        raise UsageError(f"the blob {digest[:19]} does not match its hash", fix="save the image again")
    return path


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return "sha256:" + hashlib.file_digest(stream, "sha256").hexdigest()


@contextmanager
def uncompressed(stream: BinaryIO) -> Iterator[BinaryIO]:
    """A reader of the plain bytes, told by the first ones; ``stream`` is closed at the end."""
    with closing(stream):
        buffered = io.BufferedReader(cast(io.RawIOBase, stream), 1 << 20)
        head = buffered.peek(6)[:6]
        if head.startswith(b"\x28\xb5\x2f\xfd"):
            raise UsageError(
                "the image is compressed with zstd, which cannot be read here",
                fix="save it with gzip (`skopeo copy --dest-compress-format gzip`), or `docker save`",
            )
        opener = next((found for magic, found in _COMPRESSIONS.items() if head.startswith(magic)), None)
        if opener is None:
            yield buffered
        else:
            with opener(buffered) as plain:
                yield plain


def _tree_digest(top: Path) -> str:
    """A hash of names, modes, owners and contents."""
    digest = hashlib.sha256()
    for folder, names, files in os.walk(top):
        names.sort()
        for name in sorted([*files, *names]):
            path = os.path.join(folder, name)
            status = os.lstat(path)
            digest.update(
                f"{os.path.relpath(path, top)}\0{status.st_mode}\0{status.st_uid}\0{status.st_gid}\0".encode(
                    "utf-8", "surrogateescape"
                )
            )
            if stat.S_ISLNK(status.st_mode):
                digest.update(os.fsencode(os.readlink(path)))
            elif stat.S_ISREG(status.st_mode):
                with open(path, "rb") as handle:
                    digest.update(hashlib.file_digest(handle, "sha256").digest())
    return "sha256:" + digest.hexdigest()
