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
import platform
import re
import stat
import tarfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, cast

import orjson

from benchflow.contracts.errors import UsageError
from benchflow.sandboxes.local.rootfs_tar import unpack_rootfs
from benchflow.sandboxes.local.trees import copy_tree

Note = Callable[[str], None]
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
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
    """Fill ``top`` from ``source``. ``name`` chooses among several images of one archive."""
    if source.is_dir():
        if (source / "oci-layout").is_file() and (source / "index.json").is_file():
            return _read_oci(_Folder(source), top, name, note)
        if not any((source / part).is_dir() for part in ("usr", "bin", "etc")):
            raise UsageError(
                f"{source} is neither an OCI layout nor a root file system",
                fix="expected usr, bin or etc in it",
            )
        copy_tree(source, top)
        return ImageConfig(_tree_digest(top))
    with _Archive(source) as archive:
        if archive.has("manifest.json"):
            return _read_docker(archive, top, name, note)
        if archive.has("index.json"):
            return _read_oci(archive, top, name, note)
    with uncompressed(source.open("rb")) as stream:
        unpack_rootfs(stream, top, note=note)
    if not any((top / part).exists() for part in ("usr", "bin", "etc")):
        raise UsageError(f"{source} holds no root file system", fix="expected usr, bin or etc in it")
    return ImageConfig(_tree_digest(top))


class _Folder:
    """Blobs of an OCI layout directory."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def open(self, name: str) -> BinaryIO:
        return (self._root / name).open("rb")


class _Archive(AbstractContextManager["_Archive"]):
    """Blobs inside a tar archive."""

    def __init__(self, path: Path) -> None:
        try:
            self._tar = tarfile.open(path, "r:*")  # noqa: SIM115
        except (tarfile.TarError, EOFError) as error:
            raise UsageError(
                f"{path} is not a tar archive",
                fix="give a directory, a tar, an OCI layout or `docker save` output",
            ) from error

    def __exit__(self, *_: object) -> None:
        self._tar.close()

    def has(self, name: str) -> bool:
        return self._find(name) is not None

    def open(self, name: str) -> BinaryIO:
        member = self._find(name)
        stream = self._tar.extractfile(member) if member is not None else None
        if stream is None:
            raise UsageError(f"the archive lacks its own part {name!r}")
        return cast(BinaryIO, stream)

    def _find(self, name: str) -> tarfile.TarInfo | None:
        for spelling in (name, f"./{name}"):
            try:
                return self._tar.getmember(spelling)
            except KeyError:
                continue
        return None


Blobs = _Folder | _Archive


def _read_docker(archive: _Archive, top: Path, name: str, note: Note) -> ImageConfig:
    images = _document(archive, "manifest.json")
    tags = {tag: image for image in images for tag in image.get("RepoTags") or ()}
    image = tags.get(name) or (images[0] if len(images) == 1 else None)
    if image is None:
        raise UsageError(
            f"the archive holds several images: {', '.join(sorted(tags))}",
            fix="import under one of these names",
        )
    with closing(archive.open(image["Config"])) as stream:
        raw = stream.read(_MAX_DOCUMENT)
    config = orjson.loads(raw)
    _check_architecture(config)
    for layer in image["Layers"]:
        with uncompressed(archive.open(layer)) as stream:
            unpack_rootfs(stream, top, whiteouts=True, note=note)
    return _config("sha256:" + hashlib.sha256(raw).hexdigest(), config)


def _read_oci(blobs: Blobs, top: Path, name: str, note: Note) -> ImageConfig:
    index = _document(blobs, "index.json")
    manifest = _choose(blobs, index, name)
    config_digest = manifest["config"]["digest"]
    config = orjson.loads(_checked_blob(blobs, config_digest))
    _check_architecture(config)
    for layer in manifest["layers"]:
        checked = _Hashed(blobs.open(_blob_path(layer["digest"])))
        with uncompressed(cast(BinaryIO, checked)) as stream:
            unpack_rootfs(stream, top, whiteouts=True, note=note)
            checked.drain()
        checked.verify(layer["digest"])
    return _config(config_digest, config)


def _choose(blobs: Blobs, index: dict[str, Any], name: str) -> dict[str, Any]:
    """The manifest for this machine, descending through indexes of platforms."""
    found = [item for item in index["manifests"] if _fits(item.get("platform"))]
    if len(found) > 1:
        tag = name.rpartition(":")[2]
        label = "org.opencontainers.image.ref.name"
        found = [item for item in found if item.get("annotations", {}).get(label) in (name, tag)]
    if len(found) != 1:
        raise UsageError(f"the OCI layout holds {len(found)} images that could be {name!r} on this machine")
    document = orjson.loads(_checked_blob(blobs, found[0]["digest"]))
    return _choose(blobs, document, name) if "manifests" in document else document


def _fits(platform_: dict[str, str] | None) -> bool:
    if platform_ is None:
        return True
    return platform_.get("os") == "linux" and platform_.get("architecture") == _architecture()


def _architecture() -> str:
    return _ARCHITECTURES.get(platform.machine(), platform.machine())


def _check_architecture(config: dict[str, Any]) -> None:
    if config.get("architecture", _architecture()) != _architecture():
        raise UsageError(f"the image is for {config['architecture']}, this machine is {_architecture()}")


def _config(digest: str, document: dict[str, Any]) -> ImageConfig:
    settings = document.get("config") or {}
    env = dict(item.split("=", 1) for item in settings.get("Env") or () if "=" in item)
    return ImageConfig(digest, env, settings.get("WorkingDir") or None, settings.get("User") or None)


def _document(blobs: Blobs, name: str) -> Any:
    with closing(blobs.open(name)) as stream:
        return orjson.loads(stream.read(_MAX_DOCUMENT))


def _blob_path(digest: str) -> str:
    if not _DIGEST.fullmatch(digest):
        raise UsageError(f"the image names a blob by {digest[:80]!r}, not by sha256")
    return "blobs/" + digest.replace(":", "/")


def _checked_blob(blobs: Blobs, digest: str) -> bytes:
    with closing(blobs.open(_blob_path(digest))) as stream:
        data = stream.read(_MAX_DOCUMENT)
    if "sha256:" + hashlib.sha256(data).hexdigest() != digest:
        raise UsageError(f"the blob {digest[:19]} does not match its hash", fix="save the image again")
    return data


class _Hashed(io.RawIOBase):
    """Passes bytes through and remembers their hash."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._hash = hashlib.sha256()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._stream.read(len(buffer))
        buffer[: len(data)] = data
        self._hash.update(data)
        return len(data)

    def drain(self) -> None:
        """Read what a reader of the archive did not need, so that the hash covers it."""
        while data := self._stream.read(1 << 20):
            self._hash.update(data)

    def close(self) -> None:
        self._stream.close()
        super().close()

    def verify(self, digest: str) -> None:
        if "sha256:" + self._hash.hexdigest() != digest:
            raise UsageError(f"the layer {digest[:19]} does not match its hash", fix="save the image again")


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
