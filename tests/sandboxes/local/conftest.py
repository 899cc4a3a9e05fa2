"""Local sandboxes on the host base, in a state folder of their own."""

from __future__ import annotations

import os
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from benchflow.contracts.errors import PrerequisiteError
from benchflow.contracts.sandbox import ImageSource, Limits, SandboxImage, SandboxSpec
from benchflow.sandboxes.local.provider import LocalProvider
from benchflow.sandboxes.local.sandbox import LocalSandbox

SOURCE = ImageSource("local-tests", None, None, local_base="host")

Create = Callable[..., Awaitable[LocalSandbox]]


@pytest.fixture(scope="module", autouse=True)
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The state folder of the module's tests."""
    place = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BENCHFLOW_HOME", str(place))
        yield place
        memory = LocalProvider().store.tmpfs_root
        if memory is not None:
            shutil.rmtree(memory)


@pytest.fixture
async def provider() -> AsyncIterator[LocalProvider]:
    made = LocalProvider()
    try:
        await made.preflight()
    except PrerequisiteError as error:
        pytest.skip(str(error))
    yield made
    await made.close()


@pytest.fixture
async def image(provider: LocalProvider) -> SandboxImage:
    return await provider.prepare(SOURCE)


@pytest.fixture
async def create(provider: LocalProvider, image: SandboxImage) -> Create:
    """Make a sandbox with writes in memory; the provider's end tears it down."""

    async def create(**spec: object) -> LocalSandbox:
        limits = spec.pop("limits", Limits(storage_mb=64))
        return await provider.create(image, SandboxSpec("test", limits=limits, **spec))  # type: ignore[arg-type]

    return create


@pytest.fixture
async def sandbox(create: Create) -> LocalSandbox:
    return await create()


@pytest.fixture
def as_root() -> None:
    if os.geteuid() != 0:
        pytest.skip("this host user is not root")
