"""Every command and program on a page runs, in order, in a fresh folder.

A ``bash`` block is run line by line as a user would type it; a ``python`` block is run as a
program. ``sh`` blocks hold what a test cannot repeat (installing) and may only use make, git
and pip; ``text`` and data blocks are shown, not run. A line ending in ``# exit N`` must exit with N.
A page in ``NEEDS`` needs a sandbox that ``bench doctor`` finds usable.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NEEDS = {"docker": "docker"}
SHOWN = {"text", "json", "yaml", "toml", "dockerfile", "markdown", "jsonl"}


def blocks(page: Path):
    return BLOCK.findall(page.read_text())


def run(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "BENCHFLOW_HOME": str(folder / ".state")}
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=300)


def expected_exit(script: str) -> int:
    found = re.search(r"# exit (\d+)\s*$", script)
    return int(found[1]) if found else 0


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_what_a_page_shows_runs(page, tmp_path, require):
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    if sandbox := NEEDS.get(page.stem):
        asked = run([sys.executable, "-m", "benchflow.cli.main", "doctor", "--sandbox", sandbox], tmp_path)
        require(asked.returncode == 0, asked.stdout)
    for language, body in blocks(page):
        if language == "bash":
            for statement in re.split(r"(?<!\\)\n(?=\S)", body.strip()):
                done = run(["bash", "-c", statement], tmp_path)
                said = f"{statement}\n{done.stdout}\n{done.stderr}"
                assert done.returncode == expected_exit(statement), said
        elif language == "python":
            done = run([sys.executable, "-W", "error", "-c", body], tmp_path)
            assert done.returncode == 0, f"{body}\n{done.stdout}\n{done.stderr}"
        elif language == "sh":
            words = {line.split()[0] for line in body.splitlines() if line and not line.startswith("#")}
            assert words <= {"make", "git", "pip", "cd", "apt-get"}, f"move to a bash block: {words}"
        else:
            assert language in SHOWN, f"{page.name}: a {language} block is neither run nor known"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_between_pages_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#\s]+)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
