"""The scripted model inside the gateway: an upstream without a network."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from benchflow.gateway import wire
from benchflow.gateway.client import Answer, Unreachable
from benchflow.gateway.providers import Target
from benchflow.gateway.scripted.engine import answer
from benchflow.gateway.scripted.policy import Policy
from benchflow.gateway.upstream import Guard, Submission


@dataclass(slots=True)
class ScriptedUpstream:
    target: Target
    guard: Guard
    policy: Policy

    @property
    def model(self) -> str:
        return self.policy.name

    @asynccontextmanager
    async def send(self, submission: Submission) -> AsyncIterator[Answer]:
        reply = answer(
            self.policy,
            wire.loads(submission.body),
            seed=submission.seed,
            attempt=submission.attempt,
        )
        if reply.delay:
            await asyncio.sleep(reply.delay)
        if reply.disconnect:
            raise Unreachable("the scripted model broke the connection")
        headers = {"content-type": "application/json"}
        if reply.retry_after is not None:
            headers["retry-after"] = str(reply.retry_after)
        yield Answer(reply.status, headers, _once(wire.dumps(reply.body)))


async def _once(data: bytes) -> AsyncIterator[bytes]:
    yield data
