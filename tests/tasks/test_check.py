from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from benchflow.cli.tasks import app
from benchflow.tasks.check import check_task

CORPUS = Path(__file__).parents[2].parent / "shared" / "corpus" / "tasks"
EXAMPLES = Path(__file__).parents[2] / "examples" / "tasks"
BROKEN = {
    "computer-use-ubuntu": "environment.mcp_servers",
    "computer-use-windows": "environment.mcp_servers",
    "cassandra-nic-split-brain": "environment.nodes",
    "vm-ceph-bootstrap": "environment.nodes",
    "fail-static-gpu-types": "environment.gpus",
}


def test_all_problems_are_listed_with_file_line_and_key(native):
    checked = check_task(
        native("agent:\n  timeout_sec: x\nverifier:\n  tmeout_sec: 3\n", **{"environment/Dockerfile": None})
    )
    assert [str(problem) for problem in checked.problems] == [
        "task.md:3: agent.timeout_sec: must be a number, not 'x'",
        "task.md:5: verifier.tmeout_sec: unknown key; did you mean 'timeout_sec'?",
        "environment/Dockerfile: there is no such file, and no environment.docker_image",
    ]
    assert checked.lines()[0].startswith("broken")


def test_schema_level_reads_the_definition_only(native):
    root = native(**{"environment/Dockerfile": None, "verifier/test.sh": None})
    assert check_task(root, "schema").ok
    assert not check_task(root).ok


def test_check_command(native, tmp_path):
    native(at="good")
    done = CliRunner().invoke(app, ["check", str(tmp_path)])
    assert done.exit_code == 0 and "network: agent open, verifier open" in done.stdout
    native("agents: {roles: {a: {}}}\n", at="bad")
    done = CliRunner().invoke(app, ["check", str(tmp_path), "--json"])
    assert done.exit_code == 1
    bad, good = json.loads(done.stdout)
    assert bad["problems"] == [
        {
            "file": "task.md",
            "line": 2,
            "key": "agents",
            "message": "declaring roles is not supported yet; the run names the agent",
        }
    ]
    assert good["ok"] and good["network"] == {"agent": "open", "verifier": "open"}


def test_digest_command(native, tmp_path):
    root = native(at="one")
    native("name: x\n", at="two")
    single = CliRunner().invoke(app, ["digest", str(root)]).stdout
    assert single.startswith("sha256:") and len(single.split()) == 1
    both = CliRunner().invoke(app, ["digest", str(tmp_path)]).stdout.splitlines()
    assert [line.split()[0] for line in both] == ["one", "two"]
    assert both[0] == f"one {single.strip()}"
    record = json.loads(CliRunner().invoke(app, ["digest", str(root), "--json"]).stdout)
    assert record == [{"name": "one", "digest": single.strip()}]


@pytest.mark.parametrize("example", sorted(path.name for path in EXAMPLES.iterdir()))
def test_examples_are_sound(example):
    checked = check_task(EXAMPLES / example)
    assert checked.ok and not checked.warnings
    assert checked.task is not None
    assert (checked.task.backend, checked.task.network.mode) == ("local", "none")
    assert checked.task.oracle is not None


@pytest.mark.skipif(not CORPUS.is_dir(), reason="the corpus of public task files is not beside the project")
def test_every_public_file_gets_a_verdict(tmp_path):
    verdicts: dict[str, str] = {}
    for file in sorted(CORPUS.iterdir()):
        root = tmp_path / file.stem
        (root / "environment").mkdir(parents=True)
        (root / "environment" / "Dockerfile").write_text("FROM debian:12-slim\n")
        native = file.suffix == ".md"
        tests = root / ("verifier" if native else "tests")
        tests.mkdir()
        (tests / "test.sh").write_text("#!/bin/sh\n")
        shutil.copy(file, root / ("task.md" if native else "task.toml"))
        if not native:
            (root / "instruction.md").write_text("Do it.\n")
        checked = check_task(root)
        assert all(problem.key and problem.line for problem in checked.problems)
        if not checked.ok:
            verdicts[file.stem.rpartition("__")[2]] = " ".join(str(problem) for problem in checked.problems)
    assert verdicts.keys() == BROKEN.keys()
    for name, key in BROKEN.items():
        assert key in verdicts[name]


scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
values = st.recursive(
    scalars, lambda v: st.lists(v, max_size=3) | st.dictionaries(st.text(max_size=6), v, max_size=3)
)
sections = st.sampled_from(["agent", "verifier", "environment", "oracle", "task", "benchflow", "metadata"])
keys = st.sampled_from(
    ["timeout_sec", "env", "user", "network", "network_mode", "memory", "cpus", "path", "hardening"]
)


@given(st.dictionaries(sections, st.dictionaries(keys, values, max_size=4) | values, max_size=4))
@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_value_gets_a_verdict(native, frontmatter):
    root = native(json.dumps(frontmatter) + "\n")
    checked = check_task(root)
    assert checked.ok == (checked.task is not None)


@given(st.text(max_size=60))
@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_text_gets_a_verdict(native, split, text):
    root = native(at="native")
    (root / "task.md").write_text(f"---\n{text}\n---\nDo it.\n", encoding="utf-8", errors="replace")
    check_task(root)
    root = split(at="split")
    (root / "task.toml").write_text(text, encoding="utf-8", errors="replace")
    check_task(root)
