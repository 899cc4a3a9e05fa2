"""``bench train`` on a group that ``bench run`` made: the loop of the first page of the docs."""

from __future__ import annotations

import json
from pathlib import Path

ROOT = Path(__file__).parents[2]
BY = "task,agent,model"


def test_a_group_becomes_rows_and_a_stream(bench, examples, tmp_path):
    env = {"BENCHFLOW_HOME": str(tmp_path / "home")}
    policy = f"scripted/{ROOT / 'examples' / 'policies' / 'half-life.yaml'}"
    asked = ["-a", "mini", "-m", policy, "--sandbox", "local", "--trials", 4, "-j", 4]
    ran = bench("run", examples / "half-life", *asked, "--jobs-dir", "jobs/group", env=env)
    assert ran.returncode == 0, ran.stderr

    group = ["--group-advantage", "grpo", "--group-by", BY]
    out = ["--out", "train/group.jsonl", "--manifest", "stats.json"]
    converted = bench("train", "convert", "jobs/group/mini", *out, *group)
    assert converted.stdout.splitlines() == [
        "Converted 4 row(s) from 4 rollout(s) -> train/group.jsonl",
        f"Groups (grpo, by {BY}): 1; 0 unscored rollout(s) left out of every baseline.",
    ]
    rows = [json.loads(line) for line in (tmp_path / "train" / "group.jsonl").read_text().splitlines()]
    assert rows[0]["group"]["id"] == f"task=half-life|agent=mini|model={policy}"
    assert json.loads((tmp_path / "stats.json").read_text())["rows_written"] == 4

    checked = bench("train", "validate", "train/group.jsonl", "--require-tool-calls")
    assert checked.stdout == '{"ok": true, "rows": 4, "rows_with_tool_calls": 4}\n'

    for follow in ("--no-follow", "--follow"):
        streamed = bench("train", "stream", "jobs/group/mini", follow, "--group-size", 4, "--group-by", BY)
        records = [json.loads(line) for line in streamed.stdout.splitlines()]
        assert streamed.returncode == 0 and [r["finished_at"] for r in records] == sorted(
            r["finished_at"] for r in records
        )
        assert {r["rollout"]: (r["reward"], r["advantage"]) for r in records} == {
            row["rollout"]: (row["reward"], row["advantage"]) for row in rows
        }

    tokens = bench("train", "convert", "jobs/group/mini", "--out", "t.jsonl", "--format", "tokens", "--json")
    stats = json.loads(tokens.stdout)
    assert stats["rows_written"] == 4 and stats["drift"]["forked"] == 0
    assert all(r["token_capture"]["training_grade"] for r in records)
    assert len(list(tmp_path.glob("jobs/group/mini/trial-*/*/half-life__*/trainer/verifiers.jsonl"))) == 4
