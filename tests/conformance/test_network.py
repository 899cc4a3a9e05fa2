"""The network: closed means closed, open means open, the model answers through its door."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from benchflow.contracts.sandbox import ModelDoor, NetworkPolicy, Sandbox

Create = Callable[..., Awaitable[Sandbox]]
FETCH = (
    "import sys, urllib.request as u\n"
    "print(u.build_opener(u.ProxyHandler({})).open(sys.argv[1], timeout=20).read().decode())"
)


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    head = await reader.readuntil(b"\r\n\r\n")
    body = b"answer to " + head.split()[1]
    writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
    await writer.drain()
    writer.close()


@pytest.fixture
async def door(tmp_path: Path) -> AsyncIterator[ModelDoor]:
    server = await asyncio.start_unix_server(_answer, tmp_path / "model.sock")
    async with server:
        yield ModelDoor(tmp_path / "model.sock", 4567)


@pytest.fixture
async def host_service() -> AsyncIterator[str]:
    """An address of this machine on which something listens."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing: only chooses the interface
            address = probe.getsockname()[0]
        except OSError:
            address = "127.0.0.1"
    server = await asyncio.start_server(_answer, "0.0.0.0")
    async with server:
        yield f"http://{address}:{server.sockets[0].getsockname()[1]}"


async def test_closed_reaches_nothing(create: Create, host_service: str) -> None:
    sandbox = await create(network=NetworkPolicy("none"))
    port = host_service.rpartition(":")[2]
    for address in (host_service, f"http://127.0.0.1:{port}", "http://192.0.2.1"):
        assert not (await sandbox.exec(["python3", "-c", FETCH, address])).ok
    devices = (await sandbox.exec("tail -n +3 /proc/net/dev | cut -d: -f1")).out.split()
    assert devices == ["lo"]


async def test_closed_still_has_its_own_loopback(create: Create) -> None:
    sandbox = await create(network=NetworkPolicy("none"))
    program = (
        "import socket\ns = socket.create_server(('127.0.0.1', 0))\n"
        "c = socket.create_connection(s.getsockname())\nc.send(b'hi'); print(s.accept()[0].recv(2))"
    )
    assert (await sandbox.exec(["python3", "-c", program], user="agent")).out == "b'hi'\n"


async def test_open_reaches_the_host(create: Create, host_service: str) -> None:
    sandbox = await create(network=NetworkPolicy("open"))
    if not sandbox.capabilities.network_open:
        pytest.skip(sandbox.capabilities.why["network_open"])
    result = await sandbox.exec(["python3", "-c", FETCH, f"{host_service}/path"], user="agent")
    assert result.out == "answer to /path\n", result.err


@pytest.mark.parametrize("mode", ["none", "open"])
async def test_the_model_answers_through_its_door(
    create: Create, door: ModelDoor, mode: str, host_service: str
) -> None:
    sandbox = await create(network=NetworkPolicy(mode), model_door=door)  # type: ignore[arg-type]
    for user in (None, "agent"):
        fetched = await sandbox.exec(["python3", "-c", FETCH, "http://127.0.0.1:4567/v1"], user=user)
        assert fetched.out == "answer to /v1\n", fetched.err
    if mode == "none":
        assert not (await sandbox.exec(["python3", "-c", FETCH, host_service])).ok


async def test_the_door_takes_many_callers(create: Create, door: ModelDoor) -> None:
    sandbox = await create(model_door=door)
    program = (
        "import threading,urllib.request as u\n"
        "url = 'http://127.0.0.1:4567/'\n"
        "def call(i): print(u.urlopen(url + str(i), timeout=60).read().decode() + '\\n', end='')\n"
        "threads = [threading.Thread(target=call, args=(i,)) for i in range(30)]\n"
        "[t.start() for t in threads]; [t.join() for t in threads]"
    )
    result = await sandbox.exec(["python3", "-c", program])
    assert sorted(result.out.splitlines()) == sorted(f"answer to /{index}" for index in range(30))


async def test_two_sandboxes_with_the_same_port_do_not_meet(create: Create, tmp_path: Path) -> None:
    answers = []
    for name in ("one", "two"):
        server = await asyncio.start_unix_server(_answer, tmp_path / name)
        sandbox = await create(model_door=ModelDoor(tmp_path / name, 4500))
        got = await sandbox.exec(["python3", "-c", FETCH, f"http://127.0.0.1:4500/{name}"])
        answers.append(got.out)
        server.close()
        again = await sandbox.exec(["python3", "-c", FETCH, "http://127.0.0.1:4500/"])
        assert not again.ok, "answered by another sandbox's door"
    assert answers == ["answer to /one\n", "answer to /two\n"]


async def test_an_exposed_port_is_reached_from_the_host(create: Create) -> None:
    sandbox = await create(network=NetworkPolicy("none"))
    await sandbox.exec("mkdir -p /srv/www; echo page >/srv/www/index")
    process = await sandbox.spawn(
        ["python3", "-u", "-m", "http.server", "--bind", "127.0.0.1", "--directory", "/srv/www", "8642"]
    )
    assert b"8642" in await asyncio.wait_for(process.stdout.readline(), 60)
    endpoint = await sandbox.expose(8642)
    host, _, port = endpoint.url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"GET /index HTTP/1.0\r\n\r\n")
    assert (await reader.read()).endswith(b"page\n")
    writer.close()
    await process.kill()
