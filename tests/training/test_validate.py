"""``bench train validate``: what is wrong, where, and nothing about good rows."""

from __future__ import annotations

import orjson
import pytest

from benchflow.contracts.errors import UsageError
from benchflow.training.convert import convert, make_options
from benchflow.training.validate import MAX_ERRORS, validate


@pytest.fixture
def row(jobs, tmp_path):
    jobs.rollout(1.0)
    convert(jobs.root, tmp_path / "good.jsonl", make_options())
    return orjson.loads((tmp_path / "good.jsonl").read_bytes())


@pytest.fixture
def check(tmp_path):
    def run(*rows, **options):
        path = tmp_path / "rows.jsonl"
        path.write_bytes(b"".join(r if isinstance(r, bytes) else orjson.dumps(r) + b"\n" for r in rows))
        return validate(path, **options)

    return run


def test_good_rows_are_ok(check, row):
    result = check(row, row, require_tool_calls=True)
    assert result.headline() == {"ok": True, "rows": 2, "rows_with_tool_calls": 2}


def test_an_empty_file_is_not_ok(check):
    result = check()
    assert result.headline() == {"ok": False, "rows": 0, "rows_with_tool_calls": 0}
    assert result.lines() == ["no rows"]


def test_missing_tool_calls_fail_only_when_required(check, row):
    row["messages"] = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert check(row).ok
    result = check(row, require_tool_calls=True)
    assert result.lines() == ["line 1: no tool calls"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": "a"}]}, "no assistant message"),
        ({"messages": [{"role": "robot", "content": "a"}]}, "messages.0.role"),
        ({"reward": "high"}, "reward"),
        ({"task": None}, "task"),
        ({"group": {"id": "g"}}, "group.normalisation"),
        ({"schema_version": 9}, "schema_version 9"),
    ],
)
def test_broken_rows_are_named_by_line(check, row, change, said):
    result = check(row, {**row, **change})
    assert not result.ok and result.rows == 2
    assert all(line == 2 for line, _ in result.errors) and said in result.lines()[0]


def test_tool_calls_must_fit_together(check, row):
    row["messages"][2]["tool_calls"][0]["function"]["arguments"] = "{broken"
    assert "not JSON" in check(row).lines()[0]
    row["messages"][2].pop("tool_calls")
    assert "never called" in check(row).lines()[0]


def test_lines_that_are_no_rows(check, row):
    result = check(row, b'{"messages": [\n', b"[1]\n", b"\n", row)
    assert [line for line, _ in result.errors] == [2, 3] and result.rows == 4


def test_misaligned_tokens_are_found(jobs, check, tmp_path):
    jobs.rollout(1.0)
    convert(jobs.root, tmp_path / "t.jsonl", make_options(format="tokens"))
    row = orjson.loads((tmp_path / "t.jsonl").read_bytes())
    row["action_mask"].pop()
    assert "action_mask has 5 entries for 6 completion_ids" in check(row).lines()[0]


def test_errors_are_bounded(check):
    result = check(*[b"{\n"] * (MAX_ERRORS + 10))
    assert len(result.errors) == MAX_ERRORS and result.lines()[-1] == "… and 10 more"


def test_unreadable_input_is_the_users_mistake(tmp_path):
    with pytest.raises(UsageError, match="cannot read"):
        validate(tmp_path / "absent.jsonl")
    with pytest.raises(UsageError, match="known: chat"):
        validate(tmp_path / "absent.jsonl", format="parquet")
