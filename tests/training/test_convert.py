"""``bench train convert``: rows, group blocks, printed lines and manifests."""

from __future__ import annotations

import orjson
import pytest

from benchflow.contracts.errors import UsageError
from benchflow.training.convert import convert, make_options
from benchflow.training.records import ChatRow, Manifest, TokenRow, VerifiersRow
from benchflow.training.validate import validate

BY = "task,agent,model"


def run(jobs, out="rows.jsonl", manifest=None, **options):
    target = jobs.root.parent / out
    report = convert(jobs.root, target, make_options(**options), manifest)
    return report, [orjson.loads(line) for line in target.read_bytes().splitlines()]


def test_prints_the_two_lines_and_writes_the_group_block(jobs):
    for trial in range(1, 5):
        jobs.rollout(1.0, trial=trial, model=None, agent="opencode", group_id=None)
    report, rows = run(jobs, advantage="grpo", group_by=BY)
    assert report.lines() == [
        f"Converted 4 row(s) from 4 rollout(s) -> {jobs.root.parent / 'rows.jsonl'}",
        "Groups (grpo, by task,agent,model): 1; 0 unscored rollout(s) left out of every baseline.",
    ]
    assert report.notes() == []
    assert [row["advantage"] for row in rows] == [0.0] * 4
    assert rows[0]["group"] == {
        "id": "task=half-life|agent=opencode|model=null",
        "normalisation": "grpo",
        "formula": "advantage = (reward - mean) / (std + eps); "
        "mean and sample std (ddof 1) over the scored rollouts of the group",
        "rollouts": 4,
        "scored": 4,
        "mean": 1.0,
        "std": 0.0,
        "eps": 0.0001,
        "by": ["task", "agent", "model"],
        "key": {"task": "half-life", "agent": "opencode", "model": None},
        "std_ddof": 1,
    }


def test_a_chat_row_holds_the_whole_conversation(jobs):
    folder = jobs.rollout(0.5)
    _, [row] = run(jobs)
    assert [message["role"] for message in row["messages"]] == [
        "system",
        "user",
        "assistant",
        "tool",
        "assistant",
    ]
    assert row["messages"][2]["tool_calls"][0]["function"]["arguments"] == '{"command": "ls"}'
    assert row["tools"][0]["function"]["name"] == "bash"
    assert row["source"] == {"rollout_path": str(folder), "call_index": 1}
    assert row["token_usage"]["total_tokens"] == 14
    assert (row["reward"], row["trial"], row["rollout"]) == (0.5, 1, folder.name)
    assert "group" not in row and "advantage" not in row
    ChatRow.model_validate(row)


def test_plain_rows_leave_out_errors_and_a_group_keeps_them(jobs, tmp_path):
    jobs.rollout(0.0, trial=1, error="timeout")
    jobs.rollout(1.0, trial=2)
    jobs.rollout(0.0, trial=3, error="timeout")
    plain, rows = run(jobs, manifest=tmp_path / "stats.json")
    assert [row["reward"] for row in rows] == [1.0]
    stats = orjson.loads((tmp_path / "stats.json").read_bytes())
    assert (stats["rows_written"], stats["skipped_terminal_error"]) == (1, 2)
    assert plain.lines()[0].startswith("Converted 1 row(s) from 3 rollout(s)")

    _, rows = run(jobs, advantage="grpo")
    assert [round(row["advantage"], 3) for row in rows] == [-0.577, 1.155, -0.577]
    assert [row["group"].get("error") for row in rows] == ["timeout", None, "timeout"]
    assert rows[0]["group"]["id"] == "group-1"


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        ({"reward": None, "outcome": "unscored"}, "unscored member (no reward)"),
        ({"reward": None, "mask": "sandbox_lost", "error": "sandbox_lost"}, "(sandbox_lost)"),
        ({"reward": 1.0, "mask": "agent_crash", "error": "agent_crash"}, "(agent_crash)"),
        ({"reward": 1.0, "calls": []}, "never reached the model"),
        ({"finish": False}, "result missing"),
    ],
)
def test_a_spoiled_member_withholds_its_group_and_no_other(jobs, tmp_path, spoil, reason):
    """C12 among them: a null reward is never a number."""
    jobs.rollout(1.0, trial=1)
    jobs.rollout(0.0, trial=2)
    spoiled = jobs.rollout(trial=3, **spoil)
    jobs.rollout(1.0, trial=1, task="other", group_id="group-2")
    jobs.rollout(0.0, trial=2, task="other", group_id="group-2")
    report, rows = run(jobs, advantage="grpo", manifest=tmp_path / "m.json")
    assert {row["task"] for row in rows} == {"other"}
    [note] = [note for note in report.notes() if note.startswith("withheld")]
    assert note.startswith("withheld group-1") and reason in note and spoiled.name in note
    groups = {group["id"]: group for group in orjson.loads((tmp_path / "m.json").read_bytes())["groups"]}
    assert reason in groups["group-1"]["withheld"]
    assert "withheld" not in groups["group-2"]
    assert [m.get("excluded") is not None for m in groups["group-1"]["members"]] == [False, False, True]


def test_every_call_failed_counts_as_never_reached(jobs, call):
    failed = [call(0, [{"role": "user", "content": "hi"}], None, status=500)]
    jobs.rollout(0.0, trial=1, calls=failed)
    jobs.rollout(1.0, trial=2)
    report, rows = run(jobs, advantage="loo")
    assert rows == [] and "never reached the model" in report.notes()[0]


def test_agents_without_a_model_have_nothing_to_reach(jobs):
    jobs.rollout(1.0, trial=1, agent="oracle", model=None, calls=[])
    jobs.rollout(0.0, trial=2, agent="oracle", model=None, calls=[])
    report, rows = run(jobs, advantage="grpo")
    assert report.groups[0].withheld is None
    assert rows == [] and report.skipped["no_trajectory"] == 2


@pytest.mark.parametrize("fields", [{"agent": {}}, {"task_name": 5}, {"rewards": [1]}])
def test_a_foreign_result_is_a_missing_member(jobs, fields):
    jobs.rollout(1.0, trial=1)
    result = jobs.rollout(1.0, trial=2) / "result.json"
    result.write_bytes(orjson.dumps({**orjson.loads(result.read_bytes()), **fields}))
    report, rows = run(jobs, advantage="grpo")
    assert rows == [] and len(report.notes()) == 2
    report, rows = run(jobs)
    assert len(rows) == 1 and report.skipped["no_result"] == 1


@pytest.mark.parametrize("plan", [5, [5], {"a": 1}, [{"name": None}]])
def test_a_foreign_plan_plans_nothing(jobs, plan):
    folder = jobs.rollout(1.0)
    (folder.parent / "job.json").write_bytes(orjson.dumps({"rollouts": plan}))
    assert len(run(jobs, advantage="grpo")[1]) == 1


def test_a_cut_result_is_a_missing_member(jobs):
    jobs.rollout(1.0, trial=1)
    folder = jobs.rollout(1.0, trial=2)
    result = folder / "result.json"
    result.write_bytes(result.read_bytes()[:100])
    report, rows = run(jobs, advantage="grpo")
    assert rows == [] and "result cut short" in report.notes()[0]
    report, rows = run(jobs)
    assert len(rows) == 1 and report.skipped["no_result"] == 1


def test_a_planned_rollout_that_never_started_is_a_member(jobs):
    folder = jobs.rollout(1.0, trial=1)
    plan = [
        {"name": folder.name, "task": "half-life", "group_id": "group-1", "trial": 1},
        {"name": "half-life__0000beef", "task": "half-life", "group_id": "group-1", "trial": 1},
    ]
    record = {"schema_version": 1, "job_name": "job", "agent": "mini", "model": "m", "rollouts": plan}
    (folder.parent / "job.json").write_bytes(orjson.dumps(record))
    report, rows = run(jobs, advantage="grpo")
    assert rows == [] and report.groups[0].withheld == "result missing: half-life__0000beef"
    assert "1 unscored rollout(s)" in report.lines()[1]


def test_min_reward_takes_rows_but_no_baseline(jobs):
    for trial, reward in enumerate((0.0, 1.0, 0.0), 1):
        jobs.rollout(reward, trial=trial)
    report, rows = run(jobs, advantage="grpo", min_reward=0.5)
    assert [round(row["advantage"], 3) for row in rows] == [1.155]
    assert rows[0]["group"]["scored"] == 3 and report.skipped["reward"] == 2


def test_groups_without_variance_are_dropped_on_request(jobs):
    for trial in (1, 2):
        jobs.rollout(0.1, trial=trial)
        jobs.rollout(float(trial - 1), trial=trial, task="other", group_id="group-2")
    report, rows = run(jobs, advantage="grpo", drop_zero_variance=True)
    assert {row["task"] for row in rows} == {"other"}
    assert report.manifest()["zero_variance_groups"] == 1
    _, rows = run(jobs, advantage="grpo")
    assert [row["advantage"] for row in rows if row["task"] == "half-life"] == [0.0, 0.0]


def test_keys_split_what_they_name(jobs):
    jobs.rollout(1.0, trial=1, policy_version={"first": "v1", "last": "v1"})
    jobs.rollout(0.0, trial=2, policy_version={"first": "v1", "last": "v2"})
    report, _ = run(jobs, advantage="grpo", group_by="task,policy_version")
    assert [group.id for group in report.groups] == [
        "task=half-life|policy_version=v1",
        "task=half-life|policy_version=v1..v2",
    ]
    report, _ = run(jobs, advantage="grpo")
    assert len(report.groups) == 1


def test_the_job_key_tells_repeats_of_one_command_apart(jobs):
    jobs.rollout(1.0, trial=1)
    jobs.rollout(0.0, trial=2)
    report, _ = run(jobs, advantage="grpo", group_by="task,job")
    assert [group.id for group in report.groups] == [
        "task=half-life|job=trial-01/job",
        "task=half-life|job=trial-02/job",
    ]


def test_a_format_of_ones_own_is_named_by_its_path(jobs, tmp_path, monkeypatch):
    (tmp_path / "my_rows.py").write_text(
        "def rows(source):\n    return [{'reward': source.rollout.score, 'calls': len(source.calls)}]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    jobs.rollout(0.5)
    _, rows = run(jobs, format="my_rows:rows")
    assert rows == [{"reward": 0.5, "calls": 2}]


def test_a_result_made_elsewhere_needs_only_rewards(jobs):
    folder = jobs.rollout(1.0)
    (folder / "result.json").write_bytes(orjson.dumps({"task_name": "half-life", "rewards": {"reward": 0.5}}))
    _, [row] = run(jobs)
    assert row["reward"] == 0.5


def test_rollouts_that_no_plan_grouped_stand_alone(jobs):
    jobs.rollout(1.0, group_id=None)
    jobs.rollout(0.0, group_id=None)
    report, rows = run(jobs, advantage="grpo")
    assert len(report.groups) == 2 and [row["advantage"] for row in rows] == [None, None]


def test_sub_agents_and_helpers_are_not_the_conversation(jobs, conversation_calls, call):
    aside = [{"role": "user", "content": "Write a title."}]
    calls = [
        *conversation_calls(),
        call(2, aside, {"role": "assistant", "content": "Title"}, purpose="title"),
        call(3, aside, {"role": "assistant", "content": "Sub"}, purpose="subagent"),
        call(4, aside, None, status=503),
    ]
    jobs.rollout(1.0, calls=calls)
    _, [row] = run(jobs)
    assert row["messages"][-1]["content"] == "Done."


@pytest.mark.parametrize(
    ("calls", "reason"),
    [
        ([], "no_trajectory"),
        ([(None, 500)], "provider_error"),
        ([({"role": "assistant", "content": ""}, 200)], "no_assistant"),
    ],
)
def test_what_has_no_answer_is_skipped_by_name(jobs, call, calls, reason):
    asked = [{"role": "user", "content": "hi"}]
    jobs.rollout(1.0, calls=[call(i, asked, reply, status=status) for i, (reply, status) in enumerate(calls)])
    report, rows = run(jobs)
    assert rows == [] and report.skipped == {reason: 1}


def test_tokens_rows_carry_segments_and_drift(jobs, tmp_path):
    jobs.rollout(1.0, trial=1)
    jobs.rollout(0.0, trial=2)
    _, rows = run(jobs, format="tokens", advantage="grpo", manifest=tmp_path / "m.json")
    assert len(rows) == 2
    for row in rows:
        TokenRow.model_validate(row)
        assert row["prompt_ids"] == [1, 2, 3]
        assert row["completion_ids"] == [4, 5, 6, 7, 8, 9]
        assert row["action_mask"] == [1, 1, 0, 0, 1, 1]
        assert row["loss_normaliser"] == 4
    assert Manifest.model_validate_json((tmp_path / "m.json").read_bytes()).drift == {
        "clean": 2,
        "realigned": 0,
        "forked": 0,
        "tokens_lost": 0,
    }


def test_verifiers_rows_split_prompt_and_completion(jobs):
    jobs.rollout(0.25, trial=1)
    jobs.rollout(0.25, trial=2)
    _, rows = run(jobs, format="verifiers")
    row = VerifiersRow.model_validate(rows[0])
    assert [message.role for message in row.prompt] == ["system", "user"]
    assert [message.role for message in row.completion] == ["assistant", "tool", "assistant"]
    assert row.metrics == {"reward": 0.25, "n_tool_calls": 1.0}
    assert (row.is_completed, row.is_truncated) == (True, False)
    assert rows[0]["example_id"] == rows[1]["example_id"]


@pytest.mark.parametrize(
    ("finish", "changes", "completed", "truncated"),
    [
        ("length", {}, True, True),
        ("stop", {"stop_reason": "max_tokens"}, True, True),
        ("stop", {"error": "context_limit"}, True, True),
        ("stop", {"stop_reason": "end_turn"}, True, False),
        ("stop", {"error": "agent_crash"}, False, False),
    ],
)
def test_truncation_is_told_apart_from_failure(jobs, call, finish, changes, completed, truncated):
    """C52: a cut answer is not an error, a finished episode near the window is not cut."""
    asked = [{"role": "user", "content": "hi"}]
    answer = {"role": "assistant", "content": "x"}
    jobs.rollout(0.5, calls=[call(0, asked, answer, finish=finish)], trial=1, **changes)
    jobs.rollout(1.0, trial=2)
    _, rows = run(jobs, format="verifiers", advantage="loo")
    assert (rows[0]["is_completed"], rows[0]["is_truncated"]) == (completed, truncated)
    assert rows[0]["reward"] == 0.5


def test_a_cut_last_line_of_calls_costs_only_that_call(jobs):
    """C32, C50: what was written before the crash is read."""
    folder = jobs.rollout(1.0)
    path = folder / "trajectory" / "llm_trajectory.jsonl"
    data = path.read_bytes()
    path.write_bytes(data[: len(data) - 40] + b"\0" * 16)
    _, [row] = run(jobs)
    assert row["source"]["call_index"] == 0 and row["messages"][-1]["tool_calls"]


def test_what_was_masked_stays_masked(jobs, call):
    """C54: rows come from redacted files and bring nothing back."""
    asked = [{"role": "user", "content": "my key is [REDACTED]"}]
    jobs.rollout(1.0, calls=[call(0, asked, {"role": "assistant", "content": "[REDACTED]"})])
    _, [row] = run(jobs)
    assert row["messages"][0]["content"] == "my key is [REDACTED]"


def test_any_level_of_the_folder_can_be_named(jobs):
    one = jobs.rollout(1.0, trial=1)
    jobs.rollout(0.0, trial=2)
    for path, expected in ((jobs.root, 2), (jobs.root.parent, 2), (one.parent, 1), (one, 1)):
        report = convert(path, jobs.root.parent / "out" / "rows.jsonl", make_options())
        assert report.rows_written == expected


def test_an_earlier_file_survives_a_failed_conversion(jobs, tmp_path):
    jobs.rollout(1.0)
    out = tmp_path / "rows.jsonl"
    out.write_text("earlier\n")
    folder = jobs.rollout(1.0)
    (folder / "result.json").write_bytes(b'{"schema_version": 99, "outcome": "passed"}')
    with pytest.raises(UsageError, match="schema_version 99"):
        convert(jobs.root, out, make_options())
    assert out.read_text() == "earlier\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["jobs", "rows.jsonl"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"advantage": "ppo"}, "grpo, loo"),
        ({"advantage": "grpo", "group_by": "task,colour"}, "unknown key 'colour'"),
        ({"group_by": "task"}, "--group-advantage"),
        ({"format": "parquet"}, "chat, tokens, verifiers"),
    ],
)
def test_wrong_options_are_one_clear_error(jobs, options, message):
    jobs.rollout(1.0)
    with pytest.raises(UsageError) as caught:
        run(jobs, **options)
    assert message in str(caught.value)


def test_paths_without_rollouts_are_refused(tmp_path):
    with pytest.raises(UsageError, match="does not exist"):
        convert(tmp_path / "nowhere", tmp_path / "o", make_options())
    with pytest.raises(UsageError, match="no rollout"):
        convert(tmp_path, tmp_path / "o", make_options())


@pytest.mark.parametrize("format", ["chat", "verifiers", "tokens"])
def test_every_format_passes_its_own_check(jobs, format):
    jobs.rollout(1.0, trial=1)
    jobs.rollout(0.0, trial=2)
    out = jobs.root.parent / "rows.jsonl"
    convert(jobs.root, out, make_options(format=format, advantage="loo"))
    check = validate(out)
    assert (check.ok, check.format, check.rows) == (True, format, 2), check.errors
