"""``bench``: help, version, and errors that are one line with an exit code."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

from benchflow.cli.main import RESOURCES, run


def test_help_names_every_resource(capsys):
    assert run(["--help"]) == 0
    told = capsys.readouterr().out
    assert all(f"  {name}" in told for name in RESOURCES)


def test_help_imports_nothing_heavy():
    code = (
        "import sys; before = set(sys.modules)\nfrom benchflow.cli.main import run\nrun(['--help'])\n"
        "new = {name.partition('.')[0] for name in set(sys.modules) - before}\n"
        "assert not new & {'typer', 'rich', 'pydantic', 'asyncio', 'yaml', 'aiohttp', 'acp'}, new"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_version(capsys):
    assert run(["--version"]) == 0
    assert capsys.readouterr().out.startswith("benchflow ")


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["frobnicate"], "no such command: frobnicate"),
        (["eval", "frobnicate"], "No such command 'frobnicate'"),
        (["run", "--frobnicate"], "--frobnicate"),
        (["run", "tasks", "--skill-mode", "with-skill"], "--skill-mode"),
        (["eval", "create", "--dataset", "x@1"], "--dataset"),
        (["run", "nowhere", "-a", "oracle"], "no such task or folder: nowhere"),
        (["run", "-a", "oracle"], "no task was named"),
        (["run", "nowhere"], "no agent was named"),
        (["run", "nowhere", "-a", "frob"], "unknown agent 'frob'"),
        (["run", "nowhere", "-a", "oracle", "-j", "none"], "--concurrency: input should be"),
        (["run", "nowhere", "-a", "oracle", "--config", "no.yaml"], "no.yaml"),
        (["eval", "list", "nowhere"], "no such folder: nowhere"),
        (["eval", "metrics", "nowhere"], "no such folder: nowhere"),
        (["eval", "resume", "nowhere"], "nowhere is no job"),
        (["tasks", "check"], "see `bench tasks check --help`"),
        (["train", "convert", "nowhere"], "see `bench train convert --help`"),
        (["model", "serve", "nowhere.yaml"], "nowhere.yaml"),
    ],
)
def test_what_a_user_can_fix_is_one_line_and_exit_2(argv, said, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run(argv) == 2
    told = capsys.readouterr()
    assert (told.out, told.err.count("\n")) == ("", 1)
    assert told.err.startswith("error: ") and said in told.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", [["run"], ["eval", "create"], ["eval", "run"]])
def test_every_setting_has_its_flag(command, capsys):
    from benchflow.cli.options import flag_of
    from benchflow.jobs.config import EvaluationConfig

    assert run([*command, "--help"]) == 0
    told = capsys.readouterr().out
    for name in EvaluationConfig.model_fields:
        if name not in ("retry", "tasks"):
            assert flag_of(name) in told, name


@pytest.mark.parametrize("name", RESOURCES)
def test_help_is_plain_and_offers_no_completion_of_half_a_command(name, capsys):
    assert run([name, "--help"]) == 0
    told = capsys.readouterr().out
    assert told.isascii() and "completion" not in told


@pytest.mark.parametrize("name", sorted(RESOURCES.keys() - {"run", "doctor"}))
def test_a_resource_without_a_verb_prints_its_help_and_nothing_else(name, capsys):
    assert run([name]) == 2
    told = capsys.readouterr()
    assert told.out.startswith(f"Usage: bench {name} ") and told.err == ""


def test_what_the_file_system_refuses_is_one_line(bench, examples, tmp_path):
    done = bench("run", examples / "hello", "-a", "oracle", "--sandbox", "local", "--jobs-dir", "/proc/jobs")
    assert (done.returncode, done.stderr.count("\n")) == (1, 1), done.stderr
    assert done.stderr.startswith("error: /proc/jobs: No such file or directory")


def test_a_state_folder_that_cannot_be_made_names_the_variable(bench, examples, tmp_path):
    (tmp_path / "file").touch()
    home = {"BENCHFLOW_HOME": str(tmp_path / "file")}
    done = bench("run", examples / "hello", "-a", "oracle", "--sandbox", "local", env=home)
    assert (done.returncode, done.stderr.count("\n")) == (3, 1), done.stderr
    assert "export BENCHFLOW_HOME=" in done.stderr


def test_a_name_that_is_not_utf8_is_refused_before_anything_is_made(bench, examples, tmp_path):
    odd = os.fsdecode(b"jobs\xff")
    done = bench("run", examples / "hello", "-a", "oracle", "--sandbox", "local", "-o", odd)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "is not UTF-8" in done.stderr and list(tmp_path.iterdir()) == []


def test_a_name_that_the_locale_cannot_show_is_no_traceback(bench, tmp_path):
    job = tmp_path / "jobs" / "j\N{LATIN SMALL LETTER O WITH DIAERESIS}b"
    job.mkdir(parents=True)
    (job / "results.jsonl").touch()
    for env in (
        {"PYTHONIOENCODING": "ascii"},
        {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
    ):
        done = bench("eval", "list", "jobs", env=env)
        assert (done.returncode, done.stderr) == (0, ""), env
        assert len(done.stdout.splitlines()) == 2


def test_a_closed_stdout_is_no_traceback():
    code = (
        "import sys; sys.stdout = None; from benchflow.cli.main import run; sys.exit(run(['agent', 'list']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("argv", [["--help"], ["run", "--help"]])
def test_a_reader_that_leaves_early_sees_no_traceback(argv):
    process = subprocess.Popen(
        [sys.executable, "-m", "benchflow.cli.main", *argv],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout and process.stderr
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait() == 1
    process.stderr.close()


def test_an_unknown_sandbox_is_named(bench, examples):
    done = bench("run", examples / "hello", "-a", "oracle", "--sandbox", "frob")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "unknown sandbox 'frob'" in done.stderr


def test_a_broken_task_names_file_line_and_key(bench, examples, tmp_path):
    task = tmp_path / "tasks" / "broken"
    (task / "environment").mkdir(parents=True)
    (task / "task.md").write_text("---\nschema_version: '1.3'\nagent:\n  timeout_sec: soon\n---\nDo it.\n")
    done = bench("run", tmp_path / "tasks", "-a", "oracle", "--sandbox", "local")
    assert done.returncode == 2
    assert "task.md" in done.stderr and "agent.timeout_sec" in done.stderr and "4" in done.stderr
    assert not (tmp_path / "jobs").exists()


def test_a_dry_run_prints_the_plan_and_writes_nothing(bench, examples, tmp_path):
    done = bench("run", examples, "-a", "oracle", "--sandbox", "local", "--trials", 3, "--dry-run")
    assert done.returncode == 0, done.stderr
    assert "would run 12 rollout(s)" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_counts_what_is_left(bench, examples):
    command = ("run", examples / "hello", "-a", "oracle", "--sandbox", "local")
    assert bench(*command).returncode == 0
    told = bench(*command, "--dry-run").stdout
    assert "1 finished" in told and "would run 0 rollout(s)" in told
    assert "would run 1 rollout(s)" in bench(*command, "--new", "--dry-run").stdout


NO_DAEMON = {"DOCKER_HOST": "unix:///nowhere/docker.sock"}


def test_docker_by_name_never_becomes_another_sandbox(bench, examples):
    done = bench("run", examples / "hello", "-a", "oracle", "--sandbox", "docker", env=NO_DAEMON)
    assert (done.returncode, done.stderr.count("\n")) == (3, 1)
    assert "--sandbox local" in done.stderr


def test_the_default_sandbox_falls_back_only_for_tasks_that_say_so(bench, examples, tmp_path):
    done = bench("run", examples / "hello", "-a", "oracle", "--dry-run", env=NO_DAEMON)
    assert (done.returncode, "sandbox local" in done.stdout) == (0, True), done.stderr
    text = (examples / "hello" / "task.md").read_text().replace("backend: local", "backend: docker")
    task = tmp_path / "tasks" / "other"
    shutil.copytree(examples / "hello", task)
    (task / "task.md").write_text(text)
    done = bench("run", task, "-a", "oracle", "--dry-run", env=NO_DAEMON)
    assert (done.returncode, done.stderr.count("\n")) == (3, 1)
    assert "docker is needed for other" in done.stderr
