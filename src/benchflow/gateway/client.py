"""HTTP/1.1 to model endpoints over kept connections, with little between a call and its bytes."""

from __future__ import annotations

import asyncio
import errno
import ssl
import time
from base64 import b64encode
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from functools import lru_cache

import httptools
from yarl import URL

_CONNECT = 15.0
"""Seconds for a new connection."""
_KEPT = 30.0
"""Seconds that an idle connection may wait for its next call."""
_PIECE = 1 << 19
"""Bytes written at once, so that a prompt of megabytes does not hold up other calls."""
_AHEAD = 1 << 18
"""Bytes of an answer that wait here before its sender is slowed down."""


class Unreachable(ConnectionError):
    """No whole answer came: refused, reset, timed out, or cut before its end."""


@dataclass(slots=True)
class Answer:
    """The head of an upstream's answer; ``chunks`` is read once and ends with it."""

    status: int
    headers: Mapping[str, str]
    chunks: AsyncIterator[bytes]

    async def read(self) -> bytes:
        return b"".join([chunk async for chunk in self.chunks])


class Client:
    """One pool for all endpoints; how many connections it opens is limited by its callers.
    ``silence`` is the longest an endpoint may send nothing, in seconds."""

    def __init__(self, silence: float) -> None:
        self.silence = silence
        self._idle: dict[object, deque[Connection]] = defaultdict(deque)
        self._open: set[Connection] = set()

    def request(self, url: URL, head: bytes, body: bytes = b"") -> Exchange:
        """Ask as ``async with``. ``head`` comes from ``head_of``, perhaps with lines added to it."""
        return Exchange(self, url, head, body)

    async def connection(self, url: URL) -> Connection:
        idle = self._idle[url.scheme, url.raw_host, url.port]
        while idle and idle[0].idle_since < time.monotonic() - _KEPT:
            idle.popleft().abort()
        return idle.pop() if idle else await self._connect(url, idle)

    async def _connect(self, url: URL, idle: deque[Connection]) -> Connection:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(_CONNECT):
                _, connection = await loop.create_connection(
                    lambda: Connection(loop, self.silence, idle, self._open),
                    url.raw_host or "",
                    url.port or 80,
                    ssl=_trust() if url.scheme == "https" else None,
                )
        except (OSError, UnicodeError) as error:  # timeouts, and names that are none, too
            raise Unreachable(explain(error)) from error
        return connection

    async def close(self) -> None:
        for connection in list(self._open):
            connection.abort()
        await asyncio.sleep(0)

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def head_of(method: str, url: URL, headers: Mapping[str, str]) -> bytes:
    """The start of a request; lines may follow it."""
    lines = [f"{method} {url.raw_path_qs} HTTP/1.1", f"host: {url.host_port_subcomponent}"]
    # identity: a compressed stream could be neither relayed as it comes nor read here.
    lines += ["user-agent: benchflow", "accept: */*", "accept-encoding: identity"]
    if url.user is not None and "authorization" not in headers:
        login = b64encode(f"{url.user}:{url.password or ''}".encode()).decode()
        lines.append(f"authorization: Basic {login}")
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, ""]).encode()


class Exchange:
    """One request and its answer; entering sends and waits for the head. Raises ``Unreachable``.
    A connection whose answer was not read to its end is closed."""

    __slots__ = ("_body", "_client", "_connection", "_head", "_url")

    def __init__(self, client: Client, url: URL, head: bytes, body: bytes) -> None:
        self._client, self._url, self._head, self._body = client, url, head, body

    async def __aenter__(self) -> Answer:
        self._connection = connection = await self._client.connection(self._url)
        try:
            await connection.send(b"%scontent-length: %d\r\n\r\n" % (self._head, len(self._body)), self._body)
            await connection.head()
        except BaseException:
            connection.abort()
            raise
        return Answer(connection.status, connection.headers, connection)

    async def __aexit__(self, *_: object) -> None:
        self._connection.release()


class Connection(asyncio.Protocol):
    """One request at a time; iterating gives the body of its answer as it comes."""

    transport: asyncio.Transport

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        silence: float,
        idle: deque[Connection],
        opened: set[Connection],
    ) -> None:
        self._loop, self._silence, self._idle, self._opened = loop, silence, idle, opened
        self._parser = httptools.HttpResponseParser(self)
        self._waiter: asyncio.Future[None] | None = None
        self._full = self._lost = False
        self.idle_since = 0.0
        self._renew()

    def _renew(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self._chunks: list[bytes] = []
        self._ahead = 0
        self._headed = self._sent = self._complete = self._keep = self._failed = False
        self._why = "the endpoint closed the connection"

    # -- what an exchange does

    async def send(self, head: bytes, body: bytes) -> None:
        self._renew()
        if len(body) <= _PIECE:
            self.transport.write(head + body)
        else:
            self.transport.write(head)
            view = memoryview(body)
            for at in range(0, len(body), _PIECE):
                while self._full and not (self._headed or self._lost):
                    await self._wait()
                if self._headed or self._lost:
                    return  # refused before its end
                self.transport.write(view[at : at + _PIECE])
                await asyncio.sleep(0)
        self._sent = True

    async def head(self) -> None:
        while not self._headed:
            self._check()
            await self._wait()

    def __aiter__(self) -> Connection:
        return self

    async def __anext__(self) -> bytes:
        while not self._chunks:
            if self._complete:
                raise StopAsyncIteration
            self._check()
            await self._wait()
        chunks, self._chunks = self._chunks, []
        if self._ahead > _AHEAD and not self._lost:
            self.transport.resume_reading()
        self._ahead = 0
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    def release(self) -> None:
        """Keep the connection for the next call, if it can be."""
        if self._complete and self._sent and self._keep and not (self._lost or self._chunks):
            self.idle_since = time.monotonic()
            self._idle.append(self)
        else:
            self.abort()

    def abort(self) -> None:
        self._lost = True
        self.transport.abort()

    def _check(self) -> None:
        if self._lost or self._failed:
            raise Unreachable(self._why)

    async def _wait(self) -> None:
        """Until something happens to this connection."""
        self._waiter = self._loop.create_future()
        timer = self._loop.call_later(self._silence, self._expire)
        try:
            await self._waiter
        finally:
            timer.cancel()
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _expire(self) -> None:
        self._fail("no answer in time")

    def _fail(self, why: str) -> None:
        self._failed, self._why = True, why
        self.transport.abort()
        self._wake()

    # -- asyncio's side

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        self.transport = transport
        self._opened.add(self)

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            return self._fail(f"the endpoint does not speak HTTP: {error}")
        if self._ahead > _AHEAD:
            self.transport.pause_reading()
        self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost = True
        self._opened.discard(self)
        if self in self._idle:
            self._idle.remove(self)
        if self._headed and not self.headers.keys() & {"content-length", "transfer-encoding"}:
            self._complete = True  # such a body ends with its connection
        elif exc is not None and not self._failed:
            self._why = explain(exc)
        self._wake()

    def pause_writing(self) -> None:
        self._full = True

    def resume_writing(self) -> None:
        self._full = False
        self._wake()

    # -- the parser's side

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()
        if self.status < 200:
            self.headers.clear()  # an interim answer
        else:
            self._headed = True

    def on_body(self, body: bytes) -> None:
        self._chunks.append(body)
        self._ahead += len(body)

    def on_message_complete(self) -> None:
        self._complete = self._headed
        self._keep = self._parser.should_keep_alive()


@lru_cache(maxsize=1)
def _trust() -> ssl.SSLContext:
    return ssl.create_default_context()


def explain(error: Exception) -> str:
    """A network error in a few words."""
    if isinstance(error, ConnectionRefusedError) or f"[Errno {errno.ECONNREFUSED}]" in str(error):
        return "connection refused"
    if isinstance(error, TimeoutError):
        return "no answer in time"
    return (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
