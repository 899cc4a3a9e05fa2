"""Model endpoints as the gateway sees them: one way to send a request, one guard per endpoint."""

from __future__ import annotations

import asyncio
import io
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import aiohttp
from yarl import URL

from benchflow.contracts.errors import PrerequisiteError
from benchflow.gateway.providers import Target

_LARGE = 1 << 19
"""Bytes of a request from which it is sent in pieces."""


class Unreachable(ConnectionError):
    """No whole answer came: refused, reset, timed out, or cut before its end."""


@dataclass(frozen=True, slots=True)
class Submission:
    """One request as it goes upstream. ``seed`` stands for the rollout's (seed, task, trial)."""

    body: bytes
    session_id: str
    seed: int
    attempt: int = 1


@dataclass(slots=True)
class Answer:
    """The head of an upstream's answer; ``chunks`` is read once and ends with it."""

    status: int
    headers: Mapping[str, str]
    chunks: AsyncIterator[bytes]

    async def read(self) -> bytes:
        return b"".join([chunk async for chunk in self.chunks])


class Upstream(Protocol):
    target: Target
    guard: Guard

    @property
    def model(self) -> str:
        """The name that requests must carry."""
        ...

    def send(self, submission: Submission) -> Any:
        """An async context manager that yields an ``Answer`` and raises ``Unreachable``."""
        ...


@dataclass(slots=True)
class Breaker:
    """Opens when a call has spent its retries and no other was served meanwhile; then calls fail
    at once until ``cooldown`` seconds have passed, when one call may try."""

    cooldown: float
    reason: str = ""
    _retry_at: float | None = None
    _served_at: float = 0.0

    def blocked(self) -> str | None:
        """Why no call may be made now, or None. Asking after the cooldown takes the one trial."""
        if self._retry_at is None:
            return None
        now = time.monotonic()
        if now < self._retry_at:
            return self.reason
        self._retry_at = now + self.cooldown
        return None

    @property
    def open(self) -> bool:
        return self._retry_at is not None

    def trip(self, reason: str, *, since: float) -> None:
        """A call that began at ``since`` gives up."""
        if self._served_at < since:
            self.reason = reason
            self._retry_at = time.monotonic() + self.cooldown

    def succeeded(self) -> None:
        self._retry_at = None
        self._served_at = time.monotonic()


@dataclass(slots=True)
class Guard:
    """Shared by everything that calls one endpoint."""

    breaker: Breaker
    slots: asyncio.Semaphore | None = None


@dataclass(slots=True)
class HttpUpstream:
    """An OpenAI-compatible server. Bodies are sent and handed on byte for byte."""

    target: Target
    guard: Guard
    client: aiohttp.ClientSession
    url: URL = field(init=False)
    headers: dict[str, str] = field(init=False)

    def __post_init__(self) -> None:
        self.url = URL(f"{self.target.base_url}/chat/completions")
        # identity: a compressed stream could be neither relayed as it comes nor read here.
        self.headers = {"content-type": "application/json", "accept-encoding": "identity"}
        if self.target.key:
            self.headers["authorization"] = f"Bearer {self.target.key}"

    @property
    def model(self) -> str:
        return self.target.name

    @asynccontextmanager
    async def send(self, submission: Submission) -> AsyncIterator[Answer]:
        headers = {**self.headers, "x-session-id": submission.session_id}
        try:
            async with self.client.post(self.url, data=_payload(submission.body), headers=headers) as reply:
                lowered = {key.lower(): value for key, value in reply.headers.items()}
                yield Answer(reply.status, lowered, reply.content.iter_any())
        except (aiohttp.ClientError, TimeoutError, ConnectionError) as error:
            raise Unreachable(explain(error)) from error


def _payload(body: bytes) -> bytes | io.BytesIO:
    """aiohttp sends a file in pieces, so that a prompt of megabytes does not hold up other calls."""
    return body if len(body) < _LARGE else io.BytesIO(body)


def explain(error: Exception) -> str:
    """A network error in a few words."""
    cause = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error
    if isinstance(cause, ConnectionRefusedError):
        return "connection refused"
    if isinstance(error, TimeoutError):
        return "no answer in time"
    return str(error) or type(error).__name__


def open_client(read_timeout: float) -> aiohttp.ClientSession:
    """One pool for all upstreams. Connections are limited by the guards, not here."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=30, ttl_dns_cache=300),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=15, sock_read=read_timeout),
        headers={"user-agent": "benchflow"},
        read_bufsize=1 << 18,
        max_line_size=1 << 16,
        max_field_size=1 << 16,
    )


async def served_models(client: aiohttp.ClientSession, target: Target) -> list[str] | None:
    """Model names that the endpoint lists, None when it does not say. Raises
    ``PrerequisiteError`` when it cannot be reached at all or refuses the key."""
    headers = {"authorization": f"Bearer {target.key}"} if target.key else {}
    timeout = aiohttp.ClientTimeout(total=20)
    try:
        async with client.get(f"{target.base_url}/models", headers=headers, timeout=timeout) as reply:
            if reply.status in (401, 403):
                raise PrerequisiteError(
                    f"the model endpoint {target.base_url} refuses the key ({reply.status})",
                    fix="check the provider's API key variable",
                )
            if reply.status != 200:
                return None
            listed = await reply.json(content_type=None)
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise PrerequisiteError(
            f"the model endpoint {target.base_url} does not answer: {explain(error)}",
            fix="start the model server, or check --policy-url",
        ) from error
    except ValueError:
        return None
    entries = listed.get("data") if isinstance(listed, dict) else None
    if not isinstance(entries, list):
        return None
    return [str(entry["id"]) for entry in entries if isinstance(entry, dict) and "id" in entry]
