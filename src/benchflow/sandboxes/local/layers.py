"""Immutable layers, writable uppers, and the images made of them.

Below the store's root (``store_root()`` for the product)::

    layers/<name>/          a frozen overlay layer; built ones are named by content
    layers/<name>.json      owner of a snapshot's layer; built layers have none and stay
    images/<digest>.json    an image: base, layers, environment; snapshots carry an owner
    uppers/<name>/          owner.json, upper/ and work/ of a live sandbox or a build

Uppers on tmpfs live in a private folder under ``/dev/shm`` with the same shape, and
freeze into layers there, because freezing is a rename. Nothing appears under its final
name before it is complete, so a crash or a full disk leaves only scratch.
"""

from __future__ import annotations

import hashlib
import os
import stat
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from benchflow.contracts.errors import SandboxStartError, UsageError
from benchflow.contracts.sandbox import SandboxImage
from benchflow.kernel.ownership import Owner, state_dir
from benchflow.kernel.storage import dumps, read_json, write_json
from benchflow.sandboxes.local.merge import merge_onto
from benchflow.sandboxes.local.trees import copy_tree, is_tmpfs, pressure, remove_tree

FLATTEN_AT = 20
"""Layers above the base; deeper stacks make every failed lookup slower."""
_MOUNT_OPTIONS = 3000
"""Characters of layer paths; all of them must fit into one page of mount options."""
_ORPHAN_AGE = 3600.0
"""Seconds after which an upper without an owner record was surely cut off at birth."""
_IMAGE_VERSION = 3
BUILT = "b-"
"""Layers whose name starts so were built from a Dockerfile instruction."""
_SHM = Path("/dev/shm")


@dataclass(frozen=True, slots=True)
class Rootfs:
    """A root file system: ``lowers`` bottom first. For the kind ``host`` the lowest one is
    the made-up ``/etc`` and the mount points of ``binds``: what is shown of the machine,
    ``(host path, path inside)`` in mount order."""

    kind: str
    lowers: tuple[Path, ...]
    binds: tuple[tuple[Path, str], ...] = ()


@dataclass(frozen=True, slots=True)
class LocalImage:
    """An image as the local provider starts it. The first ``base_depth`` lowers are its base."""

    digest: str
    base: str
    rootfs: Rootfs
    base_depth: int = 1
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    workdir: str | None = None
    user: str | None = None
    notes: tuple[str, ...] = ()
    owner: Owner | None = None
    """Set on snapshots: they go when this process has gone."""

    @property
    def ref(self) -> str:
        return self.digest

    def public(self, provider: str = "local") -> SandboxImage:
        return SandboxImage(
            provider=provider,
            ref=self.ref,
            digest=self.digest,
            base=self.base,
            workdir=self.workdir,
            user=self.user,
            env=dict(self.env),
            notes=self.notes,
        )


@dataclass(frozen=True, slots=True)
class Upper:
    """A writable layer: ``upper`` and ``work`` for the overlay mount, both below ``root``."""

    name: str
    root: Path
    tmpfs: bool

    @property
    def upper(self) -> Path:
        return self.root / "upper"

    @property
    def work(self) -> Path:
        return self.root / "work"


@dataclass(frozen=True, slots=True)
class Leftover:
    """Something of an owner that no longer lives. ``kind`` is upper, layer or image."""

    name: str
    kind: str
    age_sec: float
    owner: str
    path: Path


class LayerStore:
    """One store per user and state folder, shared by every process that runs sandboxes.

    ``remove_foreign`` deletes a tree that holds files of mapped uids the caller cannot
    touch (an ordinary user with a uid range); without it such trees raise ``PermissionError``.
    """

    def __init__(self, root: Path, *, remove_foreign: Callable[[Path], None] | None = None) -> None:
        self.root = root
        self._remove_foreign = remove_foreign
        self._loaded: dict[str, LocalImage] = {}
        for folder in ("layers", "images", "uppers"):
            (root / folder).mkdir(parents=True, exist_ok=True, mode=0o700)

    @cached_property
    def tmpfs_root(self) -> Path | None:
        """The store's folder in memory; None when the machine has no tmpfs fit for uppers."""
        tag = hashlib.sha256(os.fsencode(self.root.resolve())).hexdigest()[:12]
        place = _SHM / f"benchflow-{os.geteuid()}-{tag}"
        try:
            if not is_tmpfs(_SHM):
                return None
            for folder in (place, place / "layers", place / "uppers"):
                folder.mkdir(exist_ok=True, mode=0o700)
            status = place.lstat()
            if status.st_uid != os.geteuid() or not stat.S_ISDIR(status.st_mode) or status.st_mode & 0o077:
                return None  # another user planted the name
            os.setxattr(place, "user.overlay.probe", b"y")  # tmpfs before Linux 6.6 cannot
            if not (place / "store").is_symlink():
                (place / "store").symlink_to(self.root.resolve())
                _sweep_memory()
        except OSError:
            return None
        return place

    @cached_property
    def lease_folder(self) -> Path:
        """Where leases of live sandboxes lie: in memory, as what they name ends with the machine,
        and a disk's file system looks at every inode deleted lately before it gives out one."""
        folder = (self.tmpfs_root or self.root) / "leases"
        folder.mkdir(exist_ok=True, mode=0o700)
        return folder

    def new_upper(
        self, *, tmpfs: bool = False, name: str | None = None, lowers: Sequence[Path] = ()
    ) -> Upper:
        """Make an empty upper owned by this process. ``tmpfs`` falls back to disk when there
        is none. ``lowers`` are kept from being collected while the upper exists."""
        memory = self.tmpfs_root if tmpfs else None
        owner = Owner.current()
        # The name tells the owner too: a crash may come before or after its record.
        name = name or f"u{owner.pid}-{owner.start}-{uuid.uuid4().hex[:12]}"
        root = (memory or self.root) / "uppers" / name
        upper = Upper(name, root, memory is not None)
        try:
            root.mkdir(mode=0o700)
            record = {"owner": owner.record(), "lowers": [str(lower) for lower in lowers]}
            (root / "owner.json").write_bytes(dumps(record))
            upper.upper.mkdir()
            upper.upper.chmod(0o755)  # it becomes the sandbox's /, whatever the umask
            upper.work.mkdir()
        except OSError as error:
            raise pressure(error, root) from error
        return upper

    def freeze(self, upper: Upper, *, name: str | None = None, owned: bool = True) -> Path:
        """Turn an upper that nothing writes to any more into a layer, by a rename.

        Without ``name`` the layer gets a random one. ``owned`` layers are collected when
        this process has gone; a built layer is named by its content and is not owned. When
        a layer of that name exists already, it wins.
        """
        target = self._layer_path(upper, name or f"s{uuid.uuid4().hex}")
        if owned:
            _write_owner(target)
        try:
            os.rename(upper.upper, target)
        except OSError:
            if not target.is_dir():
                raise
        self.discard(upper)
        return target

    def copy(self, upper: Upper) -> Path:
        """A layer with the upper's present content; the upper stays in use. The caller pauses
        the sandbox first. Raises ``HostPressureError`` when the copy does not fit."""
        target = self._layer_path(upper, f"s{uuid.uuid4().hex}")
        scratch = self.new_upper(tmpfs=upper.tmpfs)
        try:
            copy_tree(upper.upper, scratch.upper)
            _write_owner(target)
            os.rename(scratch.upper, target)
        finally:
            self.discard(scratch)
        return target

    def discard(self, upper: Upper) -> None:
        """Remove an upper and all in it. Idempotent. Nothing may be mounted on it."""
        self._remove_tree(upper.root)

    def built(self, name: str) -> Path | None:
        """The layer of a content-addressed name, when a build has finished it."""
        path = self.root / "layers" / name
        return path if path.is_dir() else None

    def flatten(self, lowers: Sequence[Path], *, owned: bool = True) -> tuple[Path, ...]:
        """Merge the longest run of neighbouring layers that share a file system into one.

        The result shows the same files on any base. Layers of other owners' uids that may
        not be linked or copied leave the stack as it was.
        """
        runs = [tuple(run) for _, run in groupby(lowers, key=lambda layer: layer.stat().st_dev)]
        longest = max(runs, key=len)
        if len(longest) < 2:
            return tuple(lowers)
        name = "f" + hashlib.sha256("\0".join(layer.name for layer in longest).encode()).hexdigest()[:32]
        known = longest[0].with_name(name)
        if known.is_dir():
            return tuple(layer for run in runs for layer in ((known,) if run is longest else run))
        scratch = self.new_upper(tmpfs=self._on_tmpfs(longest[0]), lowers=longest)
        try:
            for layer in longest:
                merge_onto(layer, scratch.upper)
        except PermissionError:
            self.discard(scratch)
            return tuple(lowers)
        except OSError as error:
            self.discard(scratch)
            raise pressure(error, scratch.root) from error
        merged = self.freeze(scratch, name=name, owned=owned)
        return tuple(layer for run in runs for layer in ((merged,) if run is longest else run))

    def extend(self, parent: LocalImage, layer: Path, *, owned: bool = True, **changes: Any) -> LocalImage:
        """Save and return the image ``parent`` + ``layer``, flattened when it gets deep."""
        base = parent.rootfs.lowers[: parent.base_depth]
        above = (*parent.rootfs.lowers[parent.base_depth :], layer)
        if is_deep(above):
            above = self.flatten(above, owned=owned)
        rootfs = replace(parent.rootfs, lowers=base + above)
        owner = Owner.current() if owned else None
        return self.save_image(replace(parent, rootfs=rootfs, owner=owner, **changes))

    def save_image(self, image: LocalImage) -> LocalImage:
        """Write the manifest and return the image with its digest, which covers everything
        but the owner. A parent's digest given in ``image`` is ignored."""
        body = _IMAGE.dump_python(replace(image, digest="", owner=None), mode="json")
        digest = "sha256:" + hashlib.sha256(dumps(body)).hexdigest()
        image = replace(image, digest=digest)
        record = {"schema_version": _IMAGE_VERSION, **_IMAGE.dump_python(image, mode="json")}
        write_json(self._manifest(digest), record, sync=False)
        self._loaded[digest] = image
        return image

    def load_image(self, ref: str) -> LocalImage:
        """Raises ``SandboxStartError`` when the image, or a layer of it, is gone."""
        image = self._loaded.get(ref)
        try:
            if image is None:
                image = _parse_image(ref, read_json(self._manifest(ref)))
            for lower in image.rootfs.lowers:
                os.stat(lower)
        except (OSError, ValueError, KeyError, TypeError) as error:
            self._loaded.pop(ref, None)
            raise SandboxStartError(
                f"the local image {ref[:19]} is gone or damaged", fix="run again: it is built anew"
            ) from error
        self._loaded[ref] = image
        return image

    def images(self) -> list[LocalImage]:
        """Every readable image of the store, snapshots included."""
        found: list[LocalImage] = []
        for path in sorted((self.root / "images").glob("*.json")):
            try:
                found.append(_parse_image(f"sha256:{path.stem}", read_json(path)))
            except (OSError, ValueError, KeyError, TypeError):
                continue  # a damaged record names no layer that could be kept for it
        return found

    def remove_image(self, ref: str) -> None:
        """Forget an image; its layers stay for other images until they are collected."""
        self._loaded.pop(ref, None)
        self._manifest(ref).unlink(missing_ok=True)

    def remove_layer(self, name: str) -> None:
        """Remove a base's layer, the images that stand on it, and built layers that no image
        needs any more. Raises ``UsageError`` while a running sandbox uses it."""
        layer = self.root / "layers" / name
        images = self.images()
        held = {lower for path in self._uppers() for lower in _living_lowers(path)}
        held |= {str(lower) for image in images if _lives(image.owner) for lower in image.rootfs.lowers}
        if str(layer) in held:
            raise UsageError(f"{name} is in use by a running sandbox", fix="wait for it, then try again")
        for image in images:
            if layer in image.rootfs.lowers:
                self.remove_image(image.ref)
        self._remove_tree(layer)
        needed = held | {str(lower) for image in self.images() for lower in image.rootfs.lowers}
        for path in (self.root / "layers").glob(f"{BUILT}*"):
            if str(path) not in needed and _age(path) > _ORPHAN_AGE:
                self._remove_tree(path)

    def leftovers(self) -> list[Leftover]:
        """Uppers, snapshot images and snapshot layers of owners that no longer live, unless a
        living owner's image or upper still stands on them. Remove them with ``remove``."""
        found: list[Leftover] = []
        used: set[str] = set()
        for image in self.images():
            if image.owner is None or image.owner.alive():
                used.update(str(lower) for lower in image.rootfs.lowers)
            else:
                found.append(_leftover(self._manifest(image.digest), "image", image.owner))
        for path in self._uppers():
            owner, lowers = _read_owner(path / "owner.json")
            owner = owner or _named_owner(path.name)
            if owner is not None and owner.alive():
                used.update(lowers)
            elif owner is not None or _age(path) > _ORPHAN_AGE:
                found.append(_leftover(path, "upper", owner))
        for record in [
            path for place in self._places() for path in sorted((place / "layers").glob("*.json"))
        ]:
            owner, _ = _read_owner(record)
            layer = record.with_suffix("")
            if owner is not None and not owner.alive() and str(layer) not in used:
                found.append(_leftover(layer, "layer", owner))
        return found

    def remove(self, leftover: Leftover) -> None:
        """Remove what ``leftovers`` named. Idempotent."""
        if leftover.kind == "image":
            self.remove_image(f"sha256:{leftover.path.stem}")
            return
        self._remove_tree(leftover.path)
        if leftover.kind == "layer":
            _owner_path(leftover.path).unlink(missing_ok=True)

    def _places(self) -> list[Path]:
        return [place for place in (self.root, self.tmpfs_root) if place]

    def _uppers(self) -> list[Path]:
        return [path for place in self._places() for path in sorted((place / "uppers").iterdir())]

    def _layer_path(self, upper: Upper, name: str) -> Path:
        """Where this upper's layer goes: on the same file system, as freezing is a rename."""
        return upper.root.parent.parent / "layers" / name

    def _on_tmpfs(self, layer: Path) -> bool:
        return self.tmpfs_root is not None and self.tmpfs_root in layer.parents

    def _manifest(self, ref: str) -> Path:
        return self.root / "images" / f"{ref.removeprefix('sha256:')}.json"

    def _remove_tree(self, path: Path) -> None:
        try:
            remove_tree(path)
        except PermissionError:
            if self._remove_foreign is None:
                raise
            self._remove_foreign(path)


def is_deep(layers: Sequence[Path]) -> bool:
    """Whether layers above a base should be flattened."""
    return len(layers) > FLATTEN_AT or sum(len(os.fsencode(layer)) + 10 for layer in layers) > _MOUNT_OPTIONS


def store_root() -> Path:
    """Where this user's layers, images, bases and build logs are."""
    return state_dir() / "local"


_IMAGE = TypeAdapter(LocalImage)


def _parse_image(ref: str, record: dict[str, Any]) -> LocalImage:
    if record["schema_version"] != _IMAGE_VERSION:
        raise ValueError(f"image record version {record['schema_version']!r}")
    return _IMAGE.validate_python({**record, "digest": ref})


def _owner_path(layer: Path) -> Path:
    return layer.with_name(f"{layer.name}.json")


def _write_owner(layer: Path) -> None:
    """Before the layer exists, so that no owned layer is ever without its owner."""
    write_json(_owner_path(layer), {"owner": Owner.current().record()}, sync=False)


def _named_owner(name: str) -> Owner | None:
    """Whose upper it is by its name, ``u<pid>-<start>-<random>``, on this host since this boot."""
    pid, _, rest = name.removeprefix("u").partition("-")
    start = rest.partition("-")[0]
    if not (pid.isdigit() and start.isdigit()):
        return None
    return replace(Owner.current(), pid=int(pid), start=int(start))


def _read_owner(path: Path) -> tuple[Owner | None, list[str]]:
    try:
        record = read_json(path)
        return Owner.parse(record["owner"]), record.get("lowers", [])
    except (OSError, ValueError, KeyError, TypeError):
        return None, []


def _lives(owner: Owner | None) -> bool:
    return owner is not None and owner.alive()


def _living_lowers(upper: Path) -> list[str]:
    owner, lowers = _read_owner(upper / "owner.json")
    return lowers if _lives(owner) else []


def _leftover(path: Path, kind: str, owner: Owner | None) -> Leftover:
    return Leftover(
        path.stem[:19] if kind == "image" else path.name, kind, _age(path), str(owner or "unknown"), path
    )


def _sweep_memory() -> None:
    """Free the memory of this user's stores that were deleted, as test runs leave them: their
    own cleanup can never run again."""
    for place in _SHM.glob(f"benchflow-{os.geteuid()}-*"):
        link = place / "store"
        if link.is_symlink() and not link.exists() and place.lstat().st_uid == os.geteuid():
            uppers = [path / "owner.json" for path in (place / "uppers").glob("*")]
            if not any(_lives(_read_owner(path)[0]) for path in uppers):
                with suppress(OSError):
                    remove_tree(place)


def _age(path: Path) -> float:
    try:
        return max(0.0, time.time() - path.lstat().st_ctime)
    except OSError:
        return 0.0
