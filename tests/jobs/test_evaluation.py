"""Whole jobs in the local sandbox: layout, records, resume, retries, budgets, gates."""

from __future__ import annotations

import asyncio
import json
import shutil
from dataclasses import replace

import pytest

from benchflow.contracts.errors import OwnedElsewhereError, PrerequisiteError, UsageError
from benchflow.jobs.config import RetryConfig
from benchflow.jobs.load import load_job
from benchflow.jobs.lock import LOCK_NAME
from benchflow.jobs.progress import Reporter
from benchflow.kernel.ownership import Owner
from benchflow.kernel.storage import read_json, read_lines


class Notes(Reporter):
    def __init__(self) -> None:
        self.notes: list[str] = []
        self.ran: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)

    def finished(self, job, planned, result) -> None:
        self.ran.append(planned.task)


async def test_a_job_leaves_the_records_of_the_design(make_task, evaluate, tmp_path):
    make_task("one"), make_task("two", solve="true")
    ended = await evaluate(concurrency=2)
    assert (ended.exit_code, ended.passed, ended.failed, ended.mean_reward) == (0, 1, 1, 0.5)
    (folder,) = ended.jobs
    assert folder.parent == tmp_path / "jobs"
    job = read_json(folder / "job.json")
    assert {item["name"] for item in job["rollouts"]} == {r.rollout_name for r in ended.rollouts}
    assert job["versions"]["benchflow"] and job["host"]["cpus"] and job["settings"]["sandbox"] == "local"
    lines = list(read_lines(folder / "results.jsonl"))
    for line in lines:
        rollout = folder / line["rollout_name"]
        assert read_json(rollout / "result.json") == line
        assert (rollout / "config.json").is_file() and (rollout / "timing.json").is_file()
        assert line["identity"] and line["group_id"].startswith("group-")
    summary = read_json(folder / "summary.json")
    assert summary["final"] and summary["total"] == len(lines) == 2
    assert read_json(tmp_path / "jobs" / "summary.json")["mean_reward"] == 0.5
    assert not (folder / LOCK_NAME).exists()


async def test_trials_are_jobs_of_their_own_with_one_group_per_task(make_task, evaluate, tmp_path):
    make_task("one"), make_task("two")
    ended = await evaluate(trials=3, concurrency=4)
    names = {folder.name for folder in ended.jobs}
    assert [folder.parent for folder in ended.jobs] == [
        tmp_path / "jobs" / "oracle" / f"trial-{n:02d}" for n in (1, 2, 3)
    ]
    assert len(names) == 1
    groups = {(result.task_name, result.group_id) for result in ended.rollouts}
    assert len(groups) == 2
    assert ended.summary.pass_at_k == {"1": 1.0, "2": 1.0, "3": 1.0}
    for folder in ended.jobs:
        assert read_json(folder / "summary.json")["total"] == 2
        assert (folder / "job.json").is_file() and (folder / "results.jsonl").is_file()


async def test_the_same_command_again_runs_nothing(make_task, evaluate):
    make_task("one")
    first = await evaluate()
    notes = Notes()
    again = await evaluate(reporter=notes)
    assert (again.jobs, notes.ran, again.mean_reward) == (first.jobs, [], 1.0)
    assert any("1 finished, 0 to run" in note for note in notes.notes)


async def test_what_was_not_started_is_run_by_the_next_command(make_task, evaluate):
    make_task("one"), make_task("two"), make_task("three")
    first = await evaluate(max_rollouts=1, concurrency=1)
    assert (first.stopped, first.exit_code) == ("--max-rollouts 1 reached", 0)
    assert (first.summary.total, first.summary.cancelled, first.passed) == (3, 2, 1)
    notes = Notes()
    again = await evaluate(reporter=notes)
    assert (again.jobs, again.passed, len(notes.ran)) == (first.jobs, 3, 2)
    assert sum("never finished" in note for note in notes.notes) == 2


async def test_infrastructure_failures_run_again_and_earned_zeros_do_not(make_task, evaluate):
    """C28: the earlier attempt stays as evidence; one rollout has one result."""
    make_task("broken", test="exit 3"), make_task("zero", solve="true")
    first = await evaluate(max_retries=0)
    assert (first.exit_code, first.summary.verifier_errored, first.failed) == (1, 1, 1)
    notes = Notes()
    again = await evaluate(max_retries=0, reporter=notes)
    assert (again.jobs, notes.ran) == (first.jobs, ["broken"])
    assert any("ended unscored (verifier_failed)" in note for note in notes.notes)
    (broken,) = [r for r in load_job(again.jobs[0]).rollouts if r.task_name == "broken"]
    assert broken.retries == 1
    kept = again.jobs[0] / broken.rollout_name / "attempts" / "1" / "result.json"
    assert read_json(kept)["verifier_error_category"] == "verifier_failed"
    assert again.summary.total == 2


async def test_the_rollouts_own_result_decides_whether_it_is_finished(make_task, evaluate):
    """C28: one whose result was spoiled later, and one whose folder was deleted, run again."""
    make_task("gone"), make_task("kept"), make_task("spoiled")
    first = await evaluate()
    folders = {r.task_name: first.jobs[0] / r.rollout_name for r in first.rollouts}
    shutil.rmtree(folders["gone"])
    spoiled = read_json(folders["spoiled"] / "result.json")
    spoiled |= {"rewards": None, "verifier_error": "reset", "verifier_error_category": "transport"}
    (folders["spoiled"] / "result.json").write_text(json.dumps(spoiled))
    notes = Notes()
    again = await evaluate(reporter=notes)
    assert (again.jobs, sorted(notes.ran), again.passed) == (first.jobs, ["gone", "spoiled"], 3)
    assert any("ended unscored (transport)" in note for note in notes.notes)


async def test_what_a_silent_agent_told_of_its_usage_is_kept(make_task, evaluate, tmp_path):
    """C46: known counts stay with a tag, unknown ones are null, and the rollout is scored."""
    script = tmp_path / "script.yaml"
    script.write_text("actions: [{usage: {used: 500, size: 1000}}, {hang: true}]")
    task = make_task("one")
    ended = await evaluate(
        task, agent="scripted", agent_env={"BENCHFLOW_SCRIPT": str(script)}, agent_timeout=1.0
    )
    (result,) = ended.rollouts
    assert (result.error_category, result.reward) == ("timeout", 0.0)
    told = result.agent_result
    assert (told.usage_source, told.usage_details) == ("agent_partial", {"context_tokens": 500})
    assert (told.n_input_tokens, told.n_output_tokens, told.total_tokens) == (None, None, None)


async def test_attempts_are_bounded_and_recorded(make_task, evaluate):
    task = make_task("broken", test="exit 3")
    ended = await evaluate(task, retry=RetryConfig(max_retries=2, min_wait_sec=0))
    (result,) = ended.rollouts
    assert (result.retries, result.reward) == (2, None)
    attempts = ended.jobs[0] / result.rollout_name / "attempts"
    assert sorted(entry.name for entry in attempts.iterdir()) == ["1", "2"]


async def test_a_failing_build_is_one_tasks_fault(make_task, evaluate):
    """C26: never cached as a success, and the others go on."""
    make_task("bad", build="RUN exit 7"), make_task("good")
    for _ in range(2):
        ended = await evaluate(max_retries=0)
        outcome = {result.task_name: result.error_category or result.outcome for result in ended.rollouts}
        assert outcome == {"bad": "image_build", "good": "passed"}


async def test_one_task_twice_at_the_same_time(make_task, evaluate):
    """C26: two jobs of the same task never share a folder or a sandbox."""
    make_task("one")
    first, second = await asyncio.gather(evaluate(), evaluate())
    assert first.jobs != second.jobs
    assert first.passed == second.passed == 1


async def test_a_job_owned_by_a_live_process_is_refused(make_task, evaluate):
    make_task("one")
    first = await evaluate()
    other = replace(Owner.current(), pid=1, host="another-host")
    (first.jobs[0] / LOCK_NAME).write_text(json.dumps(other.record()))
    before = sorted(first.jobs[0].rglob("*"))
    with pytest.raises(OwnedElsewhereError, match="owned by pid 1 on another-host"):
        await evaluate()
    assert sorted(first.jobs[0].rglob("*")) == before


@pytest.mark.parametrize(
    ("gate", "code"),
    [
        ({"fail_under": 0.6}, 4),
        ({"fail_under": 0.5}, 0),
        ({"fail_on": ["failed"]}, 4),
        ({"fail_on": ["errored", "cancelled"]}, 0),
    ],
)
async def test_gates(make_task, evaluate, gate, code):
    make_task("one"), make_task("two", solve="true")
    assert (await evaluate(**gate)).exit_code == code


async def test_a_refusing_endpoint_is_found_before_anything_is_written(make_task, evaluate, tmp_path):
    task = make_task("one")
    with pytest.raises(PrerequisiteError, match=r"127\.0\.0\.1:1"):
        await evaluate(task, agent="mini", model="vllm/m", policy_url="http://127.0.0.1:1/v1")
    assert not (tmp_path / "jobs").exists()


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"agent": "mini"}, "needs a model"),
        ({"include": ["nothing-*"]}, "--include nothing-\\* matches no task"),
        ({"exclude": ["*"]}, "no task"),
        ({"sandbox": "frob"}, "unknown sandbox 'frob'"),
        ({"agent_env": {"X": "${NOT_SET_ANYWHERE}"}}, "NOT_SET_ANYWHERE"),
    ],
)
async def test_a_wrong_request_is_refused_before_anything_is_written(
    make_task, evaluate, tmp_path, fields, said
):
    make_task("one")
    with pytest.raises(UsageError, match=said):
        await evaluate(**fields)
    assert not (tmp_path / "jobs").exists()


async def test_tasks_are_chosen_by_name(make_task, evaluate):
    make_task("ant"), make_task("bee"), make_task("bear")
    ended = await evaluate(include=["b*"], exclude=["bear"])
    assert [result.task_name for result in ended.rollouts] == ["bee"]


async def test_two_tasks_of_one_name_are_refused(make_task, evaluate, tmp_path):
    task = make_task("one")
    other = tmp_path / "elsewhere" / "one"
    other.parent.mkdir()
    task.rename(other)
    with pytest.raises(UsageError, match="two tasks are named 'one'"):
        await evaluate(make_task("one"), other)


async def test_cancelling_leaves_true_records_and_can_be_continued(make_task, evaluate):
    """C22: from Python, too: the caller sees the cancellation, the files say cancelled."""
    make_task("slow", solve="while :; do sleep 1; done")
    entered = asyncio.Event()

    class Watch(Reporter):
        def event(self, event) -> None:
            if event.phase == "agent":
                entered.set()

    job = asyncio.create_task(evaluate(reporter=Watch()))
    await entered.wait()
    job.cancel()
    with pytest.raises(asyncio.CancelledError):
        await job
    import benchflow as bf

    root = make_task("slow").parents[1] / "jobs"
    (result,) = bf.load_job(root).rollouts
    assert (result.outcome, result.reward, result.attribution.verdict) == ("cancelled", None, "mask")
    (summary,) = [read_json(path) for path in root.glob("*/summary.json")]
    assert (summary["final"], summary["cancelled"], summary["total"]) == (True, 1, 1)
