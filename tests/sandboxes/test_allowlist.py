"""A sandbox that reaches some hosts only."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchflow.contracts.sandbox import ModelDoor, NetworkPolicy, Sandbox
from benchflow.sandboxes.egress import AllowList


@pytest.fixture
async def web() -> AsyncIterator[int]:
    """A web server of the host that answers with the request line and Host header."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        host = next(line for line in head if line.lower().startswith("host:"))
        body = f"{head[0]}|{host}".encode()
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nConnection: close\r\n\r\n" % len(body) + body)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    yield server.sockets[0].getsockname()[1]
    server.close()


FETCH = """
import sys, urllib.request, urllib.error
try: print(urllib.request.urlopen(sys.argv[1], timeout=30).read().decode())
except urllib.error.HTTPError as error: print(error.code, error.read().decode())
except OSError as error: print('failed', error)
"""
CONNECT = """
import http.client, sys
connection = http.client.HTTPConnection('127.0.0.1', 3128, timeout=30)
connection.set_tunnel('127.0.0.1', int(sys.argv[1]))
try:
    connection.request('GET', '/tunnel')
    print(connection.getresponse().read().decode())
except OSError as error: print(error)
"""


PROVIDERS = [("local", "auto"), ("docker", "auto"), ("docker", "stream"), ("docker", "socket")]
each = pytest.mark.parametrize(("provider", "via"), PROVIDERS, indirect=["provider"])


@pytest.fixture
def behind_a_list(create, tmp_path: Path):
    """A sandbox whose proxy is reached the way its model is."""

    async def behind_a_list(via: str, *allowed: str) -> Sandbox:
        door = None if via == "auto" else ModelDoor(tmp_path / "model", 4500, via)  # type: ignore[arg-type]
        if via == "socket":
            (tmp_path / "model").touch()  # what is mounted must exist
        return await create(network=NetworkPolicy("allowlist", allowed), model_door=door)

    return behind_a_list


@each
async def test_allowed_is_reached_and_the_rest_refused(
    behind_a_list, web: int, via: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolve = socket.getaddrinfo
    named = {"inner.example.org": "127.0.0.1", "example.org": "127.0.0.1"}

    def answer(host: str, *more, **options):
        return resolve(named.get(host, host), *more, **options)

    monkeypatch.setattr(socket, "getaddrinfo", answer)
    sandbox = await behind_a_list(via, f"127.0.0.1:{web}", "*.example.org")
    # the proxy is asked for the loopback address too, which urllib would leave out by no_proxy
    env = {"no_proxy": "", "NO_PROXY": ""}

    async def fetch(url: str) -> str:
        return (await sandbox.exec(["python3", "-c", FETCH, url], user="agent", env=env)).out.strip()

    assert await fetch(f"http://127.0.0.1:{web}/a?b=c") == f"GET /a?b=c HTTP/1.1|Host: 127.0.0.1:{web}"
    assert (await fetch("http://example.com/")).startswith("403")
    assert (await fetch("http://127.0.0.1:1/")).startswith("403")
    private = await fetch(f"http://inner.example.org:{web}/")
    assert "inner.example.org leads to a private address" in private
    tunnel = await sandbox.exec(["python3", "-c", CONNECT, str(web)])
    assert tunnel.out.startswith("GET /tunnel HTTP/1.1")
    refused = await sandbox.exec(["python3", "-c", CONNECT, "1"])
    assert "403" in refused.out


@each
async def test_there_is_no_way_around_the_proxy(behind_a_list, web: int, via: str) -> None:
    sandbox = await behind_a_list(via, f"127.0.0.1:{web}")
    assert (await sandbox.exec("cat /proc/net/dev | tail -n +3 | cut -d: -f1")).out.split() == ["lo"]
    for attempt in (
        f"socket.create_connection(('127.0.0.1', {web}), 5)",
        "socket.create_connection(('192.0.2.1', 443), 5)",
        "socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('192.0.2.1', 53))",
        "socket.socket(socket.AF_INET6, socket.SOCK_DGRAM).sendto(b'x', ('2001:db8::1', 53))",
        "socket.getaddrinfo('example.org', 443)",
    ):
        went = await sandbox.exec(["python3", "-c", f"import socket; {attempt}"])
        assert went.exit_code == 1 and "rror" in went.err, attempt


@pytest.mark.parametrize(
    ("entry", "host", "port", "allowed"),
    [
        ("example.org", "example.org", 443, True),
        ("example.org", "EXAMPLE.org.", 443, True),
        ("example.org", "www.example.org", 443, False),
        ("example.org", "badexample.org", 443, False),
        ("*.example.org", "www.example.org", 443, True),
        ("*.example.org", "a.b.example.org", 80, True),
        ("*.example.org", "example.org", 443, False),
        ("*.example.org", "wwwexample.org", 443, False),
        ("example.org:443", "example.org", 80, False),
        ("10.0.0.1", "10.0.0.1", 80, True),
        ("[::1]:80", "::1", 80, True),
    ],
)
def test_names(entry: str, host: str, port: int, allowed: bool) -> None:
    assert AllowList((entry,)).allows(host, port) is allowed


@given(host=st.text(min_size=1, max_size=30), port=st.integers(1, 65535))
def test_an_empty_list_allows_nothing(host: str, port: int) -> None:
    assert not AllowList(()).allows(host, port)
