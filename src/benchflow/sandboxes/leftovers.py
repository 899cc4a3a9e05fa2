"""Cleaning up after runs that died, over every provider this installation has."""

from __future__ import annotations

from benchflow.contracts.errors import PrerequisiteError
from benchflow.contracts.sandbox import Reaped, SandboxProvider
from benchflow.kernel.registry import names, resolve


async def reap_all(*, older_than: float = 0.0, dry_run: bool = False) -> list[Reaped]:
    """Call ``reap`` of each provider. ``older_than`` is in seconds. A provider whose
    prerequisites are missing here can have left nothing and is passed over."""
    found: list[Reaped] = []
    for name in names("sandboxes"):
        try:
            provider: SandboxProvider = resolve("sandboxes", name)()
        except PrerequisiteError:
            continue
        try:
            found += await provider.reap(older_than=older_than, dry_run=dry_run)
        except PrerequisiteError:
            continue
        finally:
            await provider.close()
    return found
