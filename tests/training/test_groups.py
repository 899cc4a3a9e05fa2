"""The formulas, by their check values and by properties."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchflow.contracts.errors import UsageError
from benchflow.training.groups import PLANNED, grpo, leave_one_out, parse_by

REWARDS = st.lists(st.none() | st.floats(0, 1), min_size=1, max_size=12)


def rounded(advantages):
    return [None if value is None else round(value, 3) for value in advantages]


@pytest.mark.parametrize(
    ("formula", "rewards", "expected"),
    [
        (grpo, [0.0, 1.0, 0.0], [-0.577, 1.155, -0.577]),
        (grpo, [0.0, None, 1.0, None], [-0.707, None, 0.707, None]),
        (leave_one_out, [0.0, None, 1.0, None], [-1.0, None, 1.0, None]),
        (leave_one_out, [0.0, 1.0, 0.0], [-0.5, 1.0, -0.5]),
        (grpo, [1.0, 1.0, 1.0, 1.0], [0.0, 0.0, 0.0, 0.0]),
        (grpo, [0.7], [None]),
        (leave_one_out, [0.7, None], [None, None]),
    ],
)
def test_check_values(formula, rewards, expected):
    assert rounded(formula(rewards)) == expected


@given(REWARDS)
@pytest.mark.parametrize("formula", [grpo, leave_one_out])
def test_nulls_change_nothing_for_the_others(formula, rewards):
    scored = [reward for reward in rewards if reward is not None]
    kept = [a for a, reward in zip(formula(rewards), rewards, strict=True) if reward is not None]
    assert kept == formula(scored) if scored else kept == []
    assert all(a is None for a, reward in zip(formula(rewards), rewards, strict=True) if reward is None)


@given(st.lists(st.floats(0, 1), min_size=2, max_size=12))
@pytest.mark.parametrize("formula", [grpo, leave_one_out])
def test_advantages_sum_to_nothing_and_keep_the_order(formula, rewards):
    advantages = formula(rewards)
    assert abs(math.fsum(advantages)) < 1e-6
    by_reward = [a for _, a in sorted(zip(rewards, advantages, strict=True))]
    assert all(low <= high + 1e-9 for low, high in itertools.pairwise(by_reward))


@given(st.floats(0, 1), st.integers(2, 9))
def test_equal_rewards_have_exactly_no_advantage(reward, n):
    assert grpo([reward] * n) == leave_one_out([reward] * n) == [0.0] * n


def test_keys_are_read_from_a_list():
    assert parse_by(None) == PLANNED
    assert parse_by("task, agent,model") == parse_by(["task", "agent", "model"]) == ("task", "agent", "model")
    for text in ("", "task,task", "hue"):
        with pytest.raises(UsageError, match="--group-by"):
            parse_by(text)
