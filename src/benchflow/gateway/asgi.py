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


class BadRequest(ValueError):
    """The body is no chat request; the message says why."""


async def read_chat(receive: Receive) -> tuple[bytes, dict[str, Any]]:
    """The body of a chat-completions request as it came, and as JSON that holds a list of messages.
    Raises ``Disconnected`` or ``BadRequest``."""
    parts: list[bytes] = []
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Disconnected
        parts.append(message.get("body", b""))
        more = message.get("more_body")
    raw = b"".join(parts)
    try:
        body = wire.loads(raw)
    except wire.BadJson as error:
        raise BadRequest(f"the request body is not JSON: {error}") from error
    if not isinstance(body, dict) or not isinstance(body.get("messages"), list):
        raise BadRequest("the request body needs a list of messages")
    return raw, body


async def send_head(send: Send, status: int, headers: list[Header]) -> None:
    await send({"type": "http.response.start", "status": status, "headers": headers})


async def send_bytes(send: Send, status: int, body: bytes, kind: bytes = JSON, *extra: Header) -> None:
    length = str(len(body)).encode()
    await send_head(send, status, [(b"content-type", kind), (b"content-length", length), *extra])
    await send({"type": "http.response.body", "body": body})


async def send_json(send: Send, status: int, payload: Any, *extra: Header) -> None:
    await send_bytes(send, status, wire.dumps(payload), JSON, *extra)


class Listener:
    """Serves one ASGI app on a unix socket or at ``(host, port)`` until ``stop``."""

    def __init__(self, app: App, where: Path | tuple[str, int], *, log_level: str = "error") -> None:
        self._app = app
        self._where = where
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

        loop, where = asyncio.get_running_loop(), self._where
        try:
            if isinstance(where, Path):
                _check_length(where)
                self._server = await loop.create_unix_server(protocol, str(where), backlog=2048)
                # Agents of several users connect; the folder decides who gets here, the key what for.
                os.chmod(where, 0o666)
            else:
                self._server = await loop.create_server(protocol, sock=_bind(where), backlog=2048)
        except OSError as error:
            shown = where if isinstance(where, Path) else "{}:{}".format(*where)
            raise PrerequisiteError(f"cannot listen on {shown}: {error.strerror or error}") from error

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
        if isinstance(self._where, Path):
            self._where.unlink(missing_ok=True)


def _bind(address: tuple[str, int]) -> socket.socket:
    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
    except BaseException:
        listening.close()
        raise
    return listening


def _check_length(path: Path) -> None:
    if len(os.fsencode(path)) > _UNIX_PATH_LIMIT:
        raise PrerequisiteError(
            f"the socket path {path} is longer than {_UNIX_PATH_LIMIT} bytes",
            fix="use a shorter temporary folder (TMPDIR)",
        )
