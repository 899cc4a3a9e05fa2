"""The rollout tree: append-only, saved and read back whole."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchflow.kernel.tree import NodeReward, SnapshotRef, Step, Tree

STEP = Step("agent", 0, "main", "end_turn", 2, "2026-01-01T00:00:00.000+00:00", 1.5)


@st.composite
def trees(draw):
    tree = Tree.rooted()
    for _ in range(draw(st.integers(0, 25))):
        parent = draw(st.sampled_from(sorted(tree.nodes)))
        tree.add(parent, STEP, label=draw(st.none() | st.text(max_size=5)))
    for node in draw(st.lists(st.sampled_from(sorted(tree.nodes)), max_size=4)):
        tree.add_snapshot(SnapshotRef(node, "sandbox", "sha256:0"))
        tree.add_reward(NodeReward(node, draw(st.none() | st.floats(0, 1)), "verifier"))
    return tree


@given(trees())
def test_a_tree_survives_its_record(tree):
    assert Tree.parse(tree.record()) == tree


@given(trees())
def test_paths_leaves_and_subtrees_agree(tree):
    assert {node.id for node in tree.subtree(tree.root.id)} == set(tree.nodes)
    for leaf in tree.leaves():
        path = tree.path(leaf.id)
        assert path[0] == tree.root and path[-1] == leaf
        for above, below in pairwise(path):
            assert below in tree.children(above.id)
            assert below in list(tree.subtree(above.id))


@given(trees())
def test_the_next_id_is_the_one_given(tree):
    expected = tree.next_id()
    assert tree.add(tree.root.id, STEP).id == expected


def test_a_linear_rollout_is_a_degree_one_tree():
    tree = Tree.rooted()
    at = tree.root.id
    for _ in range(3):
        at = tree.add(at, STEP).id
    assert [node.id for node in tree.path(at)] == ["n0", "n1", "n2", "n3"]
    assert [leaf.id for leaf in tree.leaves()] == [at]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda r: r.update(schema_version=2), "newer"),
        (lambda r: r["nodes"].append({"id": "n9", "parent": "n8", "step": None}), "before its parent"),
        (lambda r: r["nodes"].append({"id": "n9", "parent": None, "step": None}), "second root"),
        (lambda r: r["nodes"].append(dict(r["nodes"][1])), "twice"),
    ],
)
def test_a_broken_record_is_refused(change, words):
    tree = Tree.rooted()
    tree.add("n0", STEP)
    record = tree.record()
    change(record)
    with pytest.raises(ValueError, match=words):
        Tree.parse(record)


def test_a_step_needs_an_existing_parent():
    with pytest.raises(KeyError):
        Tree.rooted().add("n7", STEP)
