"""What FROM means: imported bases in every form, the host base by consent, or a clear refusal."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import platform
import shutil
import stat
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from benchflow.contracts.errors import HostPressureError, PrerequisiteError, UsageError
from benchflow.sandboxes.local.bases import find_base, import_base, list_bases, remove_base, resolve_base
from benchflow.sandboxes.local.layers import LayerStore

ARCHITECTURE = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())
Member = tuple[tarfile.TarInfo, bytes]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[LayerStore]:
    made = LayerStore(tmp_path / "store")
    yield made
    if made.tmpfs_root is not None:
        shutil.rmtree(made.tmpfs_root)


def member(
    name: str, data: bytes = b"", *, kind: bytes = tarfile.REGTYPE, link: str = "", **more: Any
) -> Member:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.size, info.mode = kind, link, len(data), 0o644
    if kind == tarfile.DIRTYPE:
        info.mode = 0o755
    for key, value in more.items():
        setattr(info, key, value)
    return info, data


def symlink(name: str, target: str) -> Member:
    return member(name, kind=tarfile.SYMTYPE, link=target)


def directory(name: str) -> Member:
    return member(name, kind=tarfile.DIRTYPE)


def tar(*members: Member) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as made:
        for info, data in members:
            made.addfile(info, io.BytesIO(data))
    return out.getvalue()


LAYERS = [
    tar(
        directory("./"), directory("usr"), directory("usr/bin"), member("usr/bin/tool", b"1", mode=0o4755),
        symlink("bin", "usr/bin"), member("etc/old", b"old"), directory("data"),
        member("data/a", b"a"), member("data/b", b"b"),
    ),
    tar(
        member("bin/added", b"through the link"), member("etc/.wh.old"), member("data/.wh..wh..opq"),
        member("data/c", b"c"), member("usr/bin/again", kind=tarfile.LNKTYPE, link="usr/bin/tool"),
        member("etc/passwd", b"root:x:0:0::/root:/bin/sh\n"), symlink("abs", "/etc/passwd"),
        member("dev/null", kind=tarfile.CHRTYPE),
    ),
]  # fmt: skip
CONFIG = json.dumps(
    {
        "architecture": ARCHITECTURE,
        "os": "linux",
        "config": {"Env": ["PATH=/opt/bin:/usr/bin", "LANG=C"], "WorkingDir": "/srv", "User": "1000"},
    }
).encode()


def docker_save(path: Path, layers: list[bytes] = LAYERS, config: bytes = CONFIG) -> Path:
    names = [f"layer{index}.tar" for index in range(len(layers))]
    manifest = json.dumps([{"Config": "config.json", "RepoTags": ["app:1"], "Layers": names}]).encode()
    parts = [member("manifest.json", manifest), member("config.json", config)]
    path.write_bytes(tar(*parts, *(member(name, data) for name, data in zip(names, layers, strict=True))))
    return path


def oci_layout(folder: Path, layers: list[bytes] = LAYERS) -> Path:
    blobs = folder / "blobs/sha256"
    blobs.mkdir(parents=True)

    def blob(data: bytes, **more: Any) -> dict[str, Any]:
        digest = hashlib.sha256(data).hexdigest()
        (blobs / digest).write_bytes(data)
        return {"digest": f"sha256:{digest}", "size": len(data), **more}

    manifest = {"config": blob(CONFIG), "layers": [blob(gzip.compress(data)) for data in layers]}
    foreign = blob(b"{}", platform={"os": "windows", "architecture": ARCHITECTURE})
    ours = blob(json.dumps(manifest).encode(), platform={"os": "linux", "architecture": ARCHITECTURE})
    inner = blob(json.dumps({"manifests": [foreign, ours]}).encode())
    (folder / "index.json").write_text(json.dumps({"manifests": [inner]}))
    (folder / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
    return folder


def as_archive(folder: Path, path: Path) -> Path:
    with tarfile.open(path, "w") as made:
        made.add(folder, ".")
    return path


def check_image(store: LayerStore, name: str) -> None:
    base = find_base(store, name)
    assert base is not None
    (root,) = base.rootfs.lowers
    assert (root / "usr/bin/added").read_bytes() == b"through the link"
    assert os.readlink(root / "bin") == "usr/bin"
    assert os.readlink(root / "abs") == "/etc/passwd"
    assert not (root / "etc/old").exists()
    assert sorted(path.name for path in (root / "data").iterdir()) == ["c"]
    assert (root / "usr/bin/again").stat().st_ino == (root / "usr/bin/tool").stat().st_ino
    assert not (root / "dev/null").exists()
    assert stat.S_IMODE((root / "tmp").stat().st_mode) == 0o1777
    assert dict(base.env) == {"PATH": "/opt/bin:/usr/bin", "LANG": "C"}
    assert (base.workdir, base.user) == ("/srv", "1000")
    assert any("/dev/null" in note for note in base.notes)
    assert base.digest == "sha256:" + hashlib.sha256(CONFIG).hexdigest()


def test_a_docker_save_archive(store: LayerStore, tmp_path: Path) -> None:
    import_base(store, "app:1", docker_save(tmp_path / "saved.tar"))
    check_image(store, "app:1")


def test_an_oci_layout_and_its_archive(store: LayerStore, tmp_path: Path) -> None:
    folder = oci_layout(tmp_path / "layout")
    import_base(store, "folder", folder)
    check_image(store, "folder")
    import_base(store, "archived", as_archive(folder, tmp_path / "archive.tar"))
    check_image(store, "archived")


def test_a_directory_and_a_tar_of_one(store: LayerStore, tmp_path: Path) -> None:
    root = tmp_path / "root"
    (root / "usr/bin").mkdir(parents=True)
    (root / "usr/bin/tool").write_text("tool")
    (root / "etc").mkdir()
    os.mkfifo(root / "etc/pipe")
    (root / "link").symlink_to("/usr")
    packed = tmp_path / "root.tar.gz"
    with tarfile.open(packed, "w:gz") as made:
        made.add(root, ".")
    for name, source in (("dir", root), ("tarred", packed)):
        base = import_base(store, name, source)
        found = find_base(store, name)
        assert found is not None
        (top,) = found.rootfs.lowers
        assert (top / "usr/bin/tool").read_text() == "tool"
        assert os.readlink(top / "link") == "/usr"
        assert not (top / "etc/pipe").exists()
        assert base.notes == ("left out the special file /etc/pipe",)
        assert found.env["PATH"].startswith("/usr/local/sbin:")
    assert (root / "etc/pipe").exists(), "the source is left as it was"


def test_names_have_one_spelling(store: LayerStore, tmp_path: Path) -> None:
    import_base(store, "docker.io/library/debian", docker_save(tmp_path / "saved.tar"))
    for spelling in ("debian", "debian:latest", "library/debian", "docker.io/library/debian:latest"):
        assert resolve_base(store, spelling, None).base == "debian:latest"
    assert find_base(store, "debian:12") is None


def test_listing_replacing_and_removing(store: LayerStore, tmp_path: Path) -> None:
    saved = docker_save(tmp_path / "saved.tar")
    import_base(store, "one", saved)
    import_base(store, "two", saved)
    import_base(store, "two", saved)
    assert [base.name for base in list_bases(store)] == ["one:latest", "two:latest"]
    remove_base(store, "one")
    check_image(store, "two")
    remove_base(store, "two")
    assert list_bases(store) == []
    assert [path for path in (store.root / "layers").iterdir() if path.name.startswith("base-")] == []
    with pytest.raises(UsageError, match="one"):
        remove_base(store, "one")


HOSTILE = {
    "a name above the root": [tar(directory("usr"), member("../../escaped", b"x"))],
    "through a link out": [
        tar(directory("usr"), symlink("out", "../../../.."), member("out/escaped", b"x"))
    ],
    "through an absolute link": [
        tar(directory("usr"), symlink("tmpout", "@OUTSIDE@"), member("tmpout/escaped", b"x"))
    ],
    "a link, then a file over it": [
        tar(directory("usr"), symlink("f", "@OUTSIDE@/escaped")),
        tar(member("f", b"replaced")),
    ],
    "a hard link out": [tar(directory("usr"), member("h", kind=tarfile.LNKTYPE, link="../../../@SECRET@"))],
    "a hard link through a link": [
        tar(directory("usr"), symlink("d", "@OUTSIDE@"),
            member("h", kind=tarfile.LNKTYPE, link="d/secret"))
    ],
    "a whiteout through a link": [
        tar(directory("usr"), symlink("d", "@OUTSIDE@")),
        tar(member("d/.wh.secret")),
    ],
    "an opaque mark through a link": [
        tar(directory("usr"), symlink("d", "@OUTSIDE@")),
        tar(member("d/.wh..wh..opq")),
    ],
    "a loop of links as a parent": [
        tar(directory("usr"), symlink("l", "l"), member("l/x", b"x"))
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_no_archive_reaches_the_host(store: LayerStore, tmp_path: Path, name: str) -> None:
    outside = tmp_path / "o"
    outside.mkdir()
    (outside / "secret").write_text("secret")
    layers = [rewritten(data, outside) for data in HOSTILE[name]]
    try:
        import_base(store, "hostile", docker_save(tmp_path / "saved.tar", layers))
    except UsageError:
        assert list_bases(store) == []
        assert list((store.root / "layers").iterdir()) == []
    assert {path.name: path.read_text() for path in outside.iterdir()} == {"secret": "secret"}
    assert not any(path.name == "escaped" and store.root not in path.parents for path in tmp_path.rglob("*"))
    assert list((store.root / "uppers").iterdir()) == []


def rewritten(data: bytes, outside: Path) -> bytes:
    """The archive with its placeholder paths filled in."""
    members: list[Member] = []
    with tarfile.open(fileobj=io.BytesIO(data)) as given:
        for info in given:
            info.linkname = info.linkname.replace("@OUTSIDE@", str(outside)).replace(
                "@SECRET@", str(outside / "secret").lstrip("/")
            )
            body = given.extractfile(info) if info.isreg() else None
            members.append((info, body.read() if body else b""))
    return tar(*members)


BROKEN: dict[str, Callable[[Path], Path]] = {
    "nothing there": lambda place: place / "missing",
    "an empty directory": lambda place: _made(place / "empty"),
    "text": lambda place: _written(place / "text", b"no archive " * 100),
    "a cut archive": lambda place: _cut(docker_save(place / "saved.tar")),
    "another architecture": lambda place: docker_save(place / "saved.tar", config=b'{"architecture": "vax"}'),
    "a layer with a wrong hash": lambda place: _damaged(oci_layout(place / "layout")),
    "a cut layer": lambda place: docker_save(place / "saved.tar", [LAYERS[0][:1500]]),
    "a manifest without layers": lambda place: _written(
        place / "m.tar", tar(member("manifest.json", b'[{"Config": "c"}]'), member("c", b"{}"))
    ),
    "a zstd layer": lambda place: docker_save(place / "saved.tar", [b"\x28\xb5\x2f\xfd" + b"x" * 600]),
    "a tar without a system": lambda place: _written(place / "t.tar", tar(member("readme", b"x"))),
}


def _made(path: Path) -> Path:
    path.mkdir()
    return path


def _written(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def _cut(path: Path) -> Path:
    return _written(path, path.read_bytes()[:2000])


def _damaged(layout: Path) -> Path:
    layer = gzip.compress(LAYERS[1])
    (layout / "blobs/sha256" / hashlib.sha256(layer).hexdigest()).write_bytes(gzip.compress(LAYERS[0]))
    return layout


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_source_is_one_line_and_leaves_nothing(store: LayerStore, tmp_path: Path, what: str) -> None:
    with pytest.raises(UsageError) as caught:
        import_base(store, "broken", BROKEN[what](tmp_path))
    assert "\n" not in str(caught.value)
    assert list_bases(store) == []
    assert list((store.root / "layers").iterdir()) == []
    assert list((store.root / "uppers").iterdir()) == []


@pytest.mark.parametrize("name", ["host", "scratch", "", "two words"])
def test_reserved_and_impossible_names_are_refused(store: LayerStore, tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError):
        import_base(store, name, docker_save(tmp_path / "saved.tar"))


def test_a_full_disk_imports_nothing(tmp_path: Path, small_disk: Callable[[int], Path]) -> None:
    """C26."""
    store = LayerStore(small_disk(2 << 20) / "store")
    big = docker_save(tmp_path / "saved.tar", [tar(directory("usr"), member("usr/big", b"x" * (4 << 20)))])
    with pytest.raises(HostPressureError):
        import_base(store, "big", big)
    assert list_bases(store) == []
    assert list((store.root / "layers").iterdir()) == []
    assert list((store.root / "uppers").iterdir()) == []


def test_without_a_base_or_consent_the_ways_out_are_named(store: LayerStore) -> None:
    with pytest.raises(PrerequisiteError) as caught:
        resolve_base(store, "python:3.11-slim", None)
    text = str(caught.value)
    assert "\n" not in text
    for words in ("python:3.11-slim", "bench sandbox image import", "local_base: host", "--sandbox docker"):
        assert words in text


def test_consent_uses_the_host_only_when_no_base_has_the_name(store: LayerStore, tmp_path: Path) -> None:
    assert resolve_base(store, "debian:12", "host").base == "host"
    import_base(store, "debian:12", docker_save(tmp_path / "saved.tar"))
    assert resolve_base(store, "debian:12", "host").base == "debian:12"
    assert resolve_base(store, "python:3", "debian:12").base == "debian:12"
    with pytest.raises(UsageError, match="neither"):
        resolve_base(store, "python:3", "no-such-base")


def test_the_host_base_is_an_allowlist(store: LayerStore) -> None:
    base = resolve_base(store, "any", "host")
    targets = [target for _, target in base.rootfs.binds]
    for source, target in base.rootfs.binds:
        assert target.startswith(("/usr", "/bin", "/sbin", "/lib"))
        assert str(source) == target or (target == "/usr/local" and list(source.rglob("*/*")) == [])
    assert targets.index("/usr") < targets.index("/usr/local")
    assert "/usr/local/etc" not in targets
    (skeleton,) = base.rootfs.lowers
    for place in ("home", "root", "run", "var/tmp", "tmp", "proc", "dev"):
        assert list((skeleton / place).iterdir()) == []
    assert {path.name for path in (skeleton / "var").iterdir()} == {"tmp"}


def test_the_made_up_etc_holds_no_account_or_secret_of_this_machine(store: LayerStore) -> None:
    (skeleton,) = resolve_base(store, "any", "host").rootfs.lowers
    etc = skeleton / "etc"
    accounts = [line.split(":")[0] for line in (etc / "passwd").read_text().splitlines()]
    assert accounts == ["root", "daemon", "bin", "sys", "mail", "www-data", "nobody"]
    assert all(line.split(":")[1] == "*" for line in (etc / "shadow").read_text().splitlines())
    assert (etc / "resolv.conf").read_text() == ""
    for name in (
        "pip.conf",
        "apt",
        "sudoers",
        "ssh",
        "environment",
        "gitconfig",
        "ssl/private",
        "krb5.keytab",
    ):
        assert not (etc / name).exists()
    for path in etc.rglob("*"):
        if path.is_symlink():
            assert os.readlink(path).startswith(("/usr/", "/proc/", "..", "/etc/")) or "/" not in os.readlink(
                path
            )


def test_the_host_base_is_made_once_per_state_of_the_machine(
    store: LayerStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from benchflow.sandboxes.local import hostbase

    first = resolve_base(store, "any", "host")
    assert resolve_base(LayerStore(store.root), "any", "host") == first
    marker = tmp_path / "packages"
    marker.write_text("changed")
    monkeypatch.setattr(hostbase, "_WATCHED", (*hostbase._WATCHED, str(marker)))
    assert resolve_base(store, "any", "host").digest != first.digest


def test_scratch_is_empty(store: LayerStore) -> None:
    (root,) = resolve_base(store, "scratch", None).rootfs.lowers
    assert not (root / "usr").exists()
