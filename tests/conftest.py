"""Every test worker has a state folder of its own: no test sees what another left, and none
touches the user's."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

REQUIRE = "BENCHFLOW_TEST_REQUIRE"
"""Set where nothing may be skipped for want of an engine or an agent."""

# A property holds or not; how long an example takes says only how busy the machine is.
settings.register_profile("benchflow", deadline=None)
settings.load_profile("benchflow")


@pytest.fixture(scope="session")
def require() -> Callable[[object, str], None]:
    """``require(what, why)`` skips the test when ``what`` is false, or fails it where nothing
    may be skipped."""

    def require(what: object, why: str) -> None:
        if not what:
            (pytest.fail if os.environ.get(REQUIRE) else pytest.skip)(why)

    return require


@pytest.fixture(scope="session", autouse=True)
def state_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    place = tmp_path_factory.mktemp("state")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BENCHFLOW_HOME", str(place))
        yield place
        from benchflow.sandboxes.local.layers import LayerStore, store_root

        memory = LayerStore(store_root()).tmpfs_root
        if memory is not None:
            shutil.rmtree(memory, ignore_errors=True)
    assert os.environ.get("BENCHFLOW_HOME") != str(place)
