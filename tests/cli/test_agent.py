"""``bench agent``, as a user types it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest


@pytest.fixture
def bench():
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        code = "from benchflow.cli.main import main; main()"
        return subprocess.run(
            [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=60
        )

    return run


def test_list_has_one_line_per_agent(bench):
    done = bench("agent", "list")
    assert done.returncode == 0
    header, *lines = done.stdout.splitlines()
    assert header.split()[:2] == ["name", "protocol"]
    assert [line.split()[0] for line in lines] == ["mini", "nop", "opencode", "oracle", "scripted"]


def test_show_says_how_to_use_it(bench):
    done = bench("agent", "show", "scripted")
    assert done.returncode == 0
    assert "session fork  resume" in done.stdout
    assert "BENCHFLOW_SCRIPT=actions.yaml" in done.stdout


def test_remove_takes_the_version_that_is_named(bench, tmp_path, monkeypatch):
    monkeypatch.setenv("BENCHFLOW_BUNDLES", str(tmp_path))
    for version in ("1.0.0", "2.0.0"):
        (tmp_path / f"opencode-{version}-0").mkdir()
        (tmp_path / f"opencode-{version}-0" / "bundle.json").write_text(
            json.dumps({"name": "opencode", "version": version})
        )
    assert bench("agent", "remove", "opencode@1.9.9").stdout == "agent opencode@1.9.9 was not installed\n"
    assert bench("agent", "remove", "opencode@1.0.0").stdout == f"removed {tmp_path}/opencode-1.0.0-0\n"
    assert [path.name for path in tmp_path.iterdir()] == ["opencode-2.0.0-0"]
    assert bench("agent", "remove", "opencode@").returncode == 2
    assert bench("agent", "remove", "opencode").stdout == f"removed {tmp_path}/opencode-2.0.0-0\n"


def test_both_speak_json(bench):
    listed = json.loads(bench("agent", "list", "--json").stdout)
    shown = json.loads(bench("agent", "show", "mini", "--json").stdout)
    assert shown in listed
    assert shown["needs_model"] is True


def test_an_unknown_agent_is_one_line_and_exit_2(bench):
    done = bench("agent", "show", "minni")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.strip().count("\n") == 0
    assert "unknown agent 'minni'" in done.stderr and "mini" in done.stderr
