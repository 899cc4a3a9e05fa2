"""What holds in a container: whatever its image is, and whoever acts in it."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from benchflow.contracts.errors import SandboxLostError, SandboxStartError
from benchflow.contracts.sandbox import Limits, Mount, SandboxImage, SandboxSpec
from benchflow.sandboxes.docker.engine import EngineError
from benchflow.sandboxes.docker.provider import DockerProvider
from benchflow.sandboxes.docker.sandbox import DockerSandbox

Create = Callable[..., Awaitable[DockerSandbox]]
Built = Callable[..., Awaitable[SandboxImage]]

BASE = "FROM debian:bookworm-slim\n"
FACTS = {
    "a user": ("USER nobody\n", "/app"),
    "an entrypoint that never returns": ('ENTRYPOINT ["sleep", "infinity"]\n', "/app"),
    "an entrypoint that fails": ('ENTRYPOINT ["/no/such/program"]\nCMD ["x"]\n', "/app"),
    "the root as its folder": ("WORKDIR /\n", "/app"),
    "a folder of its own": ("WORKDIR /srv/x\nRUN touch mine\n", "/srv/x"),
    "a health check": ("HEALTHCHECK CMD false\n", "/app"),
    "a volume": ("VOLUME /data\n", "/app"),
    "uid 1000 taken": ("RUN useradd -m -u 1000 somebody\n", "/app"),
    "an agent already": ("RUN useradd -m -u 1234 -d /opt/agent agent\n", "/app"),
    "no certificates": ("RUN rm -rf /etc/ssl/certs\n", "/app"),
    "no python": ("RUN rm -rf /usr/bin/python3* /usr/lib/python3*\n", "/app"),
}


@pytest.mark.parametrize("fact", FACTS)
async def test_any_image_gives_root_an_agent_and_a_workspace(built: Built, create: Create, fact: str) -> None:
    lines, workdir = FACTS[fact]
    sandbox = await create(of=await built(BASE + lines))
    assert (await sandbox.exec("id -u; pwd")).out.split() == ["0", workdir]
    agent = await sandbox.exec("touch own && id -un && cd && pwd && test -w .", user="agent")
    assert agent.ok, agent.err
    assert agent.out.split()[0] == "agent"
    assert (await sandbox.exec(f"stat -c %U {workdir} /")).out.split() == ["agent", "root"]


@pytest.fixture
def busybox() -> Path:
    found = shutil.which("busybox")
    if found is None:
        pytest.skip("needs a static busybox")
    return Path(found)


async def test_an_image_with_nothing_but_sh(
    built: Built, create: Create, busybox: Path, tmp_path: Path
) -> None:
    """As Alpine is: another libc, no bash, no python, no passwd file."""
    links = " ".join(f"/bin/{name}" for name in ("sh", "cat", "id", "sleep", "ps", "grep"))
    image = await built(
        'FROM scratch\nCOPY busybox /bin/busybox\nRUN ["/bin/busybox", "sh", "-c", '
        f'"for path in {links}; do /bin/busybox ln -s busybox $path; done"]\n',
        busybox,
    )
    sandbox = await create(of=image)
    assert (await sandbox.exec("id -u; id -u agent")).out.split() == ["0", "1000"]
    assert (await sandbox.exec("cat", stdin=b"in", user="agent")).out == "in"
    timed = await sandbox.exec("sleep 91234 & sleep 91234", timeout=0.5)
    assert timed.timed_out
    assert "91234" not in (await sandbox.exec("ps")).out
    (tmp_path / "file").write_text("text")
    await sandbox.upload(tmp_path / "file", "/data/file", owner="agent")
    await sandbox.download("/data", tmp_path / "back")
    assert (tmp_path / "back/file").read_text() == "text"


async def test_no_privileged_container_and_no_socket_of_the_engine(
    provider: DockerProvider, create: Create
) -> None:
    sandbox = await create(limits=Limits(memory_mb=256, cpus=0.5, pids=99), job="job-7")
    found = await provider.engine.json("GET", f"containers/{sandbox.container}/json")
    host = found["HostConfig"]
    assert not host["Privileged"]
    assert host["SecurityOpt"] == ["no-new-privileges:true"]
    assert (host["Memory"], host["MemorySwap"], host["NanoCpus"], host["PidsLimit"]) == (
        256 << 20,
        256 << 20,
        5 * 10**8,
        99,
    )
    assert host["NetworkMode"] == "none"
    assert [mount["Type"] for mount in found["Mounts"]] == ["volume"]
    assert found["Config"]["Labels"]["benchflow.job"] == "job-7"
    assert json.loads(found["Config"]["Labels"]["benchflow.owner"])["pid"] > 0
    assert sandbox.enforced["memory_mb"] == 256 and sandbox.enforced["cpus"] == 0.5
    assert (await sandbox.exec("test -e /var/run/docker.sock -o -e /run/docker.sock")).exit_code == 1


ATTACKS = {
    "kill": "for number in $(seq 1 64); do kill -$number 1; done; sleep 0.1",
    "its descriptors": "ls /proc/1/fd/0 && echo reached; echo x >/proc/1/fd/1 && echo reached",
    "its memory": "head -c 1 /proc/1/mem && echo reached; cat /proc/1/environ && echo reached",
    "its program": "echo x >>/proc/1/exe && echo reached",
    "its files": "cd /dev/.benchflow/helper && rm -rf lib && echo reached",
    "mounts": "umount /dev/.benchflow/helper && echo reached; mount -o remount,rw /dev/.benchflow/helper",
    "its tracer": "python3 -c 'import ctypes; c = ctypes.CDLL(None); "
    'print("reached" if c.ptrace(16, 1, 0, 0) == 0 else "")\'',
}


@pytest.mark.parametrize("user", ["agent", None])
@pytest.mark.parametrize("attack", ATTACKS)
async def test_nobody_inside_reaches_the_helper(
    sandbox: DockerSandbox, attack: str, user: str | None
) -> None:
    """Not even root: it is process 1, not dumpable, and its files are mounted read-only."""
    result = await sandbox.exec(ATTACKS[attack], user=user)
    assert "reached" not in result.out
    assert (await sandbox.exec(["echo", "well"])).out == "well\n"


async def test_the_agent_cannot_touch_roots_commands(sandbox: DockerSandbox) -> None:
    """Supervisors are root's too: killing every process one may kill leaves them alone."""
    root = await sandbox.spawn(["cat"])
    await sandbox.exec("kill -9 -1", user="agent")
    root.stdin.write(b"alive\n")
    assert await root.stdout.readline() == b"alive\n"
    assert (await sandbox.exec(["echo", "well"], user="agent")).out == "well\n"
    await root.kill()


async def test_what_root_kills_ends_its_own_call_alone(sandbox: DockerSandbox) -> None:
    assert (await sandbox.exec("kill -9 $PPID; sleep 1000")).exit_code == -9
    assert (await sandbox.exec(["echo", "on"])).out == "on\n"


async def test_root_that_stops_what_watches_it_is_still_ended_in_time(sandbox: DockerSandbox) -> None:
    result = await sandbox.exec("kill -STOP $PPID; sleep 91236", timeout=0.5)
    assert result.timed_out
    assert "91236" not in (await sandbox.exec("cat /proc/[0-9]*/cmdline")).out.replace("\0", " ")


async def test_a_command_that_takes_all_memory_is_killed_alone(create: Create) -> None:
    sandbox = await create(limits=Limits(memory_mb=96))
    result = await sandbox.exec(["python3", "-c", "b = bytearray(400_000_000); print(len(b))"], user="agent")
    assert result.exit_code == -9
    assert (await sandbox.exec(["echo", "alive"])).out == "alive\n"


async def test_a_stream_nobody_reads_holds_up_no_other(sandbox: DockerSandbox) -> None:
    flood = await sandbox.spawn("yes")
    assert (await asyncio.wait_for(sandbox.exec("seq 100000"), 60)).stdout_bytes == 588895
    await flood.kill()


async def test_a_child_of_a_snapshot_gets_the_whole_configuration(
    provider: DockerProvider, create: Create, tmp_path: Path
) -> None:
    (tmp_path / "tool").write_text("tool")
    spec = {
        "limits": Limits(memory_mb=128, pids=77),
        "mounts": (Mount(tmp_path, "/opt/tool"),),
        "env": {"GIVEN": "1"},
    }
    parent = await create(**spec)
    await parent.exec("echo kept >/kept")
    child = await create(of=await parent.snapshot(), **spec)
    assert (
        await child.exec("cat /kept /opt/tool/tool; echo $GIVEN; id -u agent")
    ).out == "kept\ntool1\n1000\n"
    one, other = [
        (await provider.engine.json("GET", f"containers/{item.container}/json"))["HostConfig"]
        for item in (parent, child)
    ]
    assert one == other


async def test_snapshots_go_with_the_provider_that_took_them(
    provider: DockerProvider, image: SandboxImage
) -> None:
    """Also one that another was made of."""
    other = DockerProvider()
    parent = await other.create(image, SandboxSpec(name="snapshots"))
    await parent.exec("echo 1 >/one")
    first = await parent.snapshot()
    child = await other.create(first, SandboxSpec(name="snapshots"))
    await child.exec("echo 2 >/two")
    taken = [first.ref, (await child.snapshot()).ref]
    await other.close()
    for ref in taken:
        with pytest.raises(EngineError, match="No such image"):
            await provider.engine.json("GET", f"images/{ref}/json")


async def test_a_missing_mount_or_image_is_one_line_and_leaves_nothing(
    provider: DockerProvider, image: SandboxImage, create: Create, tmp_path: Path, listed
) -> None:
    before = await listed()
    with pytest.raises(SandboxStartError, match="missing"):
        await create(mounts=(Mount(tmp_path / "missing", "/opt/tool"),))
    with pytest.raises(SandboxStartError, match="no-such-image"):
        await create(of=SandboxImage("docker", "no-such-image", "x", "x"))
    assert await listed() == before


async def test_a_sandbox_ends_at_its_lifetime_by_itself(provider: DockerProvider, create: Create) -> None:
    sandbox = await create(lifetime_sec=0.5)
    with pytest.raises(SandboxLostError, match="lifetime"):
        await sandbox.exec(["sleep", "1000"])
    ended = await provider.engine.json("POST", f"containers/{sandbox.container}/wait")
    assert ended["StatusCode"] == 1


async def test_a_container_removed_by_others_ends_every_call(
    provider: DockerProvider, sandbox: DockerSandbox
) -> None:
    pending = [asyncio.ensure_future(sandbox.exec(["sleep", "1000"])) for _ in range(3)]
    await sandbox.exec(["true"])
    await provider.engine.json("DELETE", f"containers/{sandbox.container}", params={"force": True})
    for result in await asyncio.wait_for(asyncio.gather(*pending, return_exceptions=True), 30):
        assert isinstance(result, SandboxLostError)
        assert "gone" in result.message
    for call in (sandbox.spawn(["true"]), sandbox.kill_processes(), sandbox.snapshot(), sandbox.pause()):
        with pytest.raises(SandboxLostError):
            await call
