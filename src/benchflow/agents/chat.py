"""Chat completions through the gateway's unix socket, for agents that run in the engine.

All sessions of one event loop and one gateway share one connection pool: five hundred
rollouts hold as many sockets as they have calls in flight, and no more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import orjson

from benchflow.contracts.agent import StopReason
from benchflow.contracts.errors import EndpointError, EndpointRejectedError, HostPressureError
from benchflow.contracts.gateway import ModelRoute

_CONTEXT_CODES = ("context_length_exceeded", "context_limit")
_DETAIL = 2000
"""Characters of an error reply kept as evidence."""


class TurnEnded(Exception):
    """The gateway refused a call in a way that ends the turn but is nobody's failure."""

    def __init__(self, reason: StopReason, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message


@dataclass(slots=True)
class _Pool:
    session: aiohttp.ClientSession
    users: int = 0


POOLS: dict[tuple[asyncio.AbstractEventLoop, Path], _Pool] = {}


class ChatClient:
    """One rollout's calls to its model. ``close`` gives the shared pool back."""

    def __init__(self, route: ModelRoute) -> None:
        self._route = route
        self._url = f"http://gateway{route.host_path}/v1/chat/completions"
        self._key = (asyncio.get_running_loop(), route.socket)
        self._pool: _Pool | None = POOLS.get(self._key)
        if self._pool is None:
            self._pool = POOLS[self._key] = _Pool(_open_session(route.socket))
        self._pool.users += 1

    async def complete(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """One non-streaming call. Returns the reply's JSON. Raises ``TurnEnded`` for a context
        limit or a spent budget, ``EndpointError`` or ``EndpointRejectedError`` otherwise."""
        assert self._pool is not None, "the session is closed"
        headers = {"content-type": "application/json", "authorization": f"Bearer {self._route.key}"}
        try:
            async with self._pool.session.post(self._url, data=orjson.dumps(body), headers=headers) as reply:
                raw = await reply.read()
                status = reply.status
        except aiohttp.ClientError as error:
            raise EndpointError(f"the gateway is gone: {error}") from error
        if status != 200:
            self._refuse(status, raw)
        try:
            parsed = orjson.loads(raw)
            parsed["choices"][0]["message"]["role"]
        except (orjson.JSONDecodeError, KeyError, IndexError, TypeError) as error:
            raise EndpointError(
                "the model's reply is not a chat completion", detail=raw[:_DETAIL].decode("utf-8", "replace")
            ) from error
        return parsed

    async def close(self) -> None:
        pool, self._pool = self._pool, None
        if pool is None:
            return
        pool.users -= 1
        if pool.users == 0:
            del POOLS[self._key]
            await pool.session.close()

    def _refuse(self, status: int, raw: bytes) -> None:
        code, message = _read_error(raw)
        failure = self._route.totals().failure
        category = failure[0] if failure else ""
        if code in _CONTEXT_CODES or category == "context_limit":
            raise TurnEnded(StopReason.CONTEXT_LIMIT, message)
        if code.startswith("budget") or category == "budget":
            raise TurnEnded(StopReason.BUDGET, message)
        detail = raw[:_DETAIL].decode("utf-8", "replace")
        if category == HostPressureError.category:
            raise HostPressureError(message)
        if status >= 500 or status == 429 or category == "endpoint":
            raise EndpointError(f"the model endpoint failed with {status}: {message}", detail=detail)
        raise EndpointRejectedError(f"the model endpoint answered {status}: {message}", detail=detail)


def _open_session(socket: Path) -> aiohttp.ClientSession:
    # No total timeout: a model may think for long, and the rollout has its own clock. No limit
    # on connections: a call that waits for a free one would look like a slow model.
    return aiohttp.ClientSession(
        connector=aiohttp.UnixConnector(str(socket), limit=0, keepalive_timeout=60),
        timeout=aiohttp.ClientTimeout(total=None),
        auto_decompress=True,
    )


def _read_error(raw: bytes) -> tuple[str, str]:
    """``(code, message)`` of an OpenAI-style error body, whatever shape it really has."""
    try:
        error = orjson.loads(raw)["error"]
        code = error.get("code") or error.get("type") or ""
        return str(code), str(error.get("message") or "")[:_DETAIL]
    except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError):
        return "", raw[:200].decode("utf-8", "replace")
