"""What there is of sandboxes, and what died with its run, over every provider of this installation."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

from benchflow.contracts.errors import PrerequisiteError
from benchflow.contracts.sandbox import Reaped, Running, SandboxProvider
from benchflow.kernel.registry import names, resolve

T = TypeVar("T")


async def reap_all(*, older_than: float = 0.0, dry_run: bool = False) -> list[Reaped]:
    """Call ``reap`` of each provider. ``older_than`` is in seconds."""
    return await _ask_each(lambda provider: provider.reap(older_than=older_than, dry_run=dry_run))


async def all_running() -> list[Running]:
    return await _ask_each(lambda provider: provider.running())


async def _ask_each(ask: Callable[[SandboxProvider], Awaitable[list[T]]]) -> list[T]:
    """A provider whose prerequisites are missing here can have nothing and is passed over."""
    found: list[T] = []
    for name in names("sandboxes"):
        try:
            provider: SandboxProvider = resolve("sandboxes", name)()
        except PrerequisiteError:
            continue
        try:
            found += await ask(provider)
        except PrerequisiteError:
            continue
        finally:
            await provider.close()
    return found
