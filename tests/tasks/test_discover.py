from __future__ import annotations

import os

import pytest

from benchflow.contracts.errors import TaskError, UsageError
from benchflow.tasks.discover import find_tasks, load_tasks


def test_a_task_stands_for_itself_and_a_folder_for_its_tasks(native, split, tmp_path):
    native(at="b")
    split(at="a")
    (tmp_path / "notes").mkdir()
    (tmp_path / ".hidden").mkdir()
    (tmp_path / ".hidden" / "task.md").write_text("---\n---\nx\n")
    assert [path.name for path in find_tasks([tmp_path])] == ["a", "b"]
    assert [path.name for path in find_tasks([tmp_path / "b"])] == ["b"]
    assert [path.name for path in find_tasks([tmp_path / "b" / "task.md"])] == ["b"]


def test_globs_and_repeats(native, tmp_path):
    for name in ("one", "two", "other"):
        native(at=name)
    found = find_tasks([str(tmp_path / "o*"), str(tmp_path / "two"), str(tmp_path)])
    assert [path.name for path in found] == ["one", "other", "two"]


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("nowhere", "no such task or folder"),
        ("x*", "nothing matches"),
        (".", "looked for task.md or task.toml"),
    ],
)
def test_nothing_found_says_what_was_looked_for(tmp_path, monkeypatch, pattern, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=message):
        find_tasks([pattern])


def test_each_broken_task_is_named(native, tmp_path):
    native(at="good")
    native("agent: {timeout_sec: x}\n", at="bad")
    native("steps: [1]\n", at="worse")
    with pytest.raises(TaskError) as caught:
        load_tasks([tmp_path])
    text = str(caught.value)
    assert "2 of 3 tasks are broken" in text
    assert "task 'bad': task.md:2: agent.timeout_sec" in text and "task 'worse': task.md:2: steps" in text


def test_a_folder_with_an_instruction_and_no_configuration_is_a_broken_task(split, tmp_path):
    split(at="half", **{"task.toml": None})
    with pytest.raises(TaskError, match=r"task\.toml: cannot be read"):
        load_tasks([tmp_path])


def test_a_name_that_is_not_utf8_is_named(native, tmp_path):
    native(at="good").rename(tmp_path / os.fsdecode(b"bad\xff"))
    with pytest.raises(UsageError, match=r"bad\\udcff.*is not UTF-8"):
        find_tasks([tmp_path])
