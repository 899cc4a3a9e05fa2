"""Where the state folder is."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchflow.contracts.errors import PrerequisiteError
from benchflow.kernel.ownership import state_dir


def test_the_state_folder_is_absolute_however_it_is_named(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("BENCHFLOW_HOME", "here")
    assert state_dir() == tmp_path / "here"
    monkeypatch.setenv("BENCHFLOW_HOME", "")
    monkeypatch.setenv("XDG_CACHE_HOME", "cache")
    assert state_dir() == tmp_path / "cache" / "benchflow"


def test_a_user_without_a_home_is_told_which_variable_to_set(monkeypatch):
    for name in ("BENCHFLOW_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)

    def nowhere() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", nowhere)
    with pytest.raises(PrerequisiteError, match="export BENCHFLOW_HOME="):
        state_dir()
