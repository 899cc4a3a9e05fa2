"""Standing still, snapshots and forks, many at once, the end, and what dead owners leave."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from benchflow.contracts.errors import SandboxError
from benchflow.contracts.sandbox import (
    ImageSource,
    Limits,
    Sandbox,
    SandboxImage,
    SandboxProvider,
    SandboxSpec,
)

Create = Callable[..., Awaitable[Sandbox]]
Inside = Callable[[Sandbox, str], Awaitable[list[str]]]
Doomed = Callable[[str], "subprocess.Popen[str]"]

CLOCK = """
import time
while True:
    print(time.clock_gettime_ns(time.CLOCK_MONOTONIC), flush=True)
    time.sleep(0.002)
"""


async def test_nothing_runs_while_paused(sandbox: Sandbox) -> None:
    """The ticker's own stamps tell: the clock is the machine's, the same in and outside."""
    ticker = await sandbox.spawn(["python3", "-c", CLOCK], user="agent")
    await ticker.stdout.readline()
    await sandbox.pause()
    still_from = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
    await asyncio.sleep(0.3)  # the pause under test
    still_to = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
    await sandbox.resume()
    stamp = 0
    stamps = []
    while stamp < still_to:
        stamp = int(await asyncio.wait_for(ticker.stdout.readline(), 60))
        stamps.append(stamp)
    assert [at for at in stamps if still_from < at < still_to] == []
    await ticker.kill()


async def test_pausing_twice_and_resuming_twice(sandbox: Sandbox) -> None:
    for _ in range(2):
        await sandbox.pause()
        await sandbox.pause()
        await sandbox.resume()
        await sandbox.resume()
    assert (await sandbox.exec("echo alive")).out == "alive\n"


async def test_a_paused_sandbox_can_be_torn_down(
    sandbox: Sandbox, marker: str, on_host: Callable[[str], list[int]]
) -> None:
    await sandbox.spawn(["sleep", marker])
    await sandbox.pause()
    await asyncio.wait_for(sandbox.teardown(), 60)
    assert on_host(marker) == []


async def test_a_child_starts_with_the_parents_files(sandbox: Sandbox, create: Create) -> None:
    await sandbox.exec(
        "echo one >/data; mkdir -p /d/e; echo two >/d/e/f; chmod 4750 /d/e/f; ln -s f /d/e/l; rm /etc/built"
    )
    await sandbox.exec("echo mine >mine", user="agent")
    image = await sandbox.snapshot()
    child = await create(of=image)
    seen = await child.exec(
        "cat /data /d/e/l; stat -c %a /d/e/f; test ! -e /etc/built; cat mine; echo $FROM_IMAGE"
    )
    assert seen.out == "one\ntwo\n4750\nmine\nimage\n"
    assert (await child.exec("echo more >>mine; stat -c %U mine", user="agent")).ok


async def test_siblings_and_parent_do_not_see_each_other(sandbox: Sandbox, create: Create) -> None:
    await sandbox.exec("mkdir /w; echo common >/w/f; echo x >/w/gone")
    image = await sandbox.snapshot()
    children = await asyncio.gather(*(create(of=image) for _ in range(4)))
    await asyncio.gather(
        *(
            child.exec(f"echo {index} >/w/f; echo {index} >/w/own{index}; rm /w/gone")
            for index, child in enumerate(children)
        ),
        sandbox.exec("echo parent >>/w/f"),
    )
    for index, child in enumerate(children):
        assert (await child.exec("cat /w/f; ls /w")).out.split() == [str(index), "f", f"own{index}"]
    assert (await sandbox.exec("cat /w/f; ls /w")).out.split() == ["common", "parent", "f", "gone"]
    late = await create(of=image)
    assert (await late.exec("cat /w/f; ls /w")).out.split() == ["common", "f", "gone"]


async def test_deleting_and_making_again_across_snapshots(sandbox: Sandbox, create: Create) -> None:
    await sandbox.exec("mkdir /w; echo 1 >/w/a; echo 1 >/w/b")
    await sandbox.snapshot()
    await sandbox.exec("rm -r /w; mkdir /w; echo 2 >/w/c")
    image = await sandbox.snapshot()
    await sandbox.exec("rm -r /w; echo file >/w")
    last = await sandbox.snapshot()
    assert (await (await create(of=image)).exec("ls /w")).out == "c\n"
    assert (await (await create(of=last)).exec("cat /w")).out == "file\n"


async def test_a_long_chain_of_snapshots(sandbox: Sandbox, create: Create) -> None:
    """Longer than any sensible stack of layers."""
    for index in range(25):
        await sandbox.exec(f"echo {index} >/chain; echo {index} >/chain{index}; rm -f /chain{index - 2}")
        image = await sandbox.snapshot()
    child = await create(of=image)
    assert (await child.exec("cat /chain; ls -d /chain*")).out.split() == [
        "24",
        "/chain",
        "/chain23",
        "/chain24",
    ]


async def test_a_snapshot_of_a_snapshot_in_another_sandbox(sandbox: Sandbox, create: Create) -> None:
    await sandbox.exec("echo a >/a")
    child = await create(of=await sandbox.snapshot())
    await child.exec("echo b >/b")
    grandchild = await create(of=await child.snapshot())
    await child.teardown()
    assert (await grandchild.exec("cat /a /b")).out == "a\nb\n"


async def test_a_process_with_open_files_lives_on_and_leaves_the_image_alone(
    sandbox: Sandbox, create: Create
) -> None:
    process = await sandbox.spawn("exec >/log; n=0; while read line; do n=$((n + 1)); echo $n; done")
    process.stdin.write(b"x\n")
    while (await sandbox.exec("cat /log")).out != "1\n":
        pass
    image = await sandbox.snapshot()
    process.stdin.write(b"x\n")
    while (await sandbox.exec("cat /log")).out != "1\n2\n":
        pass
    child = await create(of=image)
    assert (await child.exec("cat /log")).out == "1\n"
    process.stdin.write_eof()
    assert await process.wait() == 0


async def test_a_snapshot_while_paused(sandbox: Sandbox, create: Create) -> None:
    await sandbox.exec("echo x >/x")
    await sandbox.pause()
    image = await sandbox.snapshot()
    child = await create(of=image)
    assert (await child.exec("cat /x")).out == "x\n"
    await sandbox.resume()
    assert (await sandbox.exec("cat /x")).out == "x\n"


async def test_fifty_at_once_under_one_name(
    provider: SandboxProvider, image: SandboxImage, label: str, remains: Callable[[], set[str]]
) -> None:
    """C26: the name is a label, not a key."""
    before = remains()

    async def one(index: int) -> str:
        sandbox = await provider.create(image, SandboxSpec(name=label, limits=Limits(memory_mb=512)))
        try:
            await sandbox.exec(f"echo {index} >/tmp/me")
            return (await sandbox.exec("cat /tmp/me")).out.strip()
        finally:
            await sandbox.teardown()

    results = await asyncio.gather(*(one(index) for index in range(50)))
    assert results == [str(index) for index in range(50)]
    assert remains() - before == set()


async def test_teardown_is_idempotent_and_leaves_nothing(
    provider: SandboxProvider,
    image: SandboxImage,
    label: str,
    marker: str,
    remains: Callable[[], set[str]],
    on_host: Callable[[str], list[int]],
) -> None:
    before = remains()
    sandbox = await provider.create(image, SandboxSpec(name=label))
    await sandbox.exec(f"setsid sh -c 'trap \"\" TERM; while :; do sleep {marker}; done' >/dev/null 2>&1 &")
    await sandbox.exec("mkdir -p d/e; echo x >d/e/f; chmod 0 d/e d", user="agent")
    waiting = asyncio.ensure_future(sandbox.exec(f"sleep {marker}"))
    assert remains() - before
    await asyncio.gather(sandbox.teardown(), sandbox.teardown())
    await sandbox.teardown()
    with pytest.raises(SandboxError):
        await waiting
    with pytest.raises(SandboxError):
        await sandbox.exec("true")
    assert on_host(marker) == []
    assert remains() - before == set()


async def test_a_cancelled_start_leaves_nothing(
    provider: SandboxProvider, image: SandboxImage, label: str, remains: Callable[[], set[str]]
) -> None:
    before = remains()
    for ticks in (0, 1, 2, 5, 20, 100):
        task = asyncio.ensure_future(provider.create(image, SandboxSpec(name=label)))
        for _ in range(ticks):
            await asyncio.sleep(0)
        task.cancel()
        try:
            await (await task).teardown()
        except asyncio.CancelledError:
            pass
    assert remains() - before == set()


async def test_closing_the_provider_ends_its_sandboxes(
    provider: SandboxProvider,
    image: SandboxImage,
    label: str,
    marker: str,
    on_host: Callable[[str], list[int]],
) -> None:
    sandbox = await provider.create(image, SandboxSpec(name=label))
    await sandbox.spawn(["sleep", marker])
    await provider.close()
    assert on_host(marker) == []


async def test_a_killed_owner_leaves_what_the_reaper_removes(
    provider: SandboxProvider,
    doomed: Doomed,
    marker: str,
    on_host: Callable[[str], list[int]],
    remains: Callable[[], set[str]],
) -> None:
    """C24."""
    before = remains()
    owner = doomed(marker)
    live = await provider.reap()
    assert [item for item in live if "doomed" in item.name] == [], "a living owner's sandbox was touched"
    assert on_host(marker)
    os.kill(owner.pid, signal.SIGKILL)
    owner.wait()
    assert await provider.reap(older_than=3600) == []
    planned = await provider.reap(dry_run=True)
    assert planned
    assert not any(item.removed for item in planned)
    assert remains() - before
    done = await provider.reap()
    assert {(item.kind, item.name) for item in done} == {(item.kind, item.name) for item in planned}
    assert all(item.removed for item in done)
    assert on_host(marker) == [owner.pid] * (owner.pid in on_host(marker))
    assert remains() - before == set()
    assert await provider.reap() == []


async def test_the_reaper_leaves_the_living_alone(
    provider: SandboxProvider, sandbox: Sandbox, create: Create
) -> None:
    await sandbox.exec("echo x >/x")
    image = await sandbox.snapshot()
    await provider.reap()
    assert (await sandbox.exec("cat /x")).out == "x\n"
    assert (await (await create(of=image)).exec("cat /x")).out == "x\n"


REFORK = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: os.fork())
signal.signal(signal.SIGHUP, signal.SIG_IGN)
while True:
    if os.fork():
        os._exit(0)
    os.setsid()
    open(sys.argv[1], "w").write(str(time.time_ns()))
    time.sleep(0.005)
"""


async def test_killed_processes_are_proved_gone(sandbox: Sandbox, inside: Inside, marker: str) -> None:
    """C20: a daemon that forks on TERM, changes its pid all the time and rewrites a file."""
    root = await sandbox.spawn(["sleep", "87654.5"])
    for index in range(3):
        started = await sandbox.exec(
            ["sh", "-c", f'python3 -c "$0" "$PWD/f{index}" {marker} >/dev/null 2>&1 &', REFORK], user="agent"
        )
        assert started.ok
    while not (await sandbox.exec("test -s f0 -a -s f1 -a -s f2")).ok:
        pass
    assert await sandbox.kill_processes(user="agent") >= 1
    assert await inside(sandbox, marker) == []
    frozen = (await sandbox.exec("cat f0 f1 f2")).out
    await asyncio.sleep(0.1)  # twenty of the daemon's periods: time in which it must not write
    assert (await sandbox.exec("cat f0 f1 f2")).out == frozen
    if sandbox.capabilities.multiple_users:
        assert len(await inside(sandbox, "87654.5")) == 1, "another user's process was killed"
    assert await sandbox.kill_processes() >= 1 or not sandbox.capabilities.multiple_users
    assert await inside(sandbox, "87654.5") == []
    assert await root.wait() < 0
    assert await sandbox.kill_processes() == 0
    assert (await sandbox.exec("echo usable")).out == "usable\n"


async def test_equal_sources_give_equal_images_and_other_files_another(
    provider: SandboxProvider, source: ImageSource, image: SandboxImage, label: str, tmp_path: Path
) -> None:
    same = await asyncio.gather(*(provider.prepare(source) for _ in range(4)))
    assert {item.digest for item in same} == {image.digest}
    assert image.workdir is None
    (tmp_path / "Dockerfile").write_text("FROM debian:12\nWORKDIR /srv/app\nENV FROM_IMAGE=other\n")
    other = await provider.prepare(replace(source, context=tmp_path, dockerfile=tmp_path / "Dockerfile"))
    assert other.digest != image.digest
    sandbox = await provider.create(other, SandboxSpec(name=label))
    assert (await sandbox.exec("pwd; echo $FROM_IMAGE")).out == "/srv/app\nother\n"
    assert (await sandbox.exec("touch x", user="agent")).ok
    await sandbox.teardown()


async def test_limits_in_force_are_told_and_hold(create: Create) -> None:
    sandbox = await create(limits=Limits(memory_mb=128, pids=64))
    if sandbox.capabilities.memory_limit:
        assert sandbox.enforced["memory_mb"] == 128
        eat = await sandbox.exec(["python3", "-c", "x = bytearray(400 << 20); print(len(x))"])
        assert not eat.ok
    if sandbox.capabilities.pids_limit:
        bomb = await sandbox.exec("for i in $(seq 200); do sleep 5 & done 2>&1; true", timeout=60)
        assert "fork" in (bomb.out + bomb.err).lower()
    await sandbox.kill_processes()
    assert (await sandbox.exec("echo alive")).out == "alive\n"


async def test_what_cannot_be_done_here_says_why(provider: SandboxProvider) -> None:
    capabilities = provider.capabilities()
    missing = [name for name, value in asdict(capabilities).items() if value is False]
    assert [name for name in missing if not capabilities.why.get(name)] == []
