from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchflow.kernel.names import rollout_slug

LEGAL = re.compile(r"[a-z0-9][a-z0-9_.-]*")


@pytest.mark.parametrize("name", ["hello", "half-life", "x_y", "task.v2", "a"])
def test_plain_names_are_kept(name):
    assert rollout_slug(name) == name


@pytest.mark.parametrize(
    "names",
    [
        ("x/y", "x_y", "x-y", "X/Y"),
        ("Task", "task", "TASK"),
        ("a.", "a", "a..", ".a"),
        ("n" * 200, "n" * 201, "n" * 80),
        ("..", ".", "", "/", "\0"),
        ("é", "e\N{COMBINING ACUTE ACCENT}"),
    ],
)
def test_names_that_could_meet_stay_apart(names):
    """C34"""
    assert len({rollout_slug(name) for name in names}) == len(names)


@given(st.lists(st.text(max_size=90) | st.text("ab/_-.A0", max_size=12), unique=True, max_size=20))
def test_slugs_are_legal_and_distinct(names):
    slugs = [rollout_slug(name) for name in names]
    assert len(set(slugs)) == len(names)
    for slug in slugs:
        assert LEGAL.fullmatch(slug) and len(slug) <= 80
        assert ".." not in slug and not slug.endswith(".")


@given(st.text(max_size=40))
def test_the_slug_of_one_name_is_never_the_plain_name_of_another(name):
    slug = rollout_slug(name)
    assert slug == name or rollout_slug(slug) != slug
