"""What hardening removes and restores, from two inventories."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchflow.contracts.task import VerifierPlan
from benchflow.rewards.hardening import plan_undo
from benchflow.rewards.inventory import UNREAD, Found, Inventory, leaves

VERIFIER = VerifierPlan(Path("verifier"), "/verifier", "/verifier/test.sh")


def files(**entries: bytes | str | Found) -> Inventory:
    """``files(**{path: content, or a link's target after "->"})`` below /app."""
    found: dict[str, Found] = {}
    for path, entry in entries.items():
        if isinstance(entry, str):
            entry = Found(link=entry.removeprefix("->"))
        found[f"/app/{path}"] = entry if isinstance(entry, Found) else Found(entry)
    return Inventory(found)


def undo(before: Inventory, after: Inventory, **options):
    return plan_undo(before, after, "/app", options.pop("verifier", VERIFIER), **options)


@pytest.mark.parametrize(
    "path",
    [
        "conftest.py",
        "a/b/conftest.py",
        "pytest.ini",
        ".pytest.ini",
        "sitecustomize.py",
        "usercustomize.cpython-311-x86_64-linux-gnu.so",
        "venv/lib/python3.11/site-packages/x.pth",
    ],
)
def test_new_hooks_go(path):
    assert undo(Inventory(), files(**{path: b"x"})).remove == (f"/app/{path}",)


@pytest.mark.parametrize(
    ("path", "content"),
    [
        ("Makefile", b"all:"),
        ("pyproject.toml", b"[tool.pytest.ini_options]"),
        ("setup.cfg", b"[metadata]"),
        ("tox.ini", b"[flake8]"),
        ("x-1.0.dist-info/entry_points.txt", b"[console_scripts]"),
    ],
)
def test_new_work_stays(path, content):
    assert undo(Inventory(), files(**{path: content})).remove == ()


@pytest.mark.parametrize(
    ("path", "content"),
    [
        ("setup.cfg", b"[tool:pytest]"),
        ("tox.ini", b"[pytest]"),
        ("x-1.0.dist-info/entry_points.txt", b"[pytest11]\nx = x\n"),
        ("setup.cfg", UNREAD),
        ("entry_points.txt", UNREAD),
    ],
)
def test_new_pytest_configuration_goes(path, content):
    assert undo(Inventory(), files(**{path: content})).remove == (f"/app/{path}",)


@pytest.mark.parametrize("path", ["Makefile", "setup.py", "conftest.py", "sub/pyproject.toml"])
def test_changed_configuration_gets_its_old_content_back(path):
    plan = undo(files(**{path: b"old"}), files(**{path: b"new"}))
    assert plan.restore == {f"/app/{path}": Found(b"old")}
    plan = undo(files(**{path: b"old"}), files(**{path: "->/tmp/evil"}))
    assert plan.remove == (f"/app/{path}",) and plan.restore == {f"/app/{path}": Found(b"old")}
    plan = undo(files(**{path: b"old"}), Inventory())
    assert plan.revive == {f"/app/{path}": Found(b"old")}


def test_what_did_not_change_is_left_alone():
    same = files(**{"conftest.py": b"x", "venv/bin/python": "->/opt/python", "big/conftest.py": UNREAD})
    plan = undo(same, same)
    assert (plan.remove, plan.restore, plan.revive) == ((), {}, {})


def test_conftests_stay_when_the_task_says_so():
    kept = VerifierPlan(Path("verifier"), "/verifier", "x", cleanup_conftests=False)
    plan = undo(
        files(**{"conftest.py": b"old"}), files(**{"conftest.py": b"new", "pytest.ini": b""}), verifier=kept
    )
    assert plan.remove == ("/app/pytest.ini",) and not plan.restore


def test_caches_and_startup_packages_go_when_they_are_new():
    before = Inventory(folders=frozenset({"/app/old/__pycache__"}))
    after = Inventory(folders=frozenset({"/app/old/__pycache__", "/app/__pycache__", "/app/sitecustomize"}))
    assert undo(before, after).remove == ("/app/__pycache__", "/app/sitecustomize")
    assert undo(before, after, soft=True).remove == ("/app/sitecustomize",)


def test_between_rounds_only_hooks_are_touched():
    before = files(Makefile=b"old", **{"conftest.py": b"old"})
    after = files(Makefile=b"new", out="->/tmp", **{"conftest.py": b"new", "pytest.ini": b""})
    plan = undo(before, after, soft=True)
    assert plan.remove == ("/app/conftest.py", "/app/pytest.ini")
    assert plan.restore == {"/app/conftest.py": Found(b"old")}


@pytest.mark.parametrize(
    ("links", "gone"),
    [
        ({"a": "b/c"}, False),
        ({"a": "/app/b"}, False),
        ({"a": "../app/b"}, False),
        ({"a": "/usr/bin/python3"}, False),
        ({"a": "a"}, False),
        ({"a": "b", "b": "a"}, False),
        ({"a": "/tmp/x"}, True),
        ({"a": "../x"}, True),
        ({"a": "/verifier/expected.json"}, True),
        ({"a": "/usr/../verifier/x"}, True),
        ({"a": "/application"}, True),
        ({"a": "/"}, True),
        ({"a": "/proc/self/root/verifier"}, True),
        ({"a": "sub/../../etc", "sub": "deep/er"}, False),
        ({"a": "sub/../../../etc", "sub": "deep/er"}, True),
        ({"a": "b/x", "b": "/tmp"}, True),
    ],
)
def test_links_that_leave_the_workspace(links, gone):
    known = {f"/app/{name}": target for name, target in links.items()}
    assert leaves("/app/a", "/app", known) is gone


@given(st.lists(st.sampled_from(["..", ".", "a", "b", "/", "app", "tmp"]), max_size=8))
def test_link_targets_are_followed_like_the_file_system_does(tmp_path_factory, parts):
    """Without other links a target ends where ``normpath`` says."""
    import posixpath

    target = "/".join(parts) or "."
    end = posixpath.normpath(posixpath.join("/app", target))
    assert leaves("/app/link", "/app", {"/app/link": target}) is not f"{end}/".startswith(("/app/", "//app/"))
