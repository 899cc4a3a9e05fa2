"""upload and download: what arrives, what is refused, what an agent cannot abuse."""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from benchflow.contracts.errors import TransferError
from benchflow.contracts.sandbox import Sandbox

Create = Callable[..., Awaitable[Sandbox]]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    top = tmp_path / "tree"
    (top / "sub/deep").mkdir(parents=True)
    (top / "run.sh").write_text("#!/bin/sh\necho ran\n")
    (top / "run.sh").chmod(0o755)
    (top / "sub/data").write_bytes(bytes(range(256)))
    (top / "sub/data").chmod(0o640)
    (top / "sub/deep/naïve name").write_text("x")
    (top / "sub/link").symlink_to("../run.sh")
    (top / "empty").mkdir()
    return top


def listing(top: Path) -> dict[str, object]:
    found: dict[str, object] = {}
    for path in sorted(top.rglob("*")):
        mode = path.lstat().st_mode
        what = os.readlink(path) if stat.S_ISLNK(mode) else path.read_bytes() if stat.S_ISREG(mode) else None
        found[str(path.relative_to(top))] = (None if stat.S_ISLNK(mode) else stat.S_IMODE(mode), what)
    return found


async def test_a_tree_survives_the_round_trip(sandbox: Sandbox, tree: Path, tmp_path: Path) -> None:
    await sandbox.upload(tree, "/data/in")
    assert (await sandbox.exec("/data/in/sub/link")).out == "ran\n"
    await sandbox.download("/data/in", tmp_path / "out")
    assert listing(tmp_path / "out") == listing(tree)
    assert all(path.lstat().st_uid == os.geteuid() for path in (tmp_path / "out").rglob("*"))


async def test_a_file_takes_the_name_it_is_given(sandbox: Sandbox, tree: Path, tmp_path: Path) -> None:
    await sandbox.upload(tree / "run.sh", "/opt/new/name")
    assert (await sandbox.exec(["/opt/new/name"])).out == "ran\n"
    await sandbox.exec("echo changed >/opt/new/name; chmod 4700 /opt/new/name")
    await sandbox.download("/opt/new/name", tmp_path / "copy")
    assert (tmp_path / "copy").read_text() == "changed\n"
    assert stat.S_IMODE((tmp_path / "copy").stat().st_mode) == 0o700


async def test_upload_merges_and_replaces(sandbox: Sandbox, tree: Path) -> None:
    await sandbox.exec("mkdir -p /data/sub; echo kept >/data/kept; echo old >/data/run.sh")
    await sandbox.upload(tree, "/data")
    assert (await sandbox.exec("cat kept; ./run.sh", cwd="/data")).out == "kept\nran\n"


async def test_files_belong_to_root_or_to_the_owner_asked_for(sandbox: Sandbox, tree: Path) -> None:
    await sandbox.upload(tree, "/data/root")
    await sandbox.upload(tree, "/data/agent", owner="agent")
    owners = "find {} ! -user {} | head -5"
    assert (await sandbox.exec(owners.format("/data/root", "root"))).out == ""
    if sandbox.capabilities.multiple_users:
        assert (await sandbox.exec(owners.format("/data/agent", "agent"))).out == ""
        assert (await sandbox.exec("echo more >>/data/agent/sub/data", user="agent")).ok
        assert not (await sandbox.exec("echo more >>/data/root/sub/data", user="agent")).ok


async def test_a_large_file_arrives_whole(sandbox: Sandbox, tmp_path: Path) -> None:
    (tmp_path / "big").write_bytes(os.urandom(1 << 20) * 96)
    await sandbox.upload(tmp_path / "big", "/tmp/big")
    there = (await sandbox.exec("sha256sum </tmp/big")).out
    await sandbox.download("/tmp/big", tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == (tmp_path / "big").read_bytes()
    await sandbox.upload(tmp_path / "back", "/tmp/again")
    assert (await sandbox.exec("sha256sum </tmp/again")).out == there


async def test_many_files(sandbox: Sandbox, tmp_path: Path) -> None:
    top = tmp_path / "many"
    for index in range(1500):
        folder = top / str(index % 30)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / str(index)).write_text(str(index))
    await sandbox.upload(top, "/many")
    assert (await sandbox.exec("find /many -type f | wc -l")).out.strip() == "1500"
    await sandbox.download("/many", tmp_path / "back")
    assert listing(tmp_path / "back") == listing(top)


@pytest.mark.parametrize("target", ["/etc/passwd", "/", "../../secret"])
async def test_a_link_of_the_host_that_leaves_the_tree_is_refused(
    sandbox: Sandbox, tree: Path, target: str
) -> None:
    """C56."""
    (tree / "sub/bad").symlink_to(target)
    with pytest.raises(TransferError, match="bad"):
        await sandbox.upload(tree, "/data")
    assert (await sandbox.exec("true")).ok


@pytest.mark.parametrize("target", ["/etc/passwd", "/", "../../etc/shadow", "a/b/../../.."])
async def test_a_link_of_the_sandbox_that_leaves_the_tree_is_refused(
    sandbox: Sandbox, tmp_path: Path, target: str
) -> None:
    await sandbox.exec(
        f"mkdir -p /data/d/a; ln -s .. /data/d/a/b; echo x >/data/d/file; ln -s '{target}' /data/d/bad"
    )
    with pytest.raises(TransferError, match="bad"):
        await sandbox.download("/data/d", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert list(tmp_path.iterdir()) == []
    assert (await sandbox.exec("true")).ok


async def test_inside_links_loops_and_dangling_ones_come_out_as_links(
    sandbox: Sandbox, tmp_path: Path
) -> None:
    await sandbox.exec(
        "mkdir -p /data/d; cd /data/d; echo x >f; ln -s ../f d; ln -s f l; ln -s loop loop; ln -s no n"
    )
    await sandbox.exec("rm /data/d/d")
    await sandbox.download("/data/d", tmp_path / "out")
    links = {path.name: os.readlink(path) for path in (tmp_path / "out").iterdir() if path.is_symlink()}
    assert links == {"l": "f", "loop": "loop", "n": "no"}


async def test_pipes_and_sockets_are_left_out(sandbox: Sandbox, tmp_path: Path) -> None:
    made = await sandbox.exec(
        "mkdir -p /data/d; cd /data/d; echo x >f; mkfifo p; "
        "python3 -c 'import socket; socket.socket(socket.AF_UNIX).bind(\"s\")'"
    )
    assert made.ok
    await asyncio.wait_for(sandbox.download("/data/d", tmp_path / "out"), 60)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["f"]


async def test_hard_links_and_odd_names(sandbox: Sandbox, tmp_path: Path) -> None:
    await sandbox.exec(
        ["sh", "-c", "mkdir -p /data/d; cd /data/d; echo x >'a\nb'; ln 'a\nb' ./-dash; echo y >' '"]
    )
    await sandbox.download("/data/d", tmp_path / "out")
    assert {path.name: path.read_text() for path in (tmp_path / "out").iterdir()} == {
        "a\nb": "x\n", "-dash": "x\n", " ": "y\n",
    }  # fmt: skip


async def test_a_download_over_its_limit_leaves_nothing(sandbox: Sandbox, tmp_path: Path) -> None:
    await sandbox.exec("mkdir -p /data/d; head -c 3000000 /dev/zero >/data/d/f; truncate -s 1T /data/bomb")
    for path in ("/data/d", "/data/d/f", "/data/bomb"):
        with pytest.raises(TransferError, match="limit"):
            await asyncio.wait_for(sandbox.download(path, tmp_path / "out", limit=1_000_000), 60)
        assert list(tmp_path.iterdir()) == []
    await sandbox.download("/data/d", tmp_path / "out", limit=4_000_000)
    assert (tmp_path / "out/f").stat().st_size == 3_000_000
    assert (await sandbox.exec("true")).ok


async def test_what_is_missing_is_named(sandbox: Sandbox, tmp_path: Path) -> None:
    with pytest.raises(TransferError, match="nothing-here"):
        await sandbox.download("/nothing-here", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    with pytest.raises(TransferError, match="missing"):
        await sandbox.upload(tmp_path / "missing", "/data")


async def test_the_agents_unreadable_files_come_out_too(sandbox: Sandbox, tmp_path: Path) -> None:
    await sandbox.exec("mkdir d; echo x >d/f; chmod 0 d/f; chmod 0 d", user="agent")
    where = (await sandbox.exec("pwd")).out.strip()
    await sandbox.download(f"{where}/d", tmp_path / "out")
    assert (tmp_path / "out/f").read_text() == "x\n"


async def test_uploads_and_downloads_side_by_side(sandbox: Sandbox, tree: Path, tmp_path: Path) -> None:
    await asyncio.gather(*(sandbox.upload(tree, f"/side/{index}") for index in range(8)))
    await asyncio.gather(*(sandbox.download(f"/side/{index}", tmp_path / f"o{index}") for index in range(8)))
    assert all(listing(tmp_path / f"o{index}") == listing(tree) for index in range(8))


async def test_a_mounted_directory_is_read_only(create: Create, tree: Path) -> None:
    from benchflow.contracts.sandbox import Mount

    sandbox = await create(mounts=(Mount(tree, "/bundle"),))
    assert (await sandbox.exec(["/bundle/run.sh"], user="agent")).out == "ran\n"
    assert not (await sandbox.exec("echo x >/bundle/new")).ok
    assert not (await sandbox.exec("rm /bundle/run.sh")).ok
