"""The stateful world a task acts on (databases, services)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from benchflow.contracts.sandbox import Sandbox


@dataclass(frozen=True, slots=True)
class StateSnapshot:
    digest: str
    data: Mapping[str, object] = field(default_factory=dict[str, object])


class Environment(Protocol):
    async def provision(self, sandbox: Sandbox) -> None: ...

    async def readiness(self) -> None:
        """Return once the world is healthy; raise ``SandboxStartError`` when it never is."""
        ...

    async def query(self) -> Mapping[str, object]: ...

    async def snapshot(self) -> StateSnapshot: ...

    async def restore(self, snapshot: StateSnapshot) -> None: ...

    async def reset(self) -> None: ...

    async def teardown(self) -> None: ...
