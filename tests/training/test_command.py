"""``bench train`` on the command line: what is printed where, and exit codes."""

from __future__ import annotations

import json
import subprocess
import sys

import orjson
import pytest

from benchflow.cli.main import run
from benchflow.jobs.lock import LOCK_NAME
from benchflow.kernel.ownership import Owner


@pytest.fixture
def bench(capsys):
    """Runs ``bench train …``; returns the exit code and the lines of stdout and stderr."""

    def call(*args):
        code = run(["train", *map(str, args)])
        said = capsys.readouterr()
        return code, said.out.splitlines(), said.err.splitlines()

    return call


def test_plain_convert_prints_one_line_and_notes_what_it_skipped(bench, jobs, tmp_path):
    jobs.rollout(1.0)
    jobs.rollout(0.0, error="timeout")
    out = tmp_path / "new" / "rows.jsonl"
    code, said, notes = bench("convert", jobs.root, "--out", out)
    assert (code, said) == (0, [f"Converted 1 row(s) from 2 rollout(s) -> {out}"])
    assert notes == ["skipped: terminal_error 1"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["jobs", "new"]


def test_convert_as_json_prints_the_manifest(bench, jobs, tmp_path):
    jobs.rollout(1.0)
    code, said, _ = bench("convert", jobs.root, "--out", tmp_path / "r", "--json", "--group-advantage", "loo")
    manifest = json.loads("\n".join(said))
    assert code == 0 and manifest["groups"][0]["normalisation"] == "loo"


def test_validate_exits_1_and_says_where(bench, tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"messages": []}\n')
    code, said, errors = bench("validate", rows)
    assert code == 1 and json.loads(said[0]) == {"ok": False, "rows": 1, "rows_with_tool_calls": 0}
    assert errors and all(line.startswith("line 1: ") for line in errors)
    code, said, errors = bench("validate", rows, "--json")
    assert json.loads(said[0])["errors"][0]["line"] == 1 and errors == []


@pytest.mark.parametrize(
    "args",
    [
        ("convert", "absent", "--out", "rows.jsonl"),
        ("convert", "{jobs}", "--out", "{jobs}"),
        ("convert", "{jobs}", "--out", "rows.jsonl", "--group-advantage", "ppo"),
        ("convert", "{jobs}", "--out", "rows.jsonl", "--format", "parquet"),
        ("convert", "{jobs}", "--out", "rows.jsonl", "--min-reward", "nan"),
        ("convert", "{jobs}", "--out", "rows.jsonl", "--manifest", "rows.jsonl"),
        ("stream", "absent"),
        ("stream", "{jobs}", "--timeout", "nan"),
        ("stream", "{jobs}", "--timeout", "0"),
        ("stream", "{jobs}", "--no-follow", "--group-by", "task"),
        ("validate", "absent.jsonl"),
    ],
)
def test_mistakes_are_one_line_and_exit_2(bench, jobs, args):
    jobs.rollout(1.0)
    code, said, errors = bench(*(arg.format(jobs=jobs.root) for arg in args))
    assert (code, said) == (2, []) and len(errors) == 1 and errors[0].startswith("error: ")


def test_stream_exit_codes(bench, jobs):
    job = jobs.rollout(1.0).parent
    lock = job / LOCK_NAME
    lock.write_bytes(orjson.dumps(Owner.current().record()))
    code, said, errors = bench("stream", jobs.root, "--timeout", "0.1")
    assert code == 3 and len(said) == len(errors) == 1
    gone = subprocess.Popen([sys.executable, "-c", ""])
    owner = {**Owner.current().record(), "pid": gone.pid}
    gone.wait()
    lock.write_bytes(orjson.dumps(owner))
    code, said, errors = bench("stream", jobs.root)
    assert code == 1 and len(said) == len(errors) == 1
    lock.unlink()
    (job / "summary.json").write_text('{"final": true}')
    code, said, errors = bench("stream", jobs.root)
    assert (code, len(said), errors) == (0, 1, [])


def test_a_stream_without_anything_says_so(bench, tmp_path):
    (tmp_path / "empty").mkdir()
    code, said, errors = bench("stream", tmp_path / "empty", "--no-follow")
    assert (code, said, errors) == (0, [], [f"nothing new under {tmp_path / 'empty'}"])
