"""A sandbox that dies under its user: every call ends, soon, and says so."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from benchflow.contracts.errors import SandboxError, SandboxLostError, SandboxStartError
from benchflow.contracts.sandbox import Limits, SandboxImage, SandboxSpec
from benchflow.sandboxes.local.leases import children, leases
from benchflow.sandboxes.local.provider import LocalProvider
from benchflow.sandboxes.local.sandbox import LocalSandbox


@pytest.fixture
def process_of(home):
    """The host's pid of a sandbox's bubblewrap, by its lease."""

    def find(sandbox: LocalSandbox) -> int:
        (lease,) = [
            lease
            for lease in leases(LocalProvider().store.lease_folder)
            if lease.name.startswith(sandbox.name)
        ]
        assert lease.process is not None
        return lease.process[0]

    return find


@pytest.mark.parametrize("victim", ["bubblewrap", "first process"])
async def test_pending_and_later_calls_fail_when_the_sandbox_dies(
    sandbox: LocalSandbox, process_of, victim: str
) -> None:
    process = await sandbox.spawn(["sleep", "1000"])
    pending = [asyncio.ensure_future(sandbox.exec(["sleep", "1000"])) for _ in range(3)]
    await sandbox.exec(["true"])  # the three are under way
    outer = process_of(sandbox)
    (inner,) = children(outer)
    os.kill(outer if victim == "bubblewrap" else inner, signal.SIGKILL)
    async with asyncio.timeout(30):
        results = await asyncio.gather(*pending, return_exceptions=True)
        ended = [await asyncio.gather(process.wait(), return_exceptions=True)]
        while True:  # the first signs may be killed commands; then the loss is known
            try:
                await sandbox.exec(["true"])
            except SandboxLostError:
                break
    for result in (*results, ended[0][0]):
        code = getattr(result, "exit_code", result)
        assert isinstance(result, SandboxLostError) or code == -9
    for call in (sandbox.spawn(["true"]), sandbox.kill_processes(), sandbox.snapshot(), sandbox.pause()):
        with pytest.raises(SandboxLostError):
            await call
    await sandbox.teardown()


async def test_a_supervisor_killed_by_root_ends_its_call(sandbox: LocalSandbox) -> None:
    result = await sandbox.exec("kill -9 $PPID; sleep 1000")
    assert result.exit_code == -9
    assert (await sandbox.exec(["echo", "on"])).out == "on\n"
    assert await sandbox.kill_processes() >= 1


async def test_a_sandbox_ends_at_its_lifetime(create) -> None:
    sandbox = await create(lifetime_sec=0.5)
    with pytest.raises(SandboxLostError, match="lifetime"):
        await sandbox.exec(["sleep", "1000"])


async def test_a_paused_sandbox_refuses_and_resumes(sandbox: LocalSandbox) -> None:
    await sandbox.pause()
    with pytest.raises(SandboxError, match="paused"):
        await sandbox.exec(["true"])
    await sandbox.resume()
    assert (await sandbox.exec(["true"])).ok


async def test_a_command_that_takes_all_memory_is_killed_alone(create) -> None:
    sandbox = await create(limits=Limits(memory_mb=96, storage_mb=16))
    if not sandbox.capabilities.memory_limit:
        pytest.skip(sandbox.capabilities.why["memory_limit"])
    assert sandbox.enforced["memory_mb"] == 96
    result = await sandbox.exec(["python3", "-c", "b = bytearray(400_000_000); print(len(b))"], user="agent")
    assert result.exit_code == -9
    assert (await sandbox.exec(["echo", "alive"])).out == "alive\n"


async def test_a_failed_start_says_what_bubblewrap_said_and_leaves_nothing(
    provider: LocalProvider, image: SandboxImage, home, tmp_path
) -> None:
    from benchflow.contracts.sandbox import Mount

    missing = Mount(tmp_path / "missing", "/opt/tool")
    with pytest.raises(SandboxStartError, match="missing"):
        await provider.create(image, SandboxSpec("test", mounts=(missing,)))
    assert leases(LocalProvider().store.lease_folder) == []
    assert list((home / "local/uppers").iterdir()) == []


async def test_orphans_are_buried(sandbox: LocalSandbox) -> None:
    await sandbox.exec("for i in $(seq 50); do (setsid sh -c 'sleep 0.01' &); done; sleep 0.3")
    states = (await sandbox.exec("cat /proc/[0-9]*/stat | awk '{print $3}'")).out.split()
    assert "Z" not in states
