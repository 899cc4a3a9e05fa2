"""The shape of the house: who may import whom, how large a room may be."""

import ast
import io
import subprocess
import sys
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "src" / "benchflow").rglob("*.py"))


def test_imports_point_one_way():
    run = subprocess.run(
        [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT / "src")))
def test_modules_and_functions_stay_small(path):
    text = path.read_text()
    assert len(text.splitlines()) <= 800, "split this module"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno - node.lineno < 100, f"split {node.name}"


def code_lines(path: Path) -> int:
    """Lines that hold code: neither blank, nor comment, nor docstring."""
    text, kept = path.read_text(), set()
    silent = {
        tokenize.COMMENT,
        tokenize.NL,
        tokenize.NEWLINE,
        tokenize.INDENT,
        tokenize.DEDENT,
        tokenize.ENDMARKER,
    }
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in silent:
            kept.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            kept.difference_update(range(node.lineno, node.end_lineno + 1))
    return len(kept)


def test_the_whole_stays_small():
    """See docs/decisions/0005."""
    assert sum(code_lines(path) for path in SOURCES) <= 23_500


def test_contracts_and_kernel_are_typed_strictly():
    pyright = str(Path(sys.executable).with_name("pyright"))
    run = subprocess.run([pyright, "--pythonpath", sys.executable], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-3000:]


def test_every_public_name_exists():
    import benchflow

    missing = [name for name in benchflow.__all__ if not hasattr(benchflow, name)]
    assert missing == [] and set(dir(benchflow)) == set(benchflow.__all__)


def test_importing_the_package_loads_nothing_heavy():
    heavy = "pydantic,aiohttp,acp,starlette,uvicorn,rich,typer,yaml,orjson,watchfiles"
    code = f"import sys, benchflow; print([m for m in '{heavy}'.split(',') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"
