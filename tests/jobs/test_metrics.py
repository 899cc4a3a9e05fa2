"""Numbers of a job: null is not zero, order does not matter, too few is unknown."""

from __future__ import annotations

import itertools
import math
import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchflow.jobs.metrics import (
    clustered_interval,
    pass_at_k,
    pass_hat_k,
    pass_tables,
    row_of,
    scored,
    summarise,
    t_quantile,
)

NAN = float("nan")


def summary_of(rows, **more):
    wanted = {"job_name": "j", "agent": "mini", "model": None, "sandbox": "local"}
    return summarise(rows, **wanted, concurrency=1, elapsed_sec=0.0, **more)


def test_an_unscored_rollout_is_not_averaged_as_zero(make_result):
    """C12"""
    summary = summary_of([row_of(make_result(reward=None)), row_of(make_result(reward=0.5, trial=2))])
    assert (summary.mean_reward, summary.errored, summary.failed) == (0.5, 1, 1)


@pytest.mark.parametrize(
    ("rewards", "k", "expected"), [([NAN, 1, 0], 2, 1.0), ([0, NAN], 2, None), ([], 1, None)]
)
def test_pass_at_k_is_the_same_in_every_order(make_result, rewards, k, expected):
    """C14: NaN counts as unscored, and too few scored attempts are unknown, not 1.0."""
    for order in itertools.permutations(rewards):
        rows = [row_of(make_result(reward=reward, trial=n)) for n, reward in enumerate(order, 1)]
        at, _ = pass_tables(rows)
        several = pass_at_k(len(scored(rows)), sum(row.kind == "passed" for row in scored(rows)), k)
        assert several == expected
        assert at.get("4") is None


def test_a_task_with_too_few_scored_rollouts_makes_that_k_unknown(make_result):
    rows = [row_of(make_result("a", 1.0, trial=n)) for n in (1, 2)]
    rows += [row_of(make_result("b", reward, trial=n)) for n, reward in ((1, 1.0), (2, None))]
    at, hat = pass_tables(rows)
    assert at == {"1": 1.0, "2": None}
    assert hat == {"1": 1.0, "2": None}


@given(st.integers(1, 9), st.data())
def test_pass_at_k_equals_counting_every_draw(n, data):
    passed = data.draw(st.integers(0, n))
    k = data.draw(st.integers(1, n))
    draws = list(itertools.combinations([True] * passed + [False] * (n - passed), k))
    assert math.isclose(pass_at_k(n, passed, k), sum(any(d) for d in draws) / len(draws))
    assert math.isclose(pass_hat_k(n, passed, k), sum(all(d) for d in draws) / len(draws))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.sampled_from([None, 0.0, 0.25, 1.0, NAN]), min_size=1, max_size=12), st.randoms())
def test_the_six_counts_add_up_and_order_does_not_matter(make_result, rewards, rng: random.Random):
    rows = [row_of(make_result(reward=reward, trial=trial)) for trial, reward in enumerate(rewards, 1)]
    first = summary_of(rows, never_started=3, final=True)
    rng.shuffle(rows)
    assert summary_of(rows, never_started=3, final=True) == first
    kinds = ("passed", "failed", "errored", "verifier_errored", "unscored", "cancelled")
    assert sum(getattr(first, kind) for kind in kinds) == first.total == len(rows) + 3


@pytest.mark.parametrize(
    ("freedom", "expected"), [(1, 12.706), (2, 4.303), (3, 3.182), (4, 2.776), (10, 2.228), (200, 1.972)]
)
def test_t_quantiles_match_the_printed_tables(freedom, expected):
    assert t_quantile(0.975, freedom) == pytest.approx(expected, rel=6e-3)


def test_repeats_of_one_task_do_not_narrow_the_interval(make_result):
    """Ten copies of each task's result carry no more information than one."""
    once = [
        row_of(make_result(task, reward)) for task, reward in (("a", 0.0), ("b", 1.0), ("c", 1.0), ("d", 0.0))
    ]
    many = [row for row in once for _ in range(10)]
    assert clustered_interval(many).low == pytest.approx(clustered_interval(once).low)
    assert clustered_interval(once).method == "t, clustered by task"


def test_one_rollout_has_no_interval(make_result):
    assert clustered_interval([row_of(make_result())]) is None


def test_verifier_faults_count_apart_from_the_agents(make_result):
    rows = [
        row_of(make_result(reward=None, verifier_error="x", verifier_error_category="reward_file")),
        row_of(make_result(reward=None, error="y", error_category="agent_crash", trial=2)),
        row_of(make_result(reward=0.0, error="z", error_category="timeout", trial=3)),
    ]
    summary = summary_of(rows)
    assert (summary.verifier_errored, summary.errored, summary.failed) == (1, 1, 1)
    assert summary.error_categories == {"agent_crash": 1, "reward_file": 1}
    assert summary.mask_rate == {"hello": pytest.approx(2 / 3)}


def test_tokens_that_nobody_counted_stay_unknown(make_result):
    summary = summary_of([row_of(make_result())])
    assert summary.total_input_tokens is None
    assert summary.total_cost_usd is None
    assert summary.usage_coverage == 0.0
