"""Layers: freezing, copying, flattening, and what may be collected."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchflow.contracts.errors import HostPressureError, SandboxStartError, UsageError
from benchflow.kernel.ownership import Owner
from benchflow.kernel.storage import read_json, write_json
from benchflow.sandboxes.local.layers import FLATTEN_AT, LayerStore, LocalImage, Rootfs, Upper
from benchflow.sandboxes.local.merge import View, make_opaque, make_whiteout

DEAD = Owner(pid=1 << 30, start=1, boot=Owner.current().boot, host=Owner.current().host)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[LayerStore]:
    made = LayerStore(tmp_path / "store")
    yield made
    if made.tmpfs_root is not None:
        shutil.rmtree(made.tmpfs_root)


@pytest.fixture
def image(store: LayerStore) -> LocalImage:
    base = layer(store, {"base": "0"})
    return store.save_image(LocalImage("", "made:up", Rootfs("dir", (base,)), env={"PATH": "/bin"}))


def fill(upper: Upper, files: dict[str, str]) -> Upper:
    for name, text in files.items():
        path = upper.upper / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return upper


def layer(store: LayerStore, files: dict[str, str], *, tmpfs: bool = False, owned: bool = False) -> Path:
    return store.freeze(fill(store.new_upper(tmpfs=tmpfs), files), owned=owned)


def shown(layers: Sequence[Path]) -> dict[str, str | None]:
    """What a stack shows, read through the same eyes as COPY and account look-ups."""
    view = View(layers)
    found: dict[str, str | None] = {}
    pending = [""]
    while pending:
        folder = pending.pop()
        listed = {item.name for one in layers if (one / folder).is_dir() for item in (one / folder).iterdir()}
        for name in listed:
            path = f"{folder}/{name}".lstrip("/")
            place = view.find("/" + path)
            if place is None:
                continue
            found[path] = place.read_text() if place.is_file() else None
            if place.is_dir():
                pending.append(path)
    return found


def orphan(record: Path) -> None:
    """Give what ``record`` describes to a process that no longer lives."""
    write_json(record, {**read_json(record), "owner": DEAD.record()})


def test_freezing_moves_the_tree_and_leaves_no_upper(store: LayerStore) -> None:
    for tmpfs in (False, True):
        upper = fill(store.new_upper(tmpfs=tmpfs), {"a/b": "x"})
        inode = (upper.upper / "a/b").stat().st_ino
        frozen = store.freeze(upper)
        assert (frozen / "a/b").stat().st_ino == inode
        assert not upper.root.exists()
        assert frozen.stat().st_dev == upper.root.parent.stat().st_dev


def test_a_content_named_layer_is_made_once(store: LayerStore) -> None:
    first = store.freeze(fill(store.new_upper(), {"a": "first"}), name="b-1", owned=False)
    second = store.freeze(fill(store.new_upper(), {"a": "second"}), name="b-1", owned=False)
    assert first == second == store.built("b-1")
    assert (first / "a").read_text() == "first"
    assert store.built("b-2") is None


def test_copying_leaves_the_upper_in_use(store: LayerStore) -> None:
    upper = fill(store.new_upper(tmpfs=True), {"a": "1"})
    make_whiteout(upper.upper / "gone")
    (upper.upper / "d").mkdir()
    make_opaque(upper.upper / "d")
    os.link(upper.upper / "a", upper.upper / "hard")
    copied = store.copy(upper)
    (upper.upper / "a").write_text("2")
    assert (copied / "a").read_text() == "1"
    assert (copied / "a").stat().st_ino == (copied / "hard").stat().st_ino
    assert View([layer(store, {"gone": "x", "d/x": "x"}), copied]).find("/gone") is None
    assert View([layer(store, {"gone": "x", "d/x": "x"}), copied]).find("/d/x") is None
    store.discard(upper)


def test_discarding_passes_the_closed_work_folder_and_repeats(store: LayerStore) -> None:
    upper = store.new_upper()
    (upper.work / "work").mkdir()
    (upper.work / "work").chmod(0)
    store.discard(upper)
    store.discard(upper)
    assert not upper.root.exists()


names = st.sampled_from(["a", "b", "c", "d"])
changes = st.lists(
    st.tuples(
        st.sampled_from(["file", "whiteout", "dir", "opaque"]), names, st.none() | names, st.integers(0, 9)
    ),
    max_size=6,
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(stack=st.lists(changes, min_size=2, max_size=5))
def test_a_flattened_stack_shows_the_same_on_its_base(
    stack: list[list[tuple[str, str, str | None, int]]], store: LayerStore
) -> None:
    base = layer(store, {"a/x": "base", "b": "base", "c/a": "base", "c/b": "base", "d/d": "base"})
    layers = []
    for written in stack:
        upper = store.new_upper()
        for kind, name, inner, value in written:
            path = upper.upper / name / inner if inner else upper.upper / name
            if not path.parent.is_dir() and os.path.lexists(path.parent):
                continue
            path.parent.mkdir(exist_ok=True)
            if os.path.lexists(path):
                continue
            if kind == "file":
                path.write_text(str(value))
            elif kind == "whiteout":
                make_whiteout(path)
            else:
                path.mkdir()
                if kind == "opaque":
                    make_opaque(path)
        layers.append(store.freeze(upper))
    flat = store.flatten(layers)
    assert len(flat) == 1
    assert shown([base, *flat]) == shown([base, *layers])


def test_flattening_keeps_owners_modes_and_layers(store: LayerStore) -> None:
    upper = fill(store.new_upper(), {"d/f": "x"})
    (upper.upper / "d").chmod(0o1777)
    (upper.upper / "d/f").chmod(0o4711)
    if os.geteuid() == 0:
        os.chown(upper.upper / "d/f", 1234, 4321)
        (upper.upper / "d/f").chmod(0o4711)
    first = store.freeze(upper)
    second = layer(store, {"d/g": "y"})
    (flat,) = store.flatten([first, second])
    for name in ("d", "d/f"):
        assert (flat / name).stat().st_mode == (second if name == "d" else first).joinpath(
            name
        ).stat().st_mode
    assert (flat / "d/f").stat().st_uid == (first / "d/f").stat().st_uid
    assert (first / "d/f").read_text() == "x"


def test_flattening_stays_within_a_file_system(store: LayerStore) -> None:
    if store.tmpfs_root is None:
        pytest.skip("no tmpfs here")
    disk = [layer(store, {f"d{index}": ""}) for index in range(2)]
    memory = [layer(store, {f"m{index}": ""}, tmpfs=True) for index in range(3)]
    flat = store.flatten([*disk, *memory])
    assert flat[:2] == tuple(disk)
    assert len(flat) == 3
    assert sorted(item.name for item in flat[2].iterdir()) == ["m0", "m1", "m2"]
    assert flat[2].stat().st_dev == memory[0].stat().st_dev


def test_a_deep_chain_of_snapshots_is_flattened(store: LayerStore, image: LocalImage) -> None:
    for index in range(FLATTEN_AT + 5):
        image = store.extend(image, layer(store, {f"f{index}": str(index)}, owned=True))
    assert len(image.rootfs.lowers) < FLATTEN_AT
    expected = {"base": "0", **{f"f{index}": str(index) for index in range(FLATTEN_AT + 5)}}
    assert shown(image.rootfs.lowers) == expected


def test_an_image_is_read_back_as_it_was_saved(store: LayerStore, image: LocalImage, tmp_path: Path) -> None:
    saved = store.save_image(replace(image, env={"A": "1"}, workdir="/app", user="u", notes=("n",)))
    assert saved.digest != image.digest
    assert LayerStore(store.root).load_image(saved.ref) == saved
    assert saved.public().ref == saved.ref
    assert dict(saved.public().env) == {"A": "1"}


def test_an_image_whose_layer_is_gone_is_named(store: LayerStore, image: LocalImage) -> None:
    shutil.rmtree(image.rootfs.lowers[0])
    with pytest.raises(SandboxStartError, match="gone"):
        store.load_image(image.ref)
    with pytest.raises(SandboxStartError, match="gone"):
        store.load_image("sha256:" + "0" * 64)


def test_what_living_owners_made_is_never_a_leftover(store: LayerStore, image: LocalImage) -> None:
    store.new_upper(tmpfs=True, lowers=image.rootfs.lowers)
    store.extend(image, layer(store, {"x": "1"}, owned=True))
    assert store.leftovers() == []


def test_what_dead_owners_made_is_found_and_removed(store: LayerStore, image: LocalImage) -> None:
    for tmpfs in (False, True):
        upper = store.new_upper(tmpfs=tmpfs)
        orphan(upper.root / "owner.json")
    snapshot = store.extend(image, layer(store, {"x": "1"}, tmpfs=True, owned=True))
    top = snapshot.rootfs.lowers[-1]
    orphan(top.with_name(f"{top.name}.json"))
    orphan(store.root / "images" / f"{snapshot.digest.removeprefix('sha256:')}.json")
    found = store.leftovers()
    assert sorted(item.kind for item in found) == ["image", "layer", "upper", "upper"]
    for item in found:
        store.remove(item)
        store.remove(item)
    assert store.leftovers() == []
    assert not top.exists()
    assert store.load_image(image.ref) == image
    with pytest.raises(SandboxStartError):
        store.load_image(snapshot.ref)


def test_a_dead_owners_layer_stays_while_a_live_sandbox_stands_on_it(store: LayerStore) -> None:
    frozen = layer(store, {"x": "1"}, owned=True)
    orphan(frozen.with_name(f"{frozen.name}.json"))
    user = store.new_upper(lowers=[frozen])
    assert store.leftovers() == []
    store.discard(user)
    assert [item.path for item in store.leftovers()] == [frozen]


def test_an_upper_cut_off_at_birth_is_a_leftover_only_when_old(
    store: LayerStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    (store.root / "uppers/young").mkdir()
    assert store.leftovers() == []
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 2 * 3600)
    assert [item.name for item in store.leftovers()] == ["young"]


def test_memory_of_a_deleted_store_is_freed_by_the_next_one(tmp_path: Path) -> None:
    gone = LayerStore(tmp_path / "gone")
    place = gone.tmpfs_root
    if place is None:
        pytest.skip("no tmpfs here")
    live = gone.new_upper(tmpfs=True)
    deep = "import os\nfor _ in range(2000): os.mkdir('d'); os.chdir('d')"  # more than Python recurses
    subprocess.run([sys.executable, "-c", deep], cwd=place / "layers", check=True)
    shutil.rmtree(gone.root)
    for name, freed in (("first", False), ("second", True)):
        made = LayerStore(tmp_path / name).tmpfs_root
        assert made is not None
        assert place.exists() != freed
        shutil.rmtree(made)
        gone.discard(live)


def test_a_base_in_use_is_not_removed(store: LayerStore, image: LocalImage) -> None:
    base = image.rootfs.lowers[0]
    upper = store.new_upper(lowers=image.rootfs.lowers)
    with pytest.raises(UsageError, match="in use"):
        store.remove_layer(base.name)
    store.discard(upper)
    store.remove_layer(base.name)
    assert not base.exists()
    assert store.images() == []


def test_a_full_disk_is_one_clear_error(tmp_path: Path, small_disk: Callable[[int], Path]) -> None:
    """C26: what did not fit is no layer."""
    store = LayerStore(small_disk(4 << 20) / "store")
    upper = fill(store.new_upper(), {"data": "x" * (2 << 20)})
    with pytest.raises(HostPressureError):
        store.copy(upper)
    assert list((store.root / "layers").iterdir()) == []
    store.discard(upper)


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="mounts an overlay")
def test_the_kernel_agrees_with_what_flattening_did(store: LayerStore, tmp_path: Path) -> None:
    base = layer(store, {"d/x": "x", "d/y": "y", "f": "f", "e/k": "k"})
    lowers = (base,)
    point = tmp_path / "mnt"
    point.mkdir()
    steps = ("rm d/x; echo n >d/n", "rm -r e; mkdir e; echo 2 >e/2", "rm f; mkdir f; echo i >f/in", "rm -r d")
    for step in steps:
        upper = store.new_upper(lowers=lowers)
        mount(lowers, point, step, upper)
        lowers = (*lowers, store.freeze(upper))
    listing = "find . | sort; find . -type f | sort | xargs cat"
    flat = (base, *store.flatten(lowers[1:]))
    assert len(flat) == 2
    assert mount(flat, point, listing) == mount(lowers, point, listing)


def mount(lowers: Sequence[Path], point: Path, script: str, upper: Upper | None = None) -> str:
    """Run ``script`` in the kernel's own merge of the layers, in a mount namespace of its own."""
    options = "userxattr,lowerdir=" + ":".join(map(str, reversed(lowers)))
    if upper is not None:
        options += f",upperdir={upper.upper},workdir={upper.work}"
    command = f"mount -t overlay overlay -o {options} {point} && cd {point} && {script}"
    done = subprocess.run(["unshare", "-m", "sh", "-ec", command], capture_output=True, text=True, check=True)
    return done.stdout
