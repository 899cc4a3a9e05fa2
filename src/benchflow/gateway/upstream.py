"""Model endpoints as the gateway sees them: one way to send a request, one guard per endpoint."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any, Protocol

from yarl import URL

from benchflow.contracts.errors import PrerequisiteError
from benchflow.gateway import wire
from benchflow.gateway.client import Client, Exchange, explain, head_of
from benchflow.gateway.providers import Target


@dataclass(frozen=True, slots=True)
class Submission:
    """One request as it goes upstream. ``seed`` stands for the rollout's (seed, task, trial)."""

    body: bytes
    session_id: str
    seed: int
    attempt: int = 1


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
    client: Client
    url: URL = field(init=False)
    head: bytes = field(init=False)

    def __post_init__(self) -> None:
        self.url = URL(f"{self.target.base_url}/chat/completions")
        self.head = head_of("POST", self.url, {"content-type": "application/json", **_login(self.target)})

    @property
    def model(self) -> str:
        return self.target.name

    def send(self, submission: Submission) -> Exchange:
        session = submission.session_id.encode("latin-1", "replace")
        return self.client.request(
            self.url, b"%sx-session-id: %s\r\n" % (self.head, session), submission.body
        )


def _login(target: Target) -> dict[str, str]:
    return {"authorization": f"Bearer {target.key.strip()}"} if target.key else {}


async def served_models(client: Client, target: Target) -> list[str] | None:
    """Model names that the endpoint lists, None when it does not say. Raises
    ``PrerequisiteError`` when it cannot be reached at all or refuses the key."""
    url = URL(f"{target.base_url}/models")
    request = client.request(url, head_of("GET", url, _login(target)))
    try:
        async with asyncio.timeout(20), request as reply:
            if reply.status in (401, 403):
                raise PrerequisiteError(
                    f"the model endpoint {target.base_url} refuses the key ({reply.status})",
                    fix="check the provider's API key variable",
                )
            if reply.status != 200:
                return None
            listed = wire.loads(await reply.read())
    except OSError as error:
        raise PrerequisiteError(
            f"the model endpoint {target.base_url} does not answer: {explain(error)}",
            fix="start the model server, or check --policy-url",
        ) from error
    except wire.BadJson:
        return None
    entries = listed.get("data") if isinstance(listed, dict) else None
    if not isinstance(entries, list):
        return None
    return [str(entry["id"]) for entry in entries if isinstance(entry, dict) and "id" in entry]
