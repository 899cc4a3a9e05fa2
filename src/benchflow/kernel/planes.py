"""The planes a rollout runs on, chosen by name."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from benchflow.contracts.agent import Agent
from benchflow.contracts.config import RolloutConfig
from benchflow.contracts.gateway import Gateway
from benchflow.contracts.reward import Reward
from benchflow.contracts.sandbox import SandboxProvider
from benchflow.contracts.task import Task
from benchflow.kernel import registry
from benchflow.kernel.storage import Redactor


@dataclass(slots=True)
class Planes:
    """Shared by all rollouts of a job. The gates bound image builds and verifiers."""

    provider: SandboxProvider
    reward: Reward
    load_agent: Callable[[str], Agent]
    load_task: Callable[[Path], Task]
    gateway: Gateway | None = None
    redact: Redactor = field(default_factory=Redactor)
    image_gate: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(1 << 20))
    verify_gate: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(1 << 20))
    runtime_dir: Path | None = None

    async def close(self) -> None:
        if self.gateway is not None:
            await self.gateway.stop()
        await self.provider.close()
        if self.runtime_dir is not None:
            shutil.rmtree(self.runtime_dir, ignore_errors=True)


async def open_planes(sandbox: str, *, with_gateway: bool = True) -> Planes:
    """Build the planes from the registry and start the gateway. The caller closes them."""
    redact = Redactor()
    planes = Planes(
        provider=registry.resolve("sandboxes", sandbox)(),
        reward=registry.resolve("rewards", "script")(),
        load_agent=registry.resolve("agent_catalogs", "default"),
        load_task=registry.resolve("task_loaders", "default"),
        redact=redact,
    )
    if with_gateway:
        planes.runtime_dir = private_runtime_dir()
        gateway: Gateway = registry.resolve("gateways", "default")(
            planes.runtime_dir / "gateway.sock", redact=redact
        )
        await gateway.start()
        planes.gateway = gateway
    return planes


async def open_planes_for(config: RolloutConfig) -> Planes:
    """Planes for one rollout; the gateway is started only when a role names a model."""
    return await open_planes(config.sandbox_name, with_gateway=any(role.model for role in config.roles))


def private_runtime_dir() -> Path:
    """A short path only this user can enter: unix socket paths end at 107 bytes."""
    base = os.environ.get("XDG_RUNTIME_DIR")
    usable = base and len(base) < 60 and os.access(base, os.W_OK)
    return Path(tempfile.mkdtemp(prefix="bf-", dir=base if usable else "/tmp"))
