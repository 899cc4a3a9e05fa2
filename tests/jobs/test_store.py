"""The files of a job survive crashes: whole lines stay, cut ones are set aside."""

from __future__ import annotations

import pytest

from benchflow.contracts.errors import UsageError
from benchflow.jobs.attempts import set_aside
from benchflow.jobs.load import load_job, load_rollouts
from benchflow.jobs.store import JobStore, iter_records, read_job
from benchflow.jobs.views import metrics_record
from benchflow.kernel.storage import NO_REDACTION, dumps, read_json, write_json


@pytest.mark.parametrize(
    "tail", [b'{"schema_version": 1, "task_na', b"\0" * 512, b'{"a": 1}\0\0', b"\xff\xfe{"]
)
def test_a_cut_last_line_is_set_aside_and_nothing_is_glued_to_it(
    tmp_path, make_result, write_job_folder, tail
):
    """C32"""
    folder = write_job_folder(tmp_path / "job", [make_result("a"), make_result("b", 0.0)])
    with (folder / "results.jsonl").open("ab") as handle:
        handle.write(tail)
    store = JobStore(folder, NO_REDACTION)
    store.repair()
    later = make_result("c", 0.5)
    store.append(later)
    store.close()
    assert [record["task_name"] for record in iter_records(folder)] == ["a", "b", "c"]
    assert (folder / "results.jsonl").read_bytes().count(b"\n") == len(
        (folder / "results.jsonl").read_text().splitlines()
    )


def test_without_a_newline_the_next_line_still_starts_afresh(tmp_path, make_result, write_job_folder):
    """C32"""
    folder = write_job_folder(tmp_path / "job", [make_result("a")])
    path = folder / "results.jsonl"
    path.write_bytes(path.read_bytes().rstrip(b"\n"))
    store = JobStore(folder, NO_REDACTION)
    store.append(make_result("b"))
    store.close()
    assert [record["task_name"] for record in iter_records(folder)] == ["a", "b"]


def test_a_result_that_a_crash_kept_out_of_the_list_is_found(tmp_path, make_result, write_job_folder):
    folder = write_job_folder(tmp_path / "job", [make_result("a"), make_result("b")])
    path = folder / "results.jsonl"
    path.write_bytes(path.read_bytes().splitlines(keepends=True)[0])
    assert [result.task_name for result in load_rollouts(folder)] == ["a", "b"]
    store = JobStore(folder, NO_REDACTION)
    assert store.repair() == ["1 result(s) were written but not listed"]
    store.close()
    assert [record["task_name"] for record in iter_records(folder)] == ["a", "b"]


def test_the_last_line_of_a_rollout_counts(tmp_path, make_result, write_job_folder):
    folder = write_job_folder(tmp_path / "job", [make_result("a", None)])
    store = JobStore(folder, NO_REDACTION)
    store.append(make_result("a", 1.0))
    store.close()
    assert load_job(folder).rewards == [1.0]


def test_a_null_reward_in_an_object_is_no_reward(tmp_path, make_result, write_job_folder):
    """C12: two attempts at one task, one of them with ``{"reward": null, …}``."""
    folder = write_job_folder(tmp_path / "job", [make_result("a", 0.5), make_result("a", None, trial=2)])
    record = read_json(folder / "a__00000002" / "result.json")
    record |= {"outcome": "unscored", "rewards": {"reward": None, "rubric": [1, 2]}}
    write_json(folder / "a__00000002" / "result.json", record)
    lines = (folder / "results.jsonl").read_bytes().splitlines()[:1]
    (folder / "results.jsonl").write_bytes(b"\n".join([*lines, dumps(record), b""]))
    job = load_job(folder)
    assert job.rewards == [0.5, None]
    summary = metrics_record(folder)
    assert (summary["mean_reward"], summary["unscored"], summary["pass_at_k"]) == (
        0.5,
        1,
        {"1": 0.0, "2": None},
    )


def test_jobs_are_found_at_any_depth(tmp_path, make_result, write_job_folder):
    for trial in (1, 2):
        write_job_folder(tmp_path / "mini" / f"trial-0{trial}" / "job", [make_result("a", trial=trial)])
    (tmp_path / "summary.json").write_text("{}")
    job = load_job(tmp_path)
    assert [result.trial for result in job.rollouts] == [1, 2]
    assert all(result.rollout_path.endswith(result.rollout_name) for result in job.rollouts)


def test_one_rollout_can_be_loaded(tmp_path, make_result, write_job_folder):
    folder = write_job_folder(tmp_path / "job", [make_result("a", 0.5)])
    assert load_job(folder / "a__00000001").rewards == [0.5]


@pytest.mark.parametrize("where", ["missing", "empty"])
def test_nothing_to_load_is_said(tmp_path, where):
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match=r"no such folder|no job under"):
        load_job(tmp_path / where)


def test_a_newer_record_is_refused(tmp_path, make_result, write_job_folder):
    folder = write_job_folder(tmp_path / "job", [make_result("a", schema_version=99)])
    with pytest.raises(UsageError, match="upgrade benchflow"):
        load_job(folder)


def test_earlier_attempts_are_kept_inside_the_one_that_counts(tmp_path):
    rollout = tmp_path / "hello__12345678"
    for number in (1, 2, 3):
        rollout.mkdir(exist_ok=True)
        (rollout / "result.json").write_text(str(number))
        assert set_aside(rollout) == number
    kept = {path.parent.name: path.read_text() for path in rollout.glob("attempts/*/result.json")}
    assert kept == {"1": "1", "2": "2", "3": "3"}
    assert [entry.name for entry in tmp_path.iterdir()] == ["hello__12345678"]


def test_a_move_that_was_killed_half_way_is_finished(tmp_path):
    (tmp_path / ".hello__1.attempt").mkdir()
    (tmp_path / ".hello__1.attempt" / "result.json").write_text("1")
    assert set_aside(tmp_path / "hello__1") == 1
    assert (tmp_path / "hello__1" / "attempts" / "1" / "result.json").read_text() == "1"


def test_nothing_is_moved_when_nothing_ran(tmp_path):
    assert set_aside(tmp_path / "hello__1") == 0
    assert not (tmp_path / "hello__1").exists()


@pytest.mark.parametrize(
    "record",
    [
        [],
        {"rollouts": 5},
        {"rollouts": [{"name": "x"}]},
        {"config": []},
        {"rollouts": [], "settings": "none"},
    ],
)
def test_a_foreign_job_record_is_refused_in_one_line(tmp_path, record):
    write_json(tmp_path / "job.json", record)
    with pytest.raises(UsageError, match="is not a job record"):
        read_job(tmp_path)


@pytest.mark.parametrize(
    "fields",
    [{"task_name": 5}, {"agent": {}}, {"rewards": {"reward": "high"}}, {"rewards": {"reward": True}}],
)
def test_a_foreign_result_is_no_result(tmp_path, make_result, write_job_folder, fields):
    folder = write_job_folder(tmp_path / "job", [make_result("a"), make_result("b")])
    foreign = {**make_result("a").model_dump(), **fields}
    write_json(folder / "a__00000001" / "result.json", foreign)
    write_json(folder / "b__00000001" / "result.json", make_result("b").model_dump())
    (folder / "results.jsonl").unlink()
    assert [result.task_name for result in load_job(folder.parent / "job" / "b__00000001").rollouts] == ["b"]
    (folder / "results.jsonl").write_bytes(dumps(foreign) + b"\n")
    assert [result.task_name for result in load_job(folder).rollouts] == ["b"]
