"""The client of model endpoints, against servers that write bytes by hand."""

from __future__ import annotations

import asyncio

import pytest
import uvloop
from hypothesis import given
from hypothesis import strategies as st
from yarl import URL

from benchflow.gateway.client import Client, Unreachable, head_of

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\n"


@pytest.fixture
async def serve():
    """Start a server that answers each request with the next of ``answers``, None closing at once.
    Gives its URL and the list of requests, each with the number of its connection."""
    servers = []

    async def start(*answers: bytes | None, then_close: bool = False):
        seen: list[tuple[int, bytes]] = []
        connections = iter(range(100))

        async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            number = next(connections)
            try:
                while True:
                    head = await reader.readuntil(b"\r\n\r\n")
                    length = int(head.partition(b"content-length: ")[2].split(b"\r\n")[0])
                    seen.append((number, head + await reader.readexactly(length)))
                    answer = answers[min(len(seen), len(answers)) - 1]
                    writer.write(answer or b"")
                    await writer.drain()
                    if then_close or answer is None:
                        return
            except asyncio.IncompleteReadError:
                pass
            finally:
                writer.close()

        server = await asyncio.start_server(talk, "127.0.0.1", 0)
        servers.append(server)
        return URL(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1/x?y=1"), seen

    yield start
    for server in servers:
        server.close()
        await server.wait_closed()


async def ask(client, url, body=b"{}"):
    async with client.request(url, head_of("POST", url, {"a": "b"}), body) as answer:
        return answer.status, answer.headers, await answer.read()


async def test_one_connection_serves_call_after_call(serve):
    url, seen = await serve(HEAD + b"content-length: 2\r\n\r\nhi")
    async with Client(5) as client:
        for _ in range(3):
            status, headers, body = await ask(client, url)
            assert (status, headers["content-type"], body) == (200, "text/plain", b"hi")
    assert [number for number, _ in seen] == [0, 0, 0]
    head = seen[0][1]
    assert head.startswith(b"POST /v1/x?y=1 HTTP/1.1\r\nhost: 127.0.0.1:")
    assert head.endswith(b"a: b\r\ncontent-length: 2\r\n\r\n{}")


@pytest.mark.parametrize(
    "answer",
    [
        HEAD + b"transfer-encoding: chunked\r\n\r\n3\r\nhel\r\n2\r\nlo\r\n0\r\n\r\n",
        b"HTTP/1.1 100 Continue\r\nx: y\r\n\r\n" + HEAD + b"content-length: 5\r\n\r\nhello",
        HEAD + b"connection: close\r\ncontent-length: 5\r\n\r\nhello",
        b"HTTP/1.0 200 OK\r\ncontent-length: 5\r\n\r\nhello",
    ],
    ids=["chunked", "after an interim answer", "to be closed", "HTTP/1.0"],
)
async def test_every_way_to_write_an_answer_is_read(serve, answer):
    url, _ = await serve(answer)
    async with Client(5) as client:
        for _ in range(2):
            status, headers, body = await ask(client, url)
            assert (status, body, "x" in headers) == (200, b"hello", False)


async def test_a_body_without_a_length_ends_with_its_connection(serve):
    url, seen = await serve(HEAD + b"\r\nhello", then_close=True)
    async with Client(5) as client:
        assert (await ask(client, url))[2] == b"hello"
        assert (await ask(client, url))[2] == b"hello"
    assert [number for number, _ in seen] == [0, 1]


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (None, "closed the connection"),
        (HEAD + b"content-length: 9\r\n\r\nhello", "closed the connection"),
        (HEAD + b"transfer-encoding: chunked\r\n\r\n3\r\nhel\r\n", "closed the connection"),
        (b"SSH-2.0-OpenSSH\r\n", "does not speak HTTP"),
        (b"HTTP/1.1 101 Switching\r\nupgrade: x\r\nconnection: upgrade\r\n\r\nyy", "does not speak HTTP"),
    ],
    ids=["silence", "cut body", "cut chunks", "another protocol", "an upgrade"],
)
async def test_an_answer_that_is_not_whole_is_unreachable(serve, answer, why):
    url, _ = await serve(answer, then_close=True)
    async with Client(5) as client:
        with pytest.raises(Unreachable, match=why):
            await ask(client, url)


async def test_a_body_of_megabytes_arrives_and_one_comes_back(serve):
    large = bytes(range(256)) * 20_000
    url, seen = await serve(HEAD + b"content-length: %d\r\n\r\n" % len(large) + large)
    async with Client(5) as client:
        assert (await ask(client, url, large))[2] == large
    assert seen[0][1].endswith(large)


async def test_a_refusal_before_the_end_of_a_body_is_heard():
    async def refuse(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 413 Too Large\r\ncontent-length: 3\r\n\r\nno!")
        await writer.drain()
        await reader.read(1 << 10)
        writer.close()

    server = await asyncio.start_server(refuse, "127.0.0.1", 0)
    url = URL(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/")
    async with Client(5) as client:
        assert (await ask(client, url, bytes(50_000_000)))[::2] == (413, b"no!")
    server.close()
    await server.wait_closed()


async def test_an_answer_that_is_left_unread_ends_its_connection(serve):
    url, seen = await serve(HEAD + b"content-length: 9\r\n\r\nhello")
    async with Client(5) as client:
        for _ in range(2):
            async with client.request(url, head_of("POST", url, {}), b"{}") as answer:
                assert answer.status == 200
    assert [number for number, _ in seen] == [0, 1]


def test_uvloop_carries_it_as_well():
    async def hello(reader, writer):
        for _ in range(2):
            await reader.readuntil(b"{}")
            writer.write(HEAD + b"content-length: 5\r\n\r\nhello")
        writer.close()

    async def main():
        server = await asyncio.start_server(hello, "127.0.0.1", 0)
        url = URL(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/")
        async with server, Client(5) as client:
            return [await ask(client, url) for _ in range(2)]

    assert [body for _, _, body in uvloop.run(main())] == [b"hello", b"hello"]


@given(user=st.text(min_size=1, max_size=5), host=st.sampled_from(["a.b", "[::1]", "münchen.de"]))
def test_a_head_is_lines_without_strays(user, host):
    url = URL.build(scheme="https", host=host.strip("[]"), user=user, path="/v1")
    lines = head_of("GET", url, {"x": "y"}).split(b"\r\n")
    assert lines[0] == b"GET /v1 HTTP/1.1" and lines[-2:] == [b"x: y", b""]
    assert len(lines) == 8 and all(b"\n" not in line for line in lines)
