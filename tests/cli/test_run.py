"""``bench run`` and ``bench eval`` on real tasks: what is printed, returned and written."""

from __future__ import annotations

import base64
import json
import shlex
import shutil
from pathlib import Path
from urllib.parse import quote

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
    nobody = {"DOCKER_HOST": "unix:///no/such/docker.sock"}
    done = bench("run", examples / "hello", "-a", "oracle", env=nobody)
    assert done.returncode == 0, done.stderr
    assert next(line for line in done.stderr.splitlines() if "sandbox local" in line).startswith(
        "no docker engine: there is no /no/such/docker.sock"
    )


def test_a_model_that_does_not_exist_is_told_before_images_are_asked_for(bench, examples, tmp_path):
    task = shutil.copytree(examples / "hello", tmp_path / "hello")
    text = (task / "task.md").read_text()
    (task / "task.md").write_text(text.replace("    local_base: host\n", ""))
    done = bench("run", task, "-a", "mini", "-m", "scripted/none.yaml", "--sandbox", "local")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "no scripted policy at none.yaml" in done.stderr and not (tmp_path / "jobs").exists()


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


KEYS = {
    "OPENAI": "sk-" + "proj-Zx9Yw8Vu7Ts6Rq5Po4Nm3",
    "ANTHROPIC": "sk-" + "ant-api03-Ab1Cd2Ef3Gh4Ij5Kl6Mn7Op8",
    "GOOGLE": "AIza" + "SyA1b2C3d4E5f6G7h8I9j0KaLbMcNdOePf",
    "AMAZON": "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY",
    "DAYTONA": "dtn_" + "0123456789abcdef0123456789abcdef",
    "GITHUB": "ghp_" + "0123456789abcdefghijABCDEFGHIJ012345",
    "AZURE": 'q"uo\\te/+pl us0123456789',
    "PASSPHRASE": "correct horse battery staple",
}
LEAK = """
import base64, json, os, sys, urllib.parse
for name in {names}:
    value = os.environ[name]
    both = base64.b64encode(value.encode()).decode(), base64.b64encode(b"u:" + value.encode()).decode()
    print(value, *both, "https://u:" + urllib.parse.quote(value, safe="") + "@h/", sep="\\n")
    print(json.dumps([value]), json.dumps(json.dumps([value])))
    print(value, file=sys.stderr)
    sys.stdout.write(value[:9]); sys.stdout.flush(); print(value[9:])
"""


def forms(value: str) -> list[str]:
    """What must not be found: the value as each encoding spells it, without borrowed edges."""
    encoded = [base64.b64encode(before + value.encode()).decode() for before in (b"", b"u:")]
    return [value, json.dumps(value)[1:-1], quote(value, safe=""), encoded[0][:-4], encoded[1][4:-4]]


@pytest.mark.parametrize("agent", ["mini", "scripted"])
def test_keys_of_eight_vendors_are_in_no_file_and_no_line(bench, examples, tmp_path, agent):
    """C54: raw, in pieces, in base64, URLs and JSON, in files, rows, errors and on the terminal."""
    (tmp_path / "leak.py").write_text(LEAK.format(names=list(KEYS)))
    command = f"env; python3 -c {shlex.quote((tmp_path / 'leak.py').read_text())}"
    if agent == "mini":
        turns = [{"say": "Looking.", "run": command}, {"say": "Done."}]
        (tmp_path / "policy.yaml").write_text(json.dumps({"model": "leaky", "turns": turns}))
        options = ["-m", "scripted/policy.yaml"]
    else:
        cut = [{"say": part} for key in KEYS.values() for part in (key[:7], key[7:])]
        fail = {"fail": {"code": -32603, "message": " ".join(["bad keys", *KEYS.values()])}}
        (tmp_path / "script.yaml").write_text(json.dumps({"actions": [{"run": command}, *cut, fail]}))
        options = ["--agent-env", "BENCHFLOW_SCRIPT=script.yaml"]
    options += [word for name in KEYS for word in ("--agent-env", name)]
    done = bench("run", examples / "hello", "-a", agent, "--sandbox", "local", *options, env=KEYS)
    assert done.returncode == (agent == "scripted"), done.stderr
    assert bench("train", "convert", "jobs", "--out", "rows.jsonl").returncode == 0
    texts = {"terminal": done.stdout + done.stderr, "rows": (tmp_path / "rows.jsonl").read_text()}
    for path in (tmp_path / "jobs").rglob("*"):
        if path.is_file():
            texts[path.name] = path.read_text()
    leaks = [
        (name, where) for name in KEYS for where in texts for f in forms(KEYS[name]) if f in texts[where]
    ]
    assert leaks == []
    events = [json.loads(line) for line in texts["acp_trajectory.jsonl"].splitlines()]
    said = "".join(e["update"]["content"]["text"] for e in events if e["kind"] == "agent_message")
    assert not [name for name in KEYS if KEYS[name] in said]
    assert (
        "[REDACTED]" in texts["acp_trajectory.jsonl"] and "OPENAI=[REDACTED]" in texts["acp_trajectory.jsonl"]
    )


@pytest.mark.parametrize(
    ("local_base", "code", "said"),
    [
        (None, 3, "no base for the image 'nobody/has-this:1'"),
        ("foo", 2, "local base 'foo' is neither"),
    ],
)
def test_a_base_that_is_not_here_is_said_before_any_folder(bench, tmp_path, local_base, code, said):
    task = tmp_path / "task"
    for name, text in {
        "task.md": "---\nverifier: {timeout_sec: 5}\n---\nDo it.\n",
        "environment/Dockerfile": "FROM nobody/has-this:1\n",
        "verifier/test.sh": "#!/bin/sh\n",
        "oracle/solve.sh": "#!/bin/sh\n",
    }.items():
        (task / name).parent.mkdir(parents=True, exist_ok=True)
        (task / name).write_text(text)
    flags = ("--local-base", local_base) if local_base else ()
    done = bench("run", task, "-a", "oracle", "--sandbox", "local", *flags)
    assert done.returncode == code
    assert said in done.stderr and len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "jobs").exists()
