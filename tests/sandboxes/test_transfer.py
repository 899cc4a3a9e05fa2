"""Upload and download on the host's side: what is kept, what is refused, what is never touched."""

from __future__ import annotations

import io
import os
import stat
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchflow.contracts.errors import TransferError
from benchflow.sandboxes.transfer import pack, unpack

Member = tuple[tarfile.TarInfo, bytes]


def member(
    name: str, kind: bytes = tarfile.REGTYPE, data: bytes = b"", link: str = "", mode: int = 0o644
) -> Member:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.mode, info.size = kind, link, mode, len(data)
    return info, data


def archive(*members: Member, root: bool = True) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for info, data in [member(".", tarfile.DIRTYPE, mode=0o755), *members] if root else members:
            tar.addfile(info, io.BytesIO(data) if data else None)
    return out.getvalue()


def packed(path: Path, **options: object) -> bytes:
    return b"".join(pack(path, **options))  # type: ignore[arg-type]


def tree(root: Path) -> dict[str, object]:
    """Names with mode and content, link targets included."""
    found: dict[str, object] = {}
    for path in sorted(root.rglob("*")):
        mode = path.lstat().st_mode
        name = str(path.relative_to(root))
        if path.is_symlink():
            found[name] = os.readlink(path)
        else:
            found[name] = (oct(stat.S_IMODE(mode)), path.read_bytes() if path.is_file() else None)
    return found


@pytest.fixture
def outside(tmp_path: Path) -> Callable[[], None]:
    """Check that nothing but ``target`` appeared or changed beside it."""
    (tmp_path / "secret").write_text("secret")
    before = {path: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}

    def check() -> None:
        now = {path: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
        assert now == before
        assert {path.name for path in tmp_path.iterdir() if path.is_dir()} <= {"target"}

    return check


def test_round_trip_keeps_content_modes_and_inside_links(tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "bin").mkdir(parents=True)
    (source / "bin/run").write_bytes(os.urandom(3 << 20))
    (source / "bin/run").chmod(0o755)
    (source / "empty").mkdir()
    (source / "empty").chmod(0o700)
    (source / "naïve \n name").write_text("x")
    (source / "link").symlink_to("bin/run")
    (source / "bin/up").symlink_to("../empty")
    (source / "dangling").symlink_to("bin/missing")
    (source / "loop").symlink_to("loop")
    (source / ("d" * 150)).mkdir()
    (source / ("d" * 150) / ("f" * 200)).write_text("long")
    unpack(io.BytesIO(packed(source)), tmp_path / "target")
    assert tree(tmp_path / "target") == tree(source)


def test_packing_is_deterministic(tmp_path: Path) -> None:
    for name in ("one", "two"):
        folder = tmp_path / name
        folder.mkdir()
        for file in "cab" if name == "one" else "bca":
            (folder / file).write_text(file)
            os.utime(folder / file, (1_700_000_000, 1_700_000_000))
        os.utime(folder, (1_700_000_000, 1_700_000_000))
    assert packed(tmp_path / "one") == packed(tmp_path / "two")


def test_a_single_file_round_trips_and_replaces_an_old_one(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("new")
    (tmp_path / "a").chmod(0o751)
    (tmp_path / "b").write_text("old")
    unpack(io.BytesIO(packed(tmp_path / "a")), tmp_path / "b")
    assert (tmp_path / "b").read_text() == "new"
    assert stat.S_IMODE((tmp_path / "b").stat().st_mode) == 0o751


def test_other_tools_read_our_archives(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / ("n" * 120)).write_bytes(b"12345")
    with tarfile.open(fileobj=io.BytesIO(packed(tmp_path / "source"))) as tar:
        assert tar.getnames() == [".", "n" * 120]


@pytest.mark.parametrize("target", ["/etc/passwd", "/", "../secret", "a/../../secret", "a/b/../../../secret"])
def test_a_link_that_leaves_the_tree_is_refused_when_packing(tmp_path: Path, target: str) -> None:
    """C56."""
    source = tmp_path / "source"
    (source / "a").mkdir(parents=True)
    (source / "a/b").symlink_to("..")
    (source / "link").symlink_to(target)
    with pytest.raises(TransferError, match="link"):
        packed(source)


def test_an_absolute_link_into_the_tree_becomes_relative(tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "deep").mkdir(parents=True)
    (source / "file").write_text("x")
    (source / "deep/link").symlink_to(source / "file")
    unpack(io.BytesIO(packed(source)), tmp_path / "target")
    assert os.readlink(tmp_path / "target/deep/link") == "../file"


def test_special_files_are_left_out_and_named(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    os.mkfifo(source / "pipe")
    (source / "file").write_text("x")
    skipped: list[str] = []
    with tarfile.open(fileobj=io.BytesIO(packed(source, skipped=skipped))) as tar:
        assert tar.getnames() == [".", "file"]
    assert skipped == ["pipe"]


def test_a_missing_or_unreadable_source_is_named(tmp_path: Path) -> None:
    with pytest.raises(TransferError, match="nowhere"):
        packed(tmp_path / "nowhere")


def test_a_file_that_shrinks_while_it_is_read_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x" * (3 << 20))
    stream = pack(tmp_path / "file")
    next(stream), next(stream)
    os.truncate(tmp_path / "file", 1 << 20)
    with pytest.raises(TransferError, match="shorter"):
        list(stream)


def test_a_sparse_file_is_streamed_in_bounded_pieces(tmp_path: Path) -> None:
    with open(tmp_path / "big", "wb") as handle:
        handle.truncate(64 << 20)
    sizes = [len(chunk) for chunk in pack(tmp_path / "big")]
    assert max(sizes) <= 1 << 20
    assert sum(sizes) >= 64 << 20


HOSTILE = {
    "parent": [member("../secret", data=b"x")],
    "parent inside": [member("a/../../secret", data=b"x")],
    "absolute": [member("/etc/x", data=b"x")],
    "link out": [member("l", tarfile.SYMTYPE, link="../secret")],
    "absolute link": [member("l", tarfile.SYMTYPE, link="/etc/passwd")],
    "empty link": [member("l", tarfile.SYMTYPE, link="")],
    "link out through a link": [
        member("a", tarfile.DIRTYPE, mode=0o755),
        member("a/up", tarfile.SYMTYPE, link=".."),
        member("l", tarfile.SYMTYPE, link="a/up/../secret"),
    ],
    "file through a link": [member("d", tarfile.SYMTYPE, link="."), member("d/x", data=b"x")],
    "file through an outside link": [member("d", tarfile.SYMTYPE, link=".."), member("d/secret", data=b"x")],
    "hard link out": [member("h", tarfile.LNKTYPE, link="../secret")],
    "hard link to an absolute name": [member("h", tarfile.LNKTYPE, link="/etc/passwd")],
    "hard link to what is missing": [member("h", tarfile.LNKTYPE, link="later"), member("later", data=b"x")],
    "hard link to a link": [member("l", tarfile.SYMTYPE, link="x"), member("h", tarfile.LNKTYPE, link="l")],
    "the same file twice": [member("f", data=b"1"), member("f", data=b"2")],
    "a link where a file was": [member("f", data=b"1"), member("f", tarfile.SYMTYPE, link="x")],
    "a file as a directory": [member("f", data=b"1"), member("f/x", data=b"2")],
    "a directory where a file was": [member("f", data=b"1"), member("f", tarfile.DIRTYPE)],
    "too large": [member("f", data=b"x" * 70_000)],
    "too many": [member(f"f{index}") for index in range(200)],
    "too deep": [member("/".join(["d"] * 300), data=b"x")],
    "too long": [member("n" * 300, data=b"x")],
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_archive_is_refused_and_changes_nothing(
    name: str, tmp_path: Path, outside: Callable[[], None]
) -> None:
    target = tmp_path / "target"
    with pytest.raises(TransferError):
        unpack(io.BytesIO(archive(*HOSTILE[name])), target, limit=65_536)
    assert not target.exists()
    outside()


@pytest.mark.parametrize("cut", [0, 100, 512, 700, 1024, 1536, 2000])
def test_a_truncated_archive_leaves_nothing(tmp_path: Path, cut: int, outside: Callable[[], None]) -> None:
    data = archive(member("a", data=b"x" * 100), member("b", data=b"y" * 600))
    with pytest.raises(TransferError):
        unpack(io.BytesIO(data[:cut]), tmp_path / "target")
    assert not (tmp_path / "target").exists()
    outside()


def test_devices_and_pipes_in_an_archive_are_left_out(tmp_path: Path) -> None:
    data = archive(
        member("dev", tarfile.CHRTYPE), member("blk", tarfile.BLKTYPE), member("p", tarfile.FIFOTYPE)
    )
    skipped: list[str] = []
    unpack(io.BytesIO(data), tmp_path / "target", skipped=skipped)
    assert tree(tmp_path / "target") == {}
    assert skipped == ["dev", "blk", "p"]


def test_an_endless_extended_header_is_refused_without_reading_it(tmp_path: Path) -> None:
    info = tarfile.TarInfo("././@PaxHeader")
    info.type, info.size = tarfile.XHDTYPE, 1 << 40
    with pytest.raises(TransferError, match="too large"):
        unpack(io.BytesIO(info.tobuf(tarfile.GNU_FORMAT)), tmp_path / "target")


def test_set_id_bits_are_dropped_and_the_owner_can_always_remove(tmp_path: Path) -> None:
    data = archive(
        member("d", tarfile.DIRTYPE, mode=0o555), member("d/f", data=b"x", mode=0o4111), root=False
    )
    unpack(io.BytesIO(archive(root=True)), tmp_path / "target")
    unpack(io.BytesIO(data), tmp_path / "target/in")
    assert stat.S_IMODE((tmp_path / "target/in/d/f").stat().st_mode) == 0o711
    assert stat.S_IMODE((tmp_path / "target/in/d").stat().st_mode) == 0o755
    assert (tmp_path / "target/in/d/f").stat().st_uid == os.geteuid()


def test_a_directory_merges_into_an_existing_one(tmp_path: Path) -> None:
    target = tmp_path / "target"
    (target / "sub").mkdir(parents=True)
    (target / "sub/kept").write_text("kept")
    (target / "sub/old").write_text("old")
    (tmp_path / "elsewhere").mkdir()
    (target / "sub/dir").symlink_to(tmp_path / "elsewhere")
    unpack(
        io.BytesIO(
            archive(
                member("sub", tarfile.DIRTYPE, mode=0o755),
                member("sub/old", data=b"new"),
                member("sub/dir", tarfile.DIRTYPE, mode=0o755),
                member("sub/dir/x", data=b"x"),
            )
        ),
        target,
    )
    assert (target / "sub/kept").read_text() == "kept"
    assert (target / "sub/old").read_text() == "new"
    assert list((tmp_path / "elsewhere").iterdir()) == []
    assert not (target / "sub/dir").is_symlink()


def test_an_archive_under_another_root_name(tmp_path: Path) -> None:
    """Container engines put the copied path's own name at the top."""
    data = archive(member("app", tarfile.DIRTYPE, mode=0o755), member("app/x", data=b"x"), root=False)
    unpack(io.BytesIO(data), tmp_path / "target", root="app")
    assert tree(tmp_path / "target") == {"x": ("0o644", b"x")}
    with pytest.raises(TransferError):
        unpack(io.BytesIO(archive(member("other", data=b"x"), root=False)), tmp_path / "b", root="app")


names = st.lists(
    st.sampled_from(["a", "b", "c", "..", ".", "", "a" * 300, "\u00e9", "x\ny"]), min_size=1, max_size=5
).map("/".join)
kinds = st.sampled_from(
    [tarfile.REGTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE]
)
members = st.builds(
    lambda name, kind, data, link, lead: member(
        lead + name, kind, data if kind == tarfile.REGTYPE else b"", link
    ),
    names,
    kinds,
    st.binary(max_size=600),
    names,
    st.sampled_from(["", "", "", "/", "../"]),
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(listed=st.lists(members, max_size=8), cut=st.none() | st.integers(0, 6000))
def test_no_archive_writes_or_points_outside(
    listed: list[Member], cut: int | None, tmp_path_factory: pytest.TempPathFactory
) -> None:
    place = tmp_path_factory.mktemp("hostile")
    (place / "secret").write_text("secret")
    target = place / "target"
    try:
        unpack(io.BytesIO(archive(*listed)[:cut]), target, limit=1 << 20)
    except TransferError:
        assert not target.exists()
    assert {path.name for path in place.iterdir()} <= {"secret", "target"}
    assert (place / "secret").read_text() == "secret"
    for path in target.rglob("*"):
        mode = path.lstat().st_mode
        assert stat.S_ISREG(mode) or stat.S_ISDIR(mode) or stat.S_ISLNK(mode)
        assert Path(os.path.realpath(path)).is_relative_to(target)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.binary(max_size=3000))
def test_random_bytes_are_one_clear_error(data: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    place = tmp_path_factory.mktemp("noise")
    with pytest.raises(TransferError):
        unpack(io.BytesIO(data), place / "target")
    assert list(place.iterdir()) == []
