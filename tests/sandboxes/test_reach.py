"""From inside a sandbox to the model: every way there is, on every sandbox."""

from __future__ import annotations

import asyncio
import json
import os
import struct
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from benchflow.contracts.errors import UsageError
from benchflow.contracts.gateway import ModelSpec
from benchflow.contracts.sandbox import ModelDoor, Mount, NetworkPolicy, Sandbox
from benchflow.gateway.server import GatewayServer
from benchflow.kernel.storage import Redactor
from benchflow.sandboxes import doors
from benchflow.sandboxes.docker.engine import Engine

PORT = 4567
WAYS = [
    ("local", "none", "socket"),
    ("local", "none", "stream"),
    ("local", "open", "bridge"),
    ("docker", "none", "namespace"),
    ("docker", "none", "socket"),
    ("docker", "none", "stream"),
    ("docker", "open", "namespace"),
    ("docker", "open", "bridge"),
]
MECHANISMS = [("local", "none", "socket"), ("local", "none", "stream"), ("docker", "none", "namespace")]
MECHANISMS += [("docker", "none", "stream")]
"""One way for each program that moves the bytes."""
Reach = Callable[..., Awaitable[Sandbox]]


def through(ways: list[tuple[str, str, str]]) -> Any:
    """Run once per way; the first part chooses the provider of ``create``."""
    return pytest.mark.parametrize(
        ("provider", "mode", "via"), ways, indirect=["provider"], ids=["-".join(way) for way in ways]
    )


@pytest.fixture
def reach(create) -> Reach:
    """Make a sandbox whose port leads to a unix socket, by a way."""

    async def reach(path: Path, mode: str, via: str, **spec: Any) -> Sandbox:
        if via == "namespace" and not doors.may_enter_namespaces():
            pytest.skip("listening in another's network namespace takes root")
        network = NetworkPolicy(mode)  # type: ignore[arg-type]
        sandbox = await create(network=network, model_door=ModelDoor(path, PORT, via), **spec)  # type: ignore[arg-type]
        assert sandbox.enforced["model_door"] == via
        return sandbox

    return reach


@pytest.fixture
def folder() -> Any:
    """Short: the length of a socket's path is limited."""
    with tempfile.TemporaryDirectory(prefix="bf-") as made:
        yield Path(made)


@pytest.fixture
async def serve(folder: Path) -> AsyncIterator[Callable[[Any], Awaitable[Path]]]:
    """Put a handler of connections on a unix socket."""
    servers = []

    async def serve(handler: Any) -> Path:
        path = folder / f"{len(servers)}.sock"
        servers.append(await asyncio.start_unix_server(handler, path))
        path.chmod(0o666)
        return path

    yield serve
    for server in servers:
        server.close()


DIAL = f"import socket, sys\ndef dial(): return socket.create_connection(('127.0.0.1', {PORT}), 60)\n"


async def run(sandbox: Sandbox, program: str, *arguments: str, **more: Any) -> str:
    result = await sandbox.exec(["python3", "-c", DIAL + program, *arguments], timeout=120, **more)
    assert result.ok, result.err
    return result.out


# -- the model ----------------------------------------------------------------------------

CALL = """
import json, urllib.error, urllib.request
def call(key):
    body = {"model": "m", "stream": True, "messages": [{"role": "user", "content": "x" * int(sys.argv[2])}]}
    request = urllib.request.Request(f"http://127.0.0.1:4567/r/{key}/v1/chat/completions",
        json.dumps(body).encode(), {"Content-Type": "application/json"})
    lines = urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=60)
    chunks = [json.loads(l[6:]) for l in lines if l.startswith(b"data: {")]
    return "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks if c["choices"])
print(call(sys.argv[1]))
try: call("another-key")
except urllib.error.HTTPError as error: print(error.code)
"""


@through(WAYS)
async def test_a_streamed_call_reaches_the_model(reach: Reach, folder: Path, mode: str, via: str) -> None:
    policy = folder / "policy.yaml"
    policy.write_text(json.dumps({"turns": [{"say": "hello from the model"}]}))
    gateway = GatewayServer(folder / "g.sock", redact=Redactor())
    await gateway.start()
    try:
        route = await gateway.open_route(
            "r", ModelSpec(f"scripted/{policy}"), trajectory=folder / "calls", task="t", seed=0, trial=0
        )
        sandbox = await reach(route.socket, mode, via)
        for size in (10, 3 << 20):
            answer = await run(sandbox, CALL, route.key, str(size), user="agent")
            assert answer.splitlines() == ["hello from the model", "401"]
        totals = await route.close()
        assert (totals.calls, totals.answered_calls) == (2, 2)
        over = await sandbox.exec(["python3", "-c", "import sys\n" + CALL, route.key, "10"])
        assert "HTTP Error 401" in over.err, "a rollout that has ended has no model"
    finally:
        await gateway.stop()


# -- the connection -----------------------------------------------------------------------


@through(MECHANISMS)
async def test_each_part_arrives_before_the_next_is_sent(reach, serve, mode: str, via: str) -> None:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for number in range(20):
            writer.write(b"%02d" % number)
            assert await reader.readexactly(2) == b"%02d" % number
        writer.close()

    sandbox = await reach(await serve(handle), mode, via)
    program = "s = dial()\nwhile part := s.recv(2, socket.MSG_WAITALL): s.send(part); print(part)"
    assert len((await run(sandbox, program)).splitlines()) == 20


@through(MECHANISMS)
async def test_either_side_may_end_first_and_still_hear_the_other(reach, serve, mode: str, via: str) -> None:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        first = await reader.readexactly(1)
        if first == b"c":
            data = await reader.read()
            writer.write(b"heard %d" % len(data))
        else:
            writer.write(b"over")
            writer.write_eof()
            heard.append(len(await reader.read()))
        writer.close()

    heard: list[int] = []
    sandbox = await reach(await serve(handle), mode, via)
    program = (
        "s = dial(); s.sendall(b'c' + bytes(1 << 20)); s.shutdown(socket.SHUT_WR)\n"
        "print(s.makefile('rb').read())\n"
        "s = dial(); s.sendall(b's'); print(s.makefile('rb').read()); s.sendall(bytes(1 << 20)); s.close()"
    )
    assert await run(sandbox, program) == f"b'heard {1 << 20}'\nb'over'\n"
    async with asyncio.timeout(20):
        while not heard:
            await sandbox.exec("true")
    assert heard == [1 << 20]


@through(WAYS)
async def test_fifty_at_once(reach, serve, mode: str, via: str) -> None:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        size, number = struct.unpack(">II", await reader.readexactly(8))
        data = await reader.readexactly(size)
        inside.add(number)
        if len(inside) == 50:
            everyone.set()
        await everyone.wait()
        assert data == bytes([number]) * size
        writer.write(data)
        writer.close()

    inside: set[int] = set()
    everyone = asyncio.Event()
    sandbox = await reach(await serve(handle), mode, via)
    program = (
        "import struct, threading\n"
        "def call(number):\n"
        "    size = 3 << 20 if number % 10 == 0 else 1000\n"
        "    s = dial(); s.sendall(struct.pack('>II', size, number) + bytes([number]) * size)\n"
        "    print(f'{s.makefile(\"rb\").read() == bytes([number]) * size}\\n', end='')\n"
        "threads = [threading.Thread(target=call, args=(n,)) for n in range(50)]\n"
        "[t.start() for t in threads]; [t.join() for t in threads]"
    )
    assert await run(sandbox, program, user="agent") == "True\n" * 50


@through(MECHANISMS)
async def test_who_does_not_read_is_waited_for_and_holds_up_nobody(reach, serve, mode: str, via: str) -> None:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        kind = await reader.readexactly(1)
        if kind == b"q":
            writer.write(b"quick")
        elif kind == b"d":  # deaf
            await done.wait()
        else:  # talks more than anybody reads
            writer.write(bytes(64 << 20))
            talkers.append(writer)
            await done.wait()
        writer.close()

    done = asyncio.Event()
    talkers: list[asyncio.StreamWriter] = []
    sandbox = await reach(await serve(handle), mode, via)
    program = (
        "deaf = dial(); deaf.sendall(b'd'); deaf.settimeout(1)\n"
        "talker = dial(); talker.sendall(b't')\n"
        "sent = 0\n"
        "try:\n"
        "    while sent < 64 << 20: sent += deaf.send(bytes(1 << 16))\n"
        "except TimeoutError: pass\n"
        "quick = dial(); quick.sendall(b'q')\n"
        "print(quick.recv(5).decode(), sent < 32 << 20, flush=True)\n"
        "sys.stdin.read()"
    )
    process = await sandbox.spawn(["python3", "-c", DIAL + program])
    assert await process.stdout.readline() == b"quick True\n"
    assert talkers[0].transport.get_write_buffer_size() > 32 << 20
    done.set()
    await process.kill()


@through([("local", "none", "stream"), ("docker", "none", "stream")])
async def test_connections_kept_open_do_not_use_up_our_descriptors(
    reach, folder: Path, mode: str, via: str
) -> None:
    listener = doors.listen(str(folder / "g.sock"))  # nobody accepts
    sandbox = await reach(folder / "g.sock", mode, via)
    before = len(os.listdir("/proc/self/fd"))
    program = "made = [dial() for _ in range(900)]; print(len(made), flush=True); sys.stdin.read()"
    process = await sandbox.spawn(["python3", "-c", DIAL + program], user="agent")
    assert await process.stdout.readline() == b"900\n"
    assert (await sandbox.exec(["echo", "well"])).ok
    assert len(os.listdir("/proc/self/fd")) - before < 6 * doors.MOST
    await process.kill()
    await sandbox.teardown()
    listener.close()


@through(MECHANISMS)
async def test_a_connection_that_nobody_answers_ends(reach, folder: Path, mode: str, via: str, serve) -> None:
    path = await serve(lambda reader, writer: writer.close())
    sandbox = await reach(path, mode, via)
    path.unlink()
    program = (
        "try: print(dial().recv(1))\n"
        "except OSError: print(b'')\n"
    )  # fmt: skip
    assert await run(sandbox, program) == "b''\n"


# -- the end ------------------------------------------------------------------------------


@through(MECHANISMS)
async def test_nothing_is_kept_open_after_teardown(reach, serve, mode: str, via: str) -> None:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connected.set()
        await reader.read()
        ended.set()
        writer.close()

    connected, ended = asyncio.Event(), asyncio.Event()
    sandbox = await reach(await serve(handle), mode, via)
    await sandbox.spawn(
        ["python3", "-c", f"import socket; s = socket.create_connection(('127.0.0.1', {PORT})); s.recv(1)"]
    )
    await connected.wait()
    await sandbox.teardown()
    async with asyncio.timeout(30):
        await ended.wait()


@through(MECHANISMS)
async def test_nobody_inside_can_end_it(reach, serve, mode: str, via: str) -> None:
    path = await serve(lambda reader, writer: (writer.write(b"here"), writer.close()))
    sandbox = await reach(path, mode, via)
    await sandbox.exec("kill -9 -1")
    assert await run(sandbox, "print(dial().recv(4))") == "b'here'\n"


@through(MECHANISMS)
async def test_it_survives_the_killing_of_everything_and_a_snapshot(
    reach, serve, mode: str, via: str
) -> None:
    path = await serve(lambda reader, writer: (writer.write(b"here"), writer.close()))
    sandbox = await reach(path, mode, via)
    program = "print(dial().recv(4))"
    await sandbox.kill_processes()
    assert await run(sandbox, program) == "b'here'\n"
    await sandbox.snapshot()
    assert await run(sandbox, program) == "b'here'\n"
    await sandbox.kill_processes(user="agent")
    assert await run(sandbox, program) == "b'here'\n"


# -- choosing -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("provider", "mode", "via"),
    [("local", "open", "stream"), ("local", "none", "bridge"), ("docker", "none", "bridge")],
    indirect=["provider"],
)
async def test_a_way_that_is_not_to_be_had_is_refused(reach, folder: Path, mode: str, via: str) -> None:
    with pytest.raises(UsageError, match=f"{via}.*use auto or"):
        await reach(folder / "g.sock", mode, via)


@pytest.mark.parametrize(
    ("provider", "mode", "expected"),
    [("local", "none", "socket"), ("local", "open", "bridge"), ("docker", "none", "namespace")],
    indirect=["provider"],
)
async def test_what_is_chosen_needs_the_least(create, serve, mode: str, expected: str) -> None:
    path = await serve(lambda reader, writer: writer.close())
    if expected == "namespace" and not doors.may_enter_namespaces():
        expected = "socket"
    sandbox = await create(network=NetworkPolicy(mode), model_door=ModelDoor(path, PORT))  # type: ignore[arg-type]
    assert sandbox.enforced["model_door"] == expected


@pytest.fixture
async def remote(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[None]:
    """The engine as one behind TCP, which shares no file and no process with us."""
    engine = Engine()
    if not engine.host.startswith("unix://"):
        pytest.skip("the engine is remote already")
    door = doors.Door(doors.listen(("127.0.0.1", 0)), doors.to_unix(Path(engine.host[7:])))
    monkeypatch.setenv("DOCKER_HOST", f"tcp://127.0.0.1:{door.port}")
    yield
    await door.close()


@pytest.mark.parametrize("provider", ["docker"], indirect=True)
@pytest.mark.parametrize("mode", ["none", "open"])
async def test_a_remote_engine_is_reached_by_the_stream(remote, create, serve, mode: str) -> None:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(await reader.read())
        writer.close()

    path = await serve(handle)
    sandbox = await create(network=NetworkPolicy(mode), model_door=ModelDoor(path, PORT))  # type: ignore[arg-type]
    assert sandbox.enforced["model_door"] == "stream"
    program = (
        "s = dial(); s.sendall(bytes(3 << 20)); s.shutdown(socket.SHUT_WR)\n"
        "print(len(s.makefile('rb').read()))"
    )
    assert await run(sandbox, program, user="agent") == f"{3 << 20}\n"
    with pytest.raises(UsageError, match="another machine"):
        await create(model_door=ModelDoor(path, PORT, "socket"))


@pytest.mark.parametrize("provider", ["docker"], indirect=True)
async def test_a_remote_engine_gets_what_is_mounted_once(remote, create, tmp_path: Path) -> None:
    (tmp_path / "bundle/bin").mkdir(parents=True)
    (tmp_path / "bundle/bin/run").write_text(f"#!/bin/sh\necho {tmp_path}\n")
    (tmp_path / "bundle/bin/run").chmod(0o755)
    (tmp_path / "bundle/link").symlink_to("bin/run")
    mounts = (Mount(tmp_path / "bundle", "/opt/bundle"),)
    first, second = await asyncio.gather(create(mounts=mounts), create(mounts=mounts))
    for sandbox in (first, second):
        assert (await sandbox.exec(["/opt/bundle/link"], user="agent")).out == f"{tmp_path}\n"
        assert not (await sandbox.exec("rm /opt/bundle/link")).ok
    engine = Engine()
    shown = [await engine.json("GET", f"containers/{item.container}/json") for item in (first, second)]
    places = [{m["Destination"]: m["Name"] for m in item["Mounts"]} for item in shown]
    assert places[0] == places[1]
    await asyncio.gather(first.teardown(), second.teardown())
    for end in ("-complete", ""):
        assert await engine.remove(f"volumes/{places[0]['/opt/bundle']}{end}")
    await engine.close()
