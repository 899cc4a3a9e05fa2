"""What a user reads while a job runs and when it has ended."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from benchflow.jobs.live import LiveReporter
from benchflow.jobs.progress import PlainReporter
from benchflow.jobs.report import last_line, report


async def test_each_rollout_ends_with_the_last_line_of_its_test(make_task, evaluate):
    task = make_task("half", test="echo reward 0.5: a pass, b fail; echo 0.5 > /logs/verifier/reward.txt")
    lines = list(report(await evaluate(task, trials=2)))
    assert lines[:2] == [f"trial-0{n}  reward 0.5: a pass, b fail" for n in (1, 2)]
    assert lines[2].startswith("mean reward 0.500") and "n=2 of 2" in lines[2]


async def test_a_test_that_prints_something_else_is_told_with_its_reward(make_task, evaluate):
    make_task("one", test="echo all good; echo 1 > /logs/verifier/reward.txt")
    make_task("three", test="echo >&2 no reward; exit 3")
    told = list(report(await evaluate(max_retries=0)))
    assert told[0] == "one    reward 1.0: all good"
    assert told[1].startswith("three  errored: ")
    assert any(
        line.startswith("some rollouts have no score; run them again: bench eval resume ") for line in told
    )


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", ""),
        (b"a\n\n  \n", "a"),
        (b"ok\xe2\x28", "ok\ufffd("),
        (b"x\n" * 99_999 + b"y\x1b[2Jz", "y [2Jz"),
    ],
)
def test_the_last_line_is_safe_to_print(tmp_path, content, expected):
    (tmp_path / "out").write_bytes(content)
    assert last_line(tmp_path / "out") == expected


async def test_plain_progress_is_one_line_per_event(make_task, evaluate):
    make_task("one")
    stream = io.StringIO()
    await evaluate(reporter=PlainReporter(stream))
    lines = stream.getvalue().splitlines()
    assert lines[0].endswith("sandbox local, 1 to run, 4 at once")
    phases = [line.rpartition(": ")[2] for line in lines[1:-1]]
    assert phases == ["image", "start", "agent", "verify"]
    assert lines[-1].startswith("[1/1] one__") and lines[-1].endswith("reward 1")


async def test_a_progress_reader_that_goes_away_does_not_end_the_job(make_task, evaluate):
    make_task("one")

    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    assert (await evaluate(reporter=PlainReporter(Gone()))).passed == 1


async def test_the_live_table_shows_what_runs(make_task, evaluate):
    make_task("one"), make_task("broken", test="exit 3")
    screen = io.StringIO()
    live = LiveReporter(Console(file=screen, force_terminal=True, width=120))
    seen: list[str] = []
    shown = live.event

    def look(event) -> None:
        shown(event)
        console = Console(width=120, file=io.StringIO(), record=True)
        console.print(live.table())
        seen.append(console.export_text())

    live.event = look
    await evaluate(reporter=live, max_retries=0)
    assert any("agent" in text and "phase" in text and "?" in text for text in seen)
    assert "0/2 finished" in seen[0]
    assert "broken" in screen.getvalue() and "verifier ended" in screen.getvalue()
