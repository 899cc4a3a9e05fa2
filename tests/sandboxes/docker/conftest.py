"""Containers of the engine that answers here; skipped, or failed, where none does."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from benchflow.contracts.errors import PrerequisiteError
from benchflow.contracts.sandbox import ImageSource, SandboxImage, SandboxSpec
from benchflow.sandboxes.docker.engine import Engine, EngineError
from benchflow.sandboxes.docker.provider import DockerProvider
from benchflow.sandboxes.docker.sandbox import DockerSandbox

BASE = "debian:bookworm-slim"

Create = Callable[..., Awaitable[DockerSandbox]]
Built = Callable[..., Awaitable[SandboxImage]]


@pytest.fixture
async def engine(require: Callable[[object, str], None]) -> AsyncIterator[Engine]:
    made = Engine()
    try:
        await made.connect()
        await made.json("GET", f"images/{BASE}/json")
    except PrerequisiteError as error:
        require(False, str(error))
    except EngineError:
        require(False, f"the engine has no image {BASE} (scripts/base-image makes it)")
    yield made
    await made.close()


@pytest.fixture
async def provider(engine: Engine) -> AsyncIterator[DockerProvider]:
    """``engine`` has shown that one can be made."""
    made = DockerProvider()
    await made.preflight()
    yield made
    await made.close()


@pytest.fixture
async def image(provider: DockerProvider) -> SandboxImage:
    return await provider.prepare(ImageSource("base", None, None, docker_image=BASE))


@pytest.fixture
async def built(provider: DockerProvider, tmp_path: Path) -> AsyncIterator[Built]:
    """Build an image from the lines of a Dockerfile and files; it is removed at the end."""
    made: list[SandboxImage] = []

    async def build(dockerfile: str, *files: Path) -> SandboxImage:
        context = tmp_path / f"environment{len(made)}"
        context.mkdir()
        (context / "Dockerfile").write_text(dockerfile)
        for path in files:
            shutil.copy(path, context)
        made.append(await provider.prepare(ImageSource("facts", context, context / "Dockerfile")))
        return made[-1]

    yield build
    for image in made:
        await provider.engine.json("DELETE", f"images/{image.ref}", params={"force": True})


@pytest.fixture
async def create(provider: DockerProvider, image: SandboxImage) -> AsyncIterator[Create]:
    made: list[DockerSandbox] = []

    async def create(*, of: SandboxImage | None = None, **spec: object) -> DockerSandbox:
        made.append(await provider.create(of or image, SandboxSpec("test", **spec)))  # type: ignore[arg-type]
        return made[-1]

    yield create
    await asyncio.gather(*(sandbox.teardown() for sandbox in made))


@pytest.fixture
async def sandbox(create: Create) -> DockerSandbox:
    return await create()


@pytest.fixture
def listed(provider: DockerProvider) -> Callable[[], Awaitable[set[str]]]:
    """Names of the containers of this test worker's state folder."""

    async def names() -> set[str]:
        label = {"label": [f"benchflow.home={os.environ['BENCHFLOW_HOME']}"]}
        found = await provider.engine.json("GET", "containers/json", params={"all": True, "filters": label})
        return {item["Names"][0].lstrip("/") for item in found}

    return names


@pytest.fixture
def bench() -> Callable[..., subprocess.Popen[str]]:
    """Start ``bench`` with some arguments."""

    def start(*arguments: str, **env: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "benchflow.cli.main", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, **env},
            start_new_session=True,
        )

    return start
