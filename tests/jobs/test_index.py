"""The index is a cache: always equal to the files, and rebuilt when they change."""

from __future__ import annotations

import os
import sqlite3

import pytest

from benchflow.jobs.index import INDEX_NAME, Index
from benchflow.jobs.metrics import row_of
from benchflow.jobs.plan import PlannedRollout
from benchflow.jobs.store import JobStore
from benchflow.jobs.views import list_lines, list_records, metrics_lines, metrics_record
from benchflow.kernel.storage import NO_REDACTION, write_json


@pytest.fixture
def jobs(tmp_path, make_result, write_job_folder):
    results = [make_result("a", 1.0), make_result("b", None, error="x", error_category="endpoint")]
    write_job_folder(tmp_path / "jobs" / "first", results)
    write_job_folder(tmp_path / "jobs" / "mini" / "trial-01" / "second", [make_result("a", 0.5, model=None)])
    return tmp_path / "jobs"


def rows(root):
    with Index(root) as index:
        return index.rows()


def test_rows_survive_the_round_trip(jobs, make_result):
    wanted = [
        row_of(make_result("a", 1.0)),
        row_of(make_result("b", None, error="x", error_category="endpoint")),
        row_of(make_result("a", 0.5, model=None)),
    ]
    assert rows(jobs) == rows(jobs) == wanted


def test_a_new_line_a_new_job_and_a_removed_job_are_seen(jobs, make_result, write_job_folder):
    assert len(rows(jobs)) == 3
    store = JobStore(jobs / "first", NO_REDACTION)
    store.append(make_result("c", 0.0))
    store.close()
    assert len(rows(jobs)) == 4
    write_job_folder(jobs / "third", [make_result("d")])
    assert len(rows(jobs)) == 5
    (jobs / "first").rename(jobs.parent / "gone")
    assert sorted(row.task for row in rows(jobs)) == ["a", "d"]


@pytest.mark.parametrize("damage", [b"", b"not a database", b"SQLite format 3\0" + b"\xff" * 4096])
def test_a_damaged_cache_is_made_again(jobs, damage):
    wanted = rows(jobs)
    (jobs / INDEX_NAME).write_bytes(damage)
    assert rows(jobs) == wanted
    assert rows(jobs) == wanted


def test_a_folder_that_cannot_be_written_to_is_read_all_the_same(jobs, monkeypatch):
    wanted = rows(jobs)
    (jobs / INDEX_NAME).unlink()
    (jobs / INDEX_NAME).mkdir()
    assert rows(jobs) == wanted


def test_lists_and_metrics_say_the_same_as_lines_and_as_json(jobs):
    listed = list_records(jobs)
    assert [(job["path"], job["finished"], job["passed"], job["errored"]) for job in listed] == [
        ("first", 2, 1, 1),
        (os.path.join("mini", "trial-01", "second"), 1, 0, 0),
    ]
    assert len(list(list_lines(jobs))) == 3
    record = metrics_record(jobs)
    assert (record["total"], record["errored"], record["mean_reward"]) == (3, 1, 0.75)
    assert [(group["model"], group["mean_reward"]) for group in record["by_agent"]] == [
        (None, 0.5),
        ("vllm/m", 1.0),
    ]
    told = "\n".join(metrics_lines(jobs))
    assert "mini  vllm/m" in told and "endpoint 1" in told and "masked 100% of b" in told


def test_an_empty_folder_has_no_evaluations(tmp_path):
    assert list_records(tmp_path) == []
    assert list(list_lines(tmp_path)) == [f"no evaluation under {tmp_path}"]
    assert metrics_record(tmp_path)["mean_reward"] is None


def test_a_cache_that_cannot_be_brought_up_to_date_is_left_alone(
    jobs, make_result, write_job_folder, monkeypatch
):
    assert len(rows(jobs)) == 3
    before = (jobs / INDEX_NAME).read_bytes()
    write_job_folder(jobs / "third", [make_result("d")])
    connect = sqlite3.connect

    def read_only(path, **options):
        found = str(path) if path == ":memory:" else f"file:{path}?mode=ro"
        return connect(found, uri=True, **options)

    monkeypatch.setattr(sqlite3, "connect", read_only)
    assert len(rows(jobs)) == 4
    assert (jobs / INDEX_NAME).read_bytes() == before


def test_a_folder_without_jobs_is_left_as_it_is(tmp_path):
    (tmp_path / "notes").mkdir()
    assert rows(tmp_path) == []
    assert [path.name for path in tmp_path.iterdir()] == ["notes"]


def test_an_unfinished_job_is_looked_at_again(tmp_path, make_result, write_job_folder):
    """A result that its job never listed completes it; no stamp of the job's own files shows that."""
    folder = write_job_folder(tmp_path / "jobs" / "one", [make_result("a")])
    plan = {name: "" for name in PlannedRollout.__slots__}
    write_json(folder / "job.json", {"rollouts": [plan, plan]})
    assert len(rows(tmp_path / "jobs")) == 1
    late = make_result("b")
    (folder / late.rollout_name).mkdir()
    write_json(folder / late.rollout_name / "result.json", late.model_dump())
    assert len(rows(tmp_path / "jobs")) == 2
