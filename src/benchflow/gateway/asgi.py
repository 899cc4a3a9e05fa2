"""A small ASGI toolbox: read a body, answer JSON, serve an app inside the running event loop.

uvicorn's own ``Server`` owns signals and wakes ten times a second; a job already has an event
loop and signal handling, so only uvicorn's protocol is used here.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any

from uvicorn.config import Config
from uvicorn.server import ServerState

from benchflow.contracts.errors import PrerequisiteError
from benchflow.gateway import wire

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Header = tuple[bytes, bytes]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

JSON = b"application/json"
SSE = b"text/event-stream; charset=utf-8"
KEEP_ALIVE = 600
"""Seconds an idle connection is kept: agents think, and a closed one costs them a retry."""
_UNIX_PATH_LIMIT = 107


class Disconnected(Exception):
    """The client went away before its request was complete."""


async def read_body(receive: Receive) -> bytes:
    message = await receive()
    if message["type"] == "http.disconnect":
        raise Disconnected
    body: bytes = message.get("body", b"")
    if not message.get("more_body"):
        return body
    parts = [body]
    while message.get("more_body"):
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Disconnected
        parts.append(message.get("body", b""))
    return b"".join(parts)


async def send_head(send: Send, status: int, headers: list[Header]) -> None:
    await send({"type": "http.response.start", "status": status, "headers": headers})


async def send_bytes(send: Send, status: int, body: bytes, kind: bytes = JSON, *extra: Header) -> None:
    length = str(len(body)).encode()
    await send_head(send, status, [(b"content-type", kind), (b"content-length", length), *extra])
    await send({"type": "http.response.body", "body": body})


async def send_json(send: Send, status: int, payload: Any, *extra: Header) -> None:
    await send_bytes(send, status, wire.dumps(payload), JSON, *extra)


class Listener:
    """Serves one ASGI app on a unix socket or a TCP address until ``stop``."""

    def __init__(
        self,
        app: App,
        *,
        path: Path | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
        log_level: str = "error",
    ) -> None:
        self._app = app
        self._path = path
        self._address = (host, port)
        self._log_level = log_level
        self._server: asyncio.Server | None = None
        self._state = ServerState()

    @property
    def port(self) -> int:
        assert self._server is not None
        return self._server.sockets[0].getsockname()[1]

    async def start(self) -> None:
        """Raises ``PrerequisiteError`` when the address cannot be bound."""
        config = Config(
            self._app,
            interface="asgi3",
            http="httptools",
            ws="none",
            lifespan="off",
            log_config=None,
            log_level=self._log_level,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            date_header=False,
            timeout_keep_alive=KEEP_ALIVE,
        )
        config.load()

        def protocol() -> asyncio.Protocol:
            return config.http_protocol_class(config=config, server_state=self._state, app_state={})  # type: ignore[call-arg]

        loop = asyncio.get_running_loop()
        try:
            if self._path is None:
                self._server = await loop.create_server(protocol, sock=self._bind(), backlog=2048)
            else:
                self._check_path(self._path)
                self._server = await loop.create_unix_server(protocol, str(self._path), backlog=2048)
                # Agents of several users connect; the folder decides who gets here, the key what for.
                os.chmod(self._path, 0o666)
        except OSError as error:
            where = self._path or "{}:{}".format(*self._address)
            raise PrerequisiteError(f"cannot listen on {where}: {error.strerror or error}") from error

    async def stop(self, grace: float = 1.0) -> None:
        """Stop accepting, let requests in flight end for ``grace`` seconds, then cancel them."""
        if self._server is None:
            return
        self._server.close()
        for connection in list(self._state.connections):
            connection.shutdown()
        if self._state.tasks:
            await asyncio.wait(set(self._state.tasks), timeout=grace)
        leftover = set(self._state.tasks)
        for task in leftover:
            task.cancel()
        if leftover:
            await asyncio.wait(leftover)
        for connection in list(self._state.connections):
            connection.transport.abort()
        await asyncio.sleep(0)
        self._server = None
        if self._path is not None:
            self._path.unlink(missing_ok=True)

    def _bind(self) -> socket.socket:
        family = socket.AF_INET6 if ":" in self._address[0] else socket.AF_INET
        listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(self._address)
        except BaseException:
            listening.close()
            raise
        return listening

    @staticmethod
    def _check_path(path: Path) -> None:
        if len(os.fsencode(path)) > _UNIX_PATH_LIMIT:
            raise PrerequisiteError(
                f"the socket path {path} is longer than {_UNIX_PATH_LIMIT} bytes",
                fix="use a shorter temporary folder (TMPDIR)",
            )
