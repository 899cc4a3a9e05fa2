"""``stream_rollouts``: each finished rollout once, groups whole, ends and restarts."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
from contextlib import aclosing

import orjson
import pytest

from benchflow.contracts.errors import JobDiedError, StreamTimeoutError, UsageError
from benchflow.jobs.lock import LOCK_NAME
from benchflow.kernel.ownership import Owner
from benchflow.kernel.storage import LineWriter
from benchflow.training.records import StreamRecord
from benchflow.training.stream import stream_rollouts


async def collect(path, **options):
    return [record async for record in stream_rollouts(path, **options)]


def own(job, owner):
    (job / LOCK_NAME).write_bytes(orjson.dumps(owner.record()))


def dead_owner():
    """A process that has ended, under its true identity."""
    script = (
        "import json; from benchflow.kernel.ownership import Owner; "
        "print(json.dumps(Owner.current().record()))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True)
    return Owner.parse(orjson.loads(done.stdout))


def finish(job):
    """What a job does last: the final summary, then its lock goes."""
    (job / "summary.json").write_bytes(b'{"final": true}')
    (job / LOCK_NAME).unlink(missing_ok=True)


def brief(record):
    advantage = record["advantage"]
    return record["rollout"], record["reward"], None if advantage is None else round(advantage, 3)


async def test_a_finished_group_comes_in_finish_order_with_advantages(jobs):
    folders = [jobs.rollout(reward, trial=trial) for trial, reward in enumerate((0.0, 1.0, 0.0), 1)]
    records = await collect(jobs.root, follow=False, group_size=3, group_by="task,agent,model")
    assert [brief(record) for record in records] == [
        (folders[0].name, 0.0, -0.577),
        (folders[1].name, 1.0, 1.155),
        (folders[2].name, 0.0, -0.577),
    ]
    assert [record["rollout_path"] for record in records] == [str(folder) for folder in folders]
    for record in records:
        StreamRecord.model_validate(record)
        assert record["group_complete"] and record["group"]["rollouts"] == 3
    other = await collect(jobs.root, follow=False, group_size=3, group_advantage="loo")
    assert [brief(record)[2] for record in other] == [-0.5, 1.0, -0.5]


async def test_without_groups_everything_finished_comes_once(jobs):
    jobs.rollout(1.0, finish=False)
    late = jobs.rollout(0.0, finished_at="2026-01-02T00:00:00Z")
    early = jobs.rollout(None, outcome="unscored", finished_at="2026-01-01T00:00:00Z")
    jobs.rollout(None, outcome="cancelled", error="cancelled")
    records = await collect(jobs.root, follow=False, with_segments=False)
    assert [record["rollout"] for record in records] == [early.name, late.name]
    assert [(record["reward"], record["scored"]) for record in records] == [(None, False), (0.0, True)]
    assert records[0]["segments"] is None and records[0]["group"] is None


async def test_segments_and_capture_tell_what_can_be_trained(jobs, call):
    jobs.rollout(1.0)
    asked = [{"role": "user", "content": "hi"}]
    jobs.rollout(1.0, calls=[call(0, asked, {"role": "assistant", "content": "x"})])
    exact, text = await collect(jobs.root, follow=False)
    assert exact["token_capture"] == {
        "status": "complete",
        "training_grade": True,
        "calls": 2,
        "complete_calls": 2,
        "unavailable": {},
    }
    assert exact["segments"][0]["action_mask"] == [1, 1, 0, 0, 1, 1]
    assert text["token_capture"]["status"] == "none" and not text["token_capture"]["training_grade"]
    assert text["token_capture"]["unavailable"]["prompt_token_ids"] == {"not_returned": 1}
    assert text["segments"][0]["kind"] == "text"


async def test_a_spoiled_or_incomplete_group_is_held_back_with_a_reason(jobs):
    jobs.rollout(1.0, trial=1)
    unscored = jobs.rollout(None, trial=2, outcome="unscored")
    jobs.rollout(1.0, trial=1, group_id="group-2")
    notes = []
    assert await collect(jobs.root, follow=False, group_size=2, on_note=notes.append) == []
    assert notes == [
        f"withheld group-1: unscored member (no reward): {unscored.name}",
        "withheld group-2: 1 of 2 members finished",
    ]


async def test_more_rollouts_than_a_group_holds_make_another_group(jobs):
    for trial in range(1, 5):
        jobs.rollout(float(trial % 2), trial=trial)
    records = await collect(jobs.root, follow=False, group_size=2)
    assert [record["group"]["id"] for record in records] == ["group-1"] * 2 + ["group-1|part=2"] * 2


async def test_a_restart_goes_on_after_what_was_taken(jobs, tmp_path):
    folders = [jobs.rollout(float(trial % 2), trial=trial) for trial in range(1, 5)]
    cursor = tmp_path / "state" / "cursor.jsonl"
    async with aclosing(stream_rollouts(jobs.root, follow=False, group_size=4, since=cursor)) as stream:
        first = await anext(stream)
        second = await anext(stream)
    assert [first["rollout"], second["rollout"]] == [folder.name for folder in folders[:2]]
    again = await collect(jobs.root, follow=False, group_size=4, since=cursor)
    assert [record["rollout"] for record in again] == [folder.name for folder in folders[1:]]
    assert again[0]["advantage"] == second["advantage"]
    assert await collect(jobs.root, follow=False, group_size=4, since=cursor) == []


async def test_following_sees_new_lines_and_new_jobs_until_the_end(jobs):
    first = jobs.rollout(1.0, trial=1)
    own(first.parent, Owner.current())
    seen = []
    async with aclosing(stream_rollouts(jobs.root, timeout=60)) as stream:
        seen.append((await anext(stream))["rollout"])
        second = jobs.rollout(0.0, trial=1)
        seen.append((await anext(stream))["rollout"])
        third = jobs.rollout(0.0, trial=2)
        own(third.parent, Owner.current())
        seen.append((await anext(stream))["rollout"])
        finish(third.parent)
        last = jobs.rollout(1.0, trial=1)
        finish(first.parent)
        seen += [record["rollout"] async for record in stream]
    assert seen == [first.name, second.name, third.name, last.name]


async def test_a_line_is_read_once_it_is_whole(jobs):
    folder = jobs.rollout(1.0)
    own(folder.parent, Owner.current())
    results = folder.parent / "results.jsonl"
    data = results.read_bytes()
    results.write_bytes(data[:50])
    async with aclosing(stream_rollouts(jobs.root, timeout=60)) as stream:
        waiting = asyncio.ensure_future(anext(stream))
        with results.open("ab") as handle:
            handle.write(data[50:])
        assert (await waiting)["rollout"] == folder.name


async def test_a_rollout_that_ran_again_completes_its_group(jobs):
    first = jobs.rollout(None, trial=1, mask="sandbox_lost", error="sandbox_lost")
    jobs.rollout(1.0, trial=2)
    job = first.parent
    own(job, Owner.current())
    withheld = asyncio.Event()
    stream = stream_rollouts(jobs.root, group_size=2, on_note=lambda _: withheld.set(), timeout=60)
    async with aclosing(stream):
        waiting = asyncio.ensure_future(anext(stream))
        await withheld.wait()
        jobs.rollout(0.0, trial=1, name=first.name, retries=1)
        record = await waiting
    assert record["rollout"] == first.name and record["retried"] == 1
    assert round(record["advantage"], 3) == -0.707


async def test_a_delivered_rollout_that_ran_again_says_what_it_replaces(jobs, tmp_path):
    cursor = tmp_path / "cursor.jsonl"
    first = jobs.rollout(None, outcome="unscored")
    await collect(jobs.root, follow=False, since=cursor)
    jobs.rollout(1.0, name=first.name, retries=1)
    [record] = await collect(jobs.root, follow=False, since=cursor)
    assert record["replaces"] == f"{first}/attempts/1" and record["reward"] == 1.0


async def test_a_dead_owner_ends_the_stream(jobs):
    folder = jobs.rollout(1.0)
    own(folder.parent, dead_owner())
    stream = stream_rollouts(jobs.root, timeout=60)
    assert (await anext(stream))["rollout"] == folder.name
    with pytest.raises(JobDiedError) as caught:
        await anext(stream)
    assert caught.value.exit_code == 1


async def test_nothing_new_ends_in_a_timeout(jobs):
    folder = jobs.rollout(1.0)
    own(folder.parent, Owner.current())
    with pytest.raises(StreamTimeoutError) as caught:
        await collect(jobs.root, timeout=0.2)
    assert caught.value.exit_code == 3


async def test_a_repaired_file_is_read_again_without_repeats(jobs):
    """C32: a cut tail is moved away and the file replaced while somebody follows it."""
    first = jobs.rollout(1.0)
    job = first.parent
    own(job, Owner.current())
    results = job / "results.jsonl"
    good = results.read_bytes()
    results.write_bytes(good + b'{"rollout_name": "cut')
    async with aclosing(stream_rollouts(jobs.root, timeout=60)) as stream:
        assert (await anext(stream))["rollout"] == first.name
        repaired = job / "repaired"
        repaired.write_bytes(good)
        os.replace(repaired, results)
        second = jobs.rollout(0.0)
        assert (await anext(stream))["rollout"] == second.name


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"group_by": "task"}, "--group-size"),
        ({"group_advantage": "grpo"}, "--group-size"),
        ({"group_size": 0}, "at least 1"),
        ({"group_size": 2, "group_by": "hue"}, "unknown key"),
    ],
)
async def test_options_that_mean_nothing(jobs, options, said):
    jobs.rollout(1.0)
    with pytest.raises(UsageError) as caught:
        await collect(jobs.root, follow=False, **options)
    assert said in str(caught.value)


async def test_a_foreign_cursor_is_refused(jobs, tmp_path):
    jobs.rollout(1.0)
    lines = LineWriter(tmp_path / "rows.jsonl")
    lines.append({"messages": []})
    lines.close()
    with pytest.raises(UsageError, match="not a cursor"):
        await collect(jobs.root, follow=False, since=tmp_path / "rows.jsonl")


async def test_a_file_that_is_no_cursor_is_left_as_it_was(jobs, tmp_path):
    jobs.rollout(1.0)
    notes = tmp_path / "notes.txt"
    notes.write_text("buy milk\n")
    with pytest.raises(UsageError, match="not a cursor"):
        await collect(jobs.root, follow=False, since=notes)
    assert notes.read_text() == "buy milk\n"


async def test_rollouts_outside_of_a_job_are_not_waited_for(jobs):
    folder = jobs.rollout(1.0, list_it=False)
    for path in (jobs.root, folder):
        assert [record["rollout"] for record in await collect(path)] == [folder.name]


async def test_a_removed_folder_ends_the_stream(jobs):
    own(jobs.rollout(1.0).parent, Owner.current())
    stream = stream_rollouts(jobs.root, timeout=60)
    await anext(stream)
    shutil.rmtree(jobs.root)
    with pytest.raises(JobDiedError):
        await anext(stream)
