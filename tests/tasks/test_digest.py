from __future__ import annotations

import hashlib
import os
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from benchflow.tasks.digest import task_digest


def plain(files: dict[str, bytes]) -> str:
    """The public algorithm, written out once more."""
    total = hashlib.sha256()
    for name in sorted(files):
        total.update(name.encode() + b"\0" + hashlib.sha256(files[name]).digest())
    return f"sha256:{total.hexdigest()}"


def put(root: Path, files: dict[str, bytes]) -> None:
    for name, data in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)


def test_empty_folder_is_the_hash_of_nothing(tmp_path):
    (tmp_path / "empty").mkdir()
    assert task_digest(tmp_path) == f"sha256:{hashlib.sha256().hexdigest()}"


def test_order_is_by_whole_path(tmp_path):
    # Sorting by folder first would put "a/z" before "a-b".
    files = {"a/z": b"1", "a-b": b"2", ".git/x": b"3", "é": b"4", "a/b/c/d": b""}
    put(tmp_path, files)
    assert task_digest(tmp_path) == plain(files)


def test_modes_links_and_the_source_record_do_not_count(tmp_path):
    put(tmp_path, {"a": b"1"})
    expected = task_digest(tmp_path)
    put(tmp_path, {".benchflow-source.json": b"{}", "sub/.benchflow-source.json": b"{}"})
    (tmp_path / "a").chmod(0o777)
    (tmp_path / "link").symlink_to("a")
    (tmp_path / "folder").symlink_to(tmp_path)
    os.mkfifo(tmp_path / "fifo")
    assert task_digest(tmp_path) == expected


def test_a_change_is_seen_though_the_digest_is_cached(tmp_path):
    put(tmp_path, {"a": b"1"})
    first = task_digest(tmp_path)
    put(tmp_path, {"a": b"2"})
    assert task_digest(tmp_path) == plain({"a": b"2"}) != first


@given(st.dictionaries(st.text("abz-_./é", min_size=1, max_size=6), st.binary(max_size=20), max_size=6))
def test_any_tree(tmp_path_factory, files):
    root = tmp_path_factory.mktemp("tree")
    kept: dict[str, bytes] = {}
    for name, data in files.items():
        parts = [part for part in name.split("/") if part.strip(".")]
        path = root.joinpath(*parts)
        if parts and not any(path.is_relative_to(root / other) for other in kept) and not path.exists():
            put(root, {"/".join(parts): data})
            kept["/".join(parts)] = data
    assert task_digest(root) == plain(kept)
