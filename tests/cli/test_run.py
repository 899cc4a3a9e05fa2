"""``bench run`` and ``bench eval`` on real tasks: what is printed, returned and written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_a_run_prints_its_score_and_where_the_files_are(bench, examples, tmp_path):
    done = bench("run", examples / "hello", "-a", "oracle", "--sandbox", "local")
    assert done.returncode == 0, done.stderr
    (job,) = (tmp_path / "jobs").glob("*/job.json")
    lines = done.stdout.splitlines()
    assert lines[0] == "hello  reward 1"
    assert (
        lines[1].startswith("mean reward 1.000") and lines[-1] == f"files: {job.parent.relative_to(tmp_path)}"
    )
    again = bench("run", examples / "hello", "-a", "oracle", "--sandbox", "local")
    assert again.returncode == 0 and "1 finished, 0 to run" in again.stderr
    assert again.stdout == done.stdout


def test_the_default_sandbox_says_when_it_is_local(bench, examples):
    done = bench("run", examples / "hello", "-a", "oracle")
    assert done.returncode == 0, done.stderr
    assert next(line for line in done.stderr.splitlines() if "sandbox local" in line).startswith(
        "no container engine answers"
    )


def test_quiet_prints_nothing(bench, examples):
    done = bench("run", examples / "hello", "-a", "nop", "--sandbox", "local", "-q")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_json_is_the_summary(bench, examples):
    done = bench(
        "eval", "create", "--tasks-dir", examples / "hello", "--agent", "nop", "--sandbox", "local", "--json"
    )
    record = json.loads(done.stdout)
    assert (record["mean_reward"], record["failed"], record["exit_code"]) == (0.0, 1, 0)
    assert len(record["jobs"]) == 1


def test_a_file_of_settings_and_what_is_typed_over_it(bench, examples, tmp_path):
    (tmp_path / "job.yaml").write_text(
        f"tasks_dir: {examples / 'hello'}\nagent: oracle\nenvironment: local\njobs_dir: elsewhere\n"
        "trials: 2\n"
    )
    done = bench("eval", "create", "--config", "job.yaml", "--agent", "nop", "--json")
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    assert (record["agent"], record["total"]) == ("nop", 2)
    assert record["jobs"][0].startswith("elsewhere/nop/trial-01/")


def test_a_gate_that_is_not_met_is_exit_4(bench, examples):
    done = bench("run", examples / "hello", "-a", "nop", "--sandbox", "local", "--fail-under", "0.5")
    assert done.returncode == 4
    assert "gate not met: --fail-under 0.5: the mean reward is 0.0" in done.stdout


def test_a_job_is_continued_listed_and_measured(bench, examples):
    first = bench("run", examples, "-a", "oracle", "--sandbox", "local", "--max-rollouts", "2", "-j", "2")
    assert "stopped: --max-rollouts 2 reached" in first.stdout
    (folder,) = [
        line.removeprefix("files: ") for line in first.stdout.splitlines() if line.startswith("files: ")
    ]
    done = bench("eval", "resume", folder)
    assert done.returncode == 0, done.stderr
    assert "2 finished, 2 to run" in done.stderr
    listed = json.loads(bench("eval", "list", "jobs", "--json").stdout)
    assert [(job["finished"], job["planned"], job["passed"]) for job in listed] == [(4, 4, 4)]
    metrics = json.loads(bench("eval", "metrics", "jobs", "--json").stdout)
    assert (metrics["total"], metrics["mean_reward"], metrics["jobs"]) == (4, 1.0, 1)
    assert "mean reward 1.000" in bench("eval", "metrics", "jobs").stdout


@pytest.fixture
def group(bench, examples, tmp_path):
    policy = ROOT / "examples" / "policies" / "half-life.yaml"

    def run(*options: object):
        return bench(
            *("run", examples / "half-life", "-a", "mini", "-m", f"scripted/{policy}", "--sandbox", "local"),
            *("--trials", 4, "-j", 4, "--jobs-dir", "jobs/group", *options),
        )

    return run


def test_a_group_of_a_scripted_policy_differs_and_repeats(group, bench, tmp_path):
    """The first page's command: four rollouts whose rewards differ, the same on every run."""
    done = group()
    assert done.returncode == 0, done.stderr
    told = [line for line in done.stdout.splitlines() if line.startswith("trial-0")]
    assert len(told) == 4 and len({line.split("  ")[1] for line in told}) > 1
    assert [line for line in group("--new").stdout.splitlines() if line.startswith("trial-0")] == told
    results = [json.loads(path.read_text()) for path in tmp_path.rglob("half-life__*/result.json")]
    assert all(result["token_capture"] == "tokens" for result in results)
    assert len({result["group_id"] for result in results}) == 2
    assert all(path.stat().st_size for path in tmp_path.rglob("half-life__*/trainer/verifiers.jsonl"))


def test_a_secret_given_to_the_agent_is_in_no_file(bench, examples, tmp_path):
    """C54: values given by the user are masked wherever they would be written."""
    secret = "sesame-0penfR0mTheHost"
    (tmp_path / "policy.yaml").write_text(
        "model: leaky\nturns:\n  - {say: Looking., run: 'env; echo $MY_TOKEN | base64'}\n  - {say: Done.}\n"
    )
    done = bench(
        *("run", examples / "hello", "-a", "mini", "-m", "scripted/policy.yaml", "--sandbox", "local"),
        *("--agent-env", "MY_TOKEN", "--agent-env", "LEVEL=high"),
        env={"MY_TOKEN": secret},
    )
    assert done.returncode == 0, done.stderr
    files = [path for path in (tmp_path / "jobs").rglob("*") if path.is_file()]
    assert [path for path in files if secret.encode() in path.read_bytes()] == []
    (job,) = (tmp_path / "jobs").glob("*/job.json")
    assert json.loads(job.read_text())["config"]["agent_env"] == ["LEVEL", "MY_TOKEN"]
    (session,) = (tmp_path / "jobs").rglob("acp_trajectory.jsonl")
    assert b"MY_TOKEN=[REDACTED]" in session.read_bytes() and b"LEVEL=high" in session.read_bytes()
