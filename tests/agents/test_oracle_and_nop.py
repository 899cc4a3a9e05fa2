"""The ceiling and the floor of a task."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchflow.agents import catalog
from benchflow.contracts.agent import StopReason
from benchflow.contracts.errors import TaskError


@pytest.fixture
def solution(tmp_path: Path):
    """Writes ``solve.sh`` and returns its folder."""

    def write(script: str) -> Path:
        folder = tmp_path / "solution"
        folder.mkdir()
        (folder / "solve.sh").write_text(f"#!/bin/sh\n{script}\n")
        (folder / "data.txt").write_text("from the package\n")
        return folder

    return write


async def test_the_solution_runs_as_root_in_the_workspace_and_is_taken_away(
    sandbox, context, solution, record, tmp_path
):
    folder = solution("id -u; cat $0 >/dev/null && cp /oracle/data.txt got.txt; echo $HINT; echo note >&2")
    made = context(oracle=folder, oracle_env={"HINT": "given"})
    session = await catalog.load("oracle").connect(sandbox, made)
    assert await session.prompt("Solve it.") is StopReason.END_TURN
    assert (await sandbox.exec("cat got.txt", cwd=made.workspace)).out == "from the package\n"
    assert not (await sandbox.exec("ls /oracle")).ok
    assert (tmp_path / "agent/stdout.txt").read_text() == "0\ngiven\n"
    assert (tmp_path / "agent/stderr.txt").read_text() == "note\n"
    assert record.kinds() == ["user_message", "tool_call", "tool_call_update", "turn_end"]
    assert record.last("tool_call_update")["exit_code"] == 0
    assert session.n_tool_calls == 1


async def test_a_solution_that_fails_ends_the_turn_and_shows_why(sandbox, context, solution, record):
    made = context(oracle=solution("printf 'ok\\342\\050\\n'; echo broken >&2; exit 9"))
    session = await catalog.load("oracle").connect(sandbox, made)
    assert await session.prompt("Solve it.") is StopReason.END_TURN
    assert record.last("tool_call_update")["status"] == "failed"
    assert record.last("tool_call_update")["output"] == "ok\ufffd(\n"
    error = record.last("error")["update"]
    assert (error["exit_code"], error["stderr"]) == (9, "broken\n")


async def test_output_that_is_cut_says_so_and_how_long_it_was(sandbox, context, solution, record, tmp_path):
    """C38: 20 MB on each stream; the record stays small."""
    flood = "head -c 20000000 /dev/zero | tr '\\0' x"
    made = context(oracle=solution(f"{flood}; {flood} >&2; echo; echo end"))
    await (await catalog.load("oracle").connect(sandbox, made)).prompt("Solve it.")
    told = record.last("tool_call_update")["output"]
    assert told.startswith("[… the end of 20000005 bytes …]") and told.endswith("\nend\n")
    assert len(told) < 100_000
    for name, size in (("stdout.txt", 20_000_005), ("stderr.txt", 20_000_000)):
        kept = (tmp_path / "agent" / name).read_bytes()
        assert f"of {size} bytes kept".encode() in kept[-100:] and len(kept) < 10_000_000


async def test_secrets_in_its_output_are_masked(sandbox, context, solution, tmp_path):
    made = context(
        oracle=solution("echo key=hunter22"), redact=lambda data: data.replace(b"hunter22", b"***")
    )
    await (await catalog.load("oracle").connect(sandbox, made)).prompt("Solve it.")
    assert (tmp_path / "agent/stdout.txt").read_text() == "key=***\n"


@pytest.mark.parametrize("command", ["./solve.sh now", "/oracle/solve.sh now"])
async def test_a_script_that_lost_its_executable_bit_runs(sandbox, context, solution, record, command):
    made = context(oracle=solution("echo $1"), oracle_command=command)
    await (await catalog.load("oracle").connect(sandbox, made)).prompt("Solve it.")
    assert record.last("tool_call_update")["output"] == "now\n"


async def test_another_command_and_target_are_honoured(sandbox, context, solution, record):
    made = context(
        oracle=solution("exit 1"),
        oracle_target="/solution",
        oracle_command="cat /solution/data.txt > seen.txt",
    )
    await (await catalog.load("oracle").connect(sandbox, made)).prompt("Solve it.")
    assert (await sandbox.exec("cat seen.txt", cwd=made.workspace)).out == "from the package\n"


async def test_a_task_without_a_solution_is_a_task_error(sandbox, context):
    with pytest.raises(TaskError, match="no reference solution"):
        await catalog.load("oracle").connect(sandbox, context())


async def test_nop_ends_its_turn_and_touches_nothing(sandbox, context, record):
    made = context()
    session = await catalog.load("nop").connect(sandbox, made)
    assert await session.prompt("Solve it.") is StopReason.END_TURN
    assert record.kinds() == ["user_message", "turn_end"]
    assert (await sandbox.exec("ls -A", cwd=made.workspace)).out == ""
    assert session.n_tool_calls == 0 and session.usage.input_tokens is None
