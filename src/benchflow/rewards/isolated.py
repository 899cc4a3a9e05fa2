"""Verification somewhere else: a fresh sandbox that gets only what the agent left in its
workspace, or a copy of the sandbox when the verifier needs another network."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from benchflow.contracts.errors import TransferError, VerifierFailedError
from benchflow.contracts.reward import VerifyRequest
from benchflow.contracts.sandbox import Sandbox, SandboxImage
from benchflow.rewards import inventory
from benchflow.rewards.hardening import budget, root_exec, write_files

_LIMIT = 4 << 30
"""Bytes of workspace that are copied."""


@asynccontextmanager
async def fresh(request: VerifyRequest, notes: list[str]) -> AsyncIterator[Sandbox]:
    """A sandbox from the task's image with the agent's workspace in it."""
    async with _created(request, request.image) as sandbox:
        await _copy_workspace(request, sandbox, notes)
        for path in ("/logs/artifacts", *request.task.artifacts):
            if not inventory.is_inside(path, request.workspace):
                await _copy(request.sandbox, sandbox, path)
        yield sandbox


@asynccontextmanager
async def with_network(request: VerifyRequest) -> AsyncIterator[Sandbox]:
    """The agent's sandbox itself, or its copy when the verifier's network is another one."""
    wanted = request.task.verifier.network
    if wanted is None or wanted == request.sandbox.spec.network:
        yield request.sandbox
        return
    why = request.sandbox.capabilities.why.get("snapshot", "it takes no snapshots")
    if not request.sandbox.capabilities.snapshot:
        raise VerifierFailedError(
            f"the verifier needs network {wanted.mode}, and this sandbox cannot be copied: {why}",
            fix="use --verify isolated",
        )
    if not request.task.verifier.kill_processes:
        raise VerifierFailedError(
            f"the verifier needs network {wanted.mode}, and the service it scores runs in another one",
            fix="give the agent and the verifier the same network",
        )
    async with _created(request, await request.sandbox.snapshot()) as sandbox:
        yield sandbox


@asynccontextmanager
async def _created(request: VerifyRequest, image: SandboxImage) -> AsyncIterator[Sandbox]:
    spec = request.sandbox.spec
    network = request.task.verifier.network or spec.network
    spec = replace(spec, name=f"{spec.name}-verify", network=network, model_door=None, mounts=())
    sandbox = await request.provider.create(image, spec)
    try:
        yield sandbox
    finally:
        await sandbox.teardown()


async def _copy_workspace(request: VerifyRequest, sandbox: Sandbox, notes: list[str]) -> None:
    """Make the fresh workspace equal to the agent's: files deleted there are deleted here.

    Links are taken off first and made again when they stay in the workspace. The agent's
    sandbox is not used after this.
    """
    workspace, timeout = request.workspace, budget(request)
    for box in (request.sandbox, sandbox):
        await root_exec(box, ["mkdir", "-p", workspace], timeout)
    theirs, ours = [
        (await inventory.take(box, [workspace], timeout)).links for box in (request.sandbox, sandbox)
    ]
    kept = {path: link for path, link in theirs.items() if not inventory.leaves(path, workspace, theirs)}
    kept |= {path: link for path, link in ours.items() if theirs.get(path) == link}
    notes += [f"link dropped: {path} -> {theirs[path]}" for path in sorted(theirs.keys() - kept.keys())]
    unlink = ["find", f"{workspace}/.", "!", "-type", "d", "!", "-type", "f", "-exec", "rm", "-f", "{}", "+"]
    inventory.check(await root_exec(request.sandbox, unlink, timeout), "taking links off")
    empty = ["find", f"{workspace}/.", "!", "-name", ".", "-prune", "-exec", "rm", "-rf", "{}", "+"]
    inventory.check(await root_exec(sandbox, empty, timeout), "emptying the fresh workspace")
    await _copy(request.sandbox, sandbox, workspace)
    await write_files(sandbox, {path: inventory.Found(link=link) for path, link in kept.items()}, timeout)


async def _copy(source: Sandbox, target: Sandbox, path: str) -> None:
    """Copy a file or folder between sandboxes by way of a private folder of the host."""
    with tempfile.TemporaryDirectory(prefix="benchflow-verify-") as scratch:
        local = Path(scratch) / "copy"
        try:
            await source.download(path, local, limit=_LIMIT)
        except TransferError:
            if await _exists(source, path):
                raise
            return
        await target.upload(local, path)


async def _exists(sandbox: Sandbox, path: str) -> bool:
    return (await sandbox.exec(["test", "-e", path], clean_env=True, env={"PATH": inventory.PATH})).ok
