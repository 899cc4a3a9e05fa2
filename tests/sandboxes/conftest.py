"""A file system small enough to fill; sandboxes of a provider that the test names."""

from __future__ import annotations

import os
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from benchflow.contracts.errors import PrerequisiteError
from benchflow.contracts.sandbox import ImageSource, Sandbox, SandboxProvider, SandboxSpec
from benchflow.kernel.registry import resolve


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """Mount a tmpfs of so many bytes; skipped for an ordinary user."""
    mounted: list[Path] = []

    def mount(size: int) -> Path:
        if os.geteuid() != 0:
            pytest.skip("mounting needs root")
        place = tmp_path / f"disk{len(mounted)}"
        place.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", place], check=True)
        mounted.append(place)
        return place

    yield mount
    for place in mounted:
        subprocess.run(["umount", "-l", place], check=True)


@pytest.fixture
async def provider(
    request: pytest.FixtureRequest, require: Callable[[object, str], None]
) -> AsyncIterator[SandboxProvider]:
    """The sandbox provider named by the test's parameter."""
    made: SandboxProvider = resolve("sandboxes", request.param)()
    try:
        await made.preflight()
    except PrerequisiteError as error:
        require(False, f"{request.param}: {error}")
    yield made
    await made.close()


@pytest.fixture
async def create(provider: SandboxProvider) -> AsyncIterator[Callable[..., Awaitable[Sandbox]]]:
    """Make sandboxes by the fields of their spec; they are torn down at the end."""
    source = ImageSource("reach", None, None, docker_image="debian:bookworm-slim", local_base="host")
    image = await provider.prepare(source)
    made: list[Sandbox] = []

    async def create(**spec: Any) -> Sandbox:
        made.append(await provider.create(image, SandboxSpec("reach", **spec)))
        return made[-1]

    yield create
    for sandbox in made:
        await sandbox.teardown()
