"""What counts as a rollout under a path, and in which order."""

from __future__ import annotations

import pytest

from benchflow.contracts.errors import UsageError
from benchflow.training.discover import find_rollouts


def names(path):
    return [found.name for found in find_rollouts(path)]


def test_rollouts_come_by_trial_then_by_name(jobs):
    second, third = jobs.rollout(trial=1, task="b"), jobs.rollout(trial=2, task="a")
    first = jobs.rollout(trial=1, task="a")
    assert names(jobs.root) == [first.name, second.name, third.name]
    assert {found.job_dir for found in find_rollouts(first.parent)} == {str(first.parent)}


def test_unfinished_rollouts_are_found_by_any_trace_they_left(jobs):
    done = jobs.rollout()
    started = jobs.rollout(finish=False, name="only-a-config")
    (done.parent / "half-life__0000beef").mkdir()
    gone = jobs.rollout(name="only-a-line")
    for path in sorted(gone.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    gone.rmdir()
    assert names(jobs.root) == sorted([done.name, started.name, "half-life__0000beef", gone.name])


def test_a_job_named_like_a_rollout_is_a_job(jobs):
    folder = jobs.rollout(job="sweep__12345678")
    assert names(jobs.root) == [folder.name]


def test_what_lies_inside_a_rollout_is_found_only_by_name(jobs):
    folder = jobs.rollout()
    child = folder / "branches" / "fork-1" / "left"
    child.mkdir(parents=True)
    (child / "result.json").write_bytes((folder / "result.json").read_bytes())
    (folder / "attempts" / "1").mkdir(parents=True)
    assert names(jobs.root) == [folder.name]
    assert names(folder / "branches") == ["left"]


def test_links_and_hidden_folders_are_left_alone(jobs, tmp_path):
    folder = jobs.rollout()
    (jobs.root / "again").symlink_to(folder.parent, target_is_directory=True)
    folder.parent.rename(folder.parent.with_name(".aside"))
    assert names(jobs.root) == []


def test_a_file_is_no_folder(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="is a file"):
        names(tmp_path / "file")
