"""spawn: a live process with three pipes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from benchflow.contracts.sandbox import Sandbox

Inside = Callable[[Sandbox, str], Awaitable[list[str]]]


async def test_a_dialogue_over_the_pipes(sandbox: Sandbox) -> None:
    process = await sandbox.spawn('while read line; do echo "<$line>"; done; echo over >&2; exit 3')
    for word in ("one", "two"):
        process.stdin.write(f"{word}\n".encode())
        await process.stdin.drain()
        assert await process.stdout.readline() == f"<{word}>\n".encode()
    process.stdin.write_eof()
    assert await process.stdout.read() == b""
    assert await process.stderr.read() == b"over\n"
    assert await process.wait() == 3
    assert await process.wait() == 3


async def test_much_data_both_ways_at_once(sandbox: Sandbox) -> None:
    data = bytes(range(256)) * (1 << 15)
    process = await sandbox.spawn(["cat"])

    async def send() -> None:
        process.stdin.write(data)
        await process.stdin.drain()
        process.stdin.write_eof()

    _, received = await asyncio.wait_for(asyncio.gather(send(), process.stdout.read()), 120)
    assert received == data
    assert await process.wait() == 0


async def test_user_directory_and_environment(sandbox: Sandbox) -> None:
    process = await sandbox.spawn(
        "id -un; pwd; echo $GIVEN $FROM_IMAGE", cwd="/tmp", env={"GIVEN": "1"}, user="agent"
    )
    name, where, given = (await process.stdout.read()).decode().splitlines()
    assert await process.wait() == 0
    assert (where, given) == ("/tmp", "1 image")
    if sandbox.capabilities.multiple_users:
        assert name == "agent"


async def test_killing_takes_every_descendant(sandbox: Sandbox, marker: str, inside: Inside) -> None:
    process = await sandbox.spawn(
        f"trap '' TERM; (setsid sh -c 'trap \"\" TERM HUP; while :; do sleep {marker}; done' &) ; "
        f"echo ready; sleep {marker}"
    )
    assert await process.stdout.readline() == b"ready\n"
    await process.kill()
    assert await process.wait() < 0
    assert await inside(sandbox, marker) == []
    await process.kill()


async def test_an_ended_process_is_reported_while_its_child_lives(
    sandbox: Sandbox, marker: str, inside: Inside
) -> None:
    process = await sandbox.spawn(f"setsid sleep {marker} >/dev/null 2>&1 </dev/null & exit 5")
    assert await asyncio.wait_for(process.wait(), 60) == 5
    assert len(await inside(sandbox, marker)) == 1


async def test_teardown_ends_spawned_processes(
    sandbox: Sandbox, marker: str, on_host: Callable[[str], list[int]]
) -> None:
    process = await sandbox.spawn(["sh", "-c", "echo up; read line", marker])
    assert await process.stdout.readline() == b"up\n"  # before that its command line may be unset
    assert on_host(marker)
    await sandbox.teardown()
    assert await asyncio.wait_for(process.stdout.read(), 60) == b""
    assert on_host(marker) == []
