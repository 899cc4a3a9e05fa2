"""Statistics of a set of rollouts. Unknown stays null: it is never counted as 0.

Every number here is independent of the order of the rows, and of rewards that are null or
not finite, which count as unscored.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from operator import attrgetter
from statistics import NormalDist
from typing import Any, NamedTuple

from benchflow.contracts.records import Interval, Result, Summary

LEVEL = 0.95


class Row(NamedTuple):
    """What statistics need of one rollout. ``kind`` is one of the six counts of a summary."""

    task: str
    agent: str
    model: str | None
    kind: str
    reward: float | None
    masked: bool
    error: str | None
    tool_calls: int | None
    input_tokens: int | None
    output_tokens: int | None
    cost_usd: float | None
    duration: float


def scored(rows: Iterable[Row]) -> list[Row]:
    """Those that count in means: they have a reward that the policy earned."""
    return [row for row in rows if row.reward is not None and not row.masked]


_TASK, _KIND, _REWARD, _DURATION = map(attrgetter, ("task", "kind", "reward", "duration"))
_REWARDED = attrgetter("task", "reward")
_comb = lru_cache(4096)(math.comb)  # tasks with equally many repeats ask for the same ones


def row_of(result: Result) -> Row:
    return read_row(result.model_dump())


def read_row(record: Mapping[str, Any]) -> Row:
    """A row from the fields of ``result.json``."""
    counts = record.get("agent_result") or {}
    reward = (record.get("rewards") or {}).get("reward")
    if reward is not None and not math.isfinite(reward):
        reward = None
    verifier_error = record.get("verifier_error_category")
    return Row(
        task=record["task_name"],
        agent=record["agent"],
        model=record.get("model"),
        kind=kind_of(record["outcome"], reward, verifier_error),
        reward=reward,
        masked=(record.get("attribution") or {}).get("verdict") == "mask",
        error=record.get("error_category") or verifier_error,
        tool_calls=record.get("n_tool_calls"),
        input_tokens=counts.get("n_input_tokens"),
        output_tokens=counts.get("n_output_tokens"),
        cost_usd=counts.get("cost_usd"),
        duration=(record.get("timing") or {}).get("total") or 0.0,
    )


def kind_of(outcome: str, reward: float | None, verifier_error: str | None) -> str:
    """Which of the six counts of a summary a rollout adds to."""
    if outcome == "cancelled":
        return "cancelled"
    if reward is not None:
        return "passed" if outcome == "passed" else "failed"
    if verifier_error:
        return "verifier_errored"
    return "errored" if outcome == "errored" else "unscored"


def mean(values: Iterable[float]) -> float | None:
    found = list(values)
    return math.fsum(found) / len(found) if found else None


def clustered_interval(rows: Sequence[Row], level: float = LEVEL) -> Interval | None:
    """Confidence interval of the mean reward with tasks as clusters: repeats of one task
    are not independent. With a single task the repeats are all there is, and the interval
    (method ``t``) speaks about that task alone. Null under two independent units."""
    by_task: dict[str, list[float]] = defaultdict(list)
    for task, reward in map(_REWARDED, scored(rows)):
        by_task[task].append(reward)
    rewards = [reward for cluster in by_task.values() for reward in cluster]
    if len(rewards) < 2:
        return None
    centre = math.fsum(rewards) / len(rewards)
    if len(by_task) > 1:
        units = len(by_task)
        sums = [math.fsum(cluster) - centre * len(cluster) for cluster in by_task.values()]
        method = "t, clustered by task"
    else:
        units, sums, method = len(rewards), [reward - centre for reward in rewards], "t"
    error = math.sqrt(math.fsum(value * value for value in sums) * units / (units - 1)) / len(rewards)
    half = t_quantile((1 + level) / 2, units - 1) * error
    low, high = centre - half, centre + half
    if min(rewards) >= 0 and max(rewards) <= 1:
        low, high = max(low, 0.0), min(high, 1.0)
    return Interval(low=low, high=high, level=level, method=method)


def t_quantile(p: float, freedom: int) -> float:
    """Quantile of Student's t: exact for 1 and 2 degrees of freedom, else Hill's expansion
    (Cornish-Fisher; relative error under 0.5 % from 3 up at the levels used here)."""
    if freedom == 1:
        return math.tan(math.pi * (p - 0.5))
    if freedom == 2:
        return (2 * p - 1) * math.sqrt(2 / (4 * p * (1 - p)))
    z, n = NormalDist().inv_cdf(p), freedom
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return math.fsum(term / n**power for power, term in enumerate(terms))


def pass_at_k(scored: int, passed: int, k: int) -> float | None:
    """Unbiased chance that at least one of ``k`` draws passes; null with fewer than ``k`` scored."""
    if scored < k or k < 1:
        return None
    return 1 - _comb(scored - passed, k) / _comb(scored, k)


def pass_hat_k(scored: int, passed: int, k: int) -> float | None:
    """Unbiased chance that all of ``k`` draws pass; null with fewer than ``k`` scored."""
    if scored < k or k < 1:
        return None
    return _comb(passed, k) / _comb(scored, k)


def pass_tables(rows: Sequence[Row]) -> tuple[dict[str, float | None], dict[str, float | None]]:
    """``pass@k`` and ``pass^k`` averaged over tasks, for k = 1, 2, 4, … and the most repeats.

    A task with fewer than k scored rollouts makes that k null: leaving it out would
    quietly report another set of tasks.
    """
    judged = scored(rows)
    total = Counter(map(_TASK, rows))
    known = Counter(map(_TASK, judged))
    passed = Counter([row.task for row in judged if row.kind == "passed"])
    most = max(total.values(), default=0)
    ks = sorted({k for k in (2**power for power in range(most.bit_length())) if k <= most} | ({most} - {0}))
    tables = [
        {str(k): _mean_or_null(draw(known[task], passed[task], k) for task in total) for k in ks}
        for draw in (pass_at_k, pass_hat_k)
    ]
    return tables[0], tables[1]


def _mean_or_null(values: Iterable[float | None]) -> float | None:
    found = list(values)
    known = [value for value in found if value is not None]
    return mean(known) if known and len(known) == len(found) else None


def mask_rates(rows: Sequence[Row]) -> dict[str, float]:
    """Per task, the share of rollouts that a trainer may not count; tasks without any are left out."""
    masked = Counter(row.task for row in rows if row.masked)
    seen = Counter(map(_TASK, rows)) if masked else masked
    return {task: masked[task] / seen[task] for task in sorted(masked)}


def summarise(
    rows: Sequence[Row],
    *,
    job_name: str,
    agent: str,
    model: str | None,
    sandbox: str,
    concurrency: int,
    elapsed_sec: float,
    never_started: int = 0,
    final: bool = False,
) -> Summary:
    """The aggregate of a job. Rollouts that were planned but never started count as cancelled."""
    kinds = Counter(map(_KIND, rows))
    errors = Counter([row.error for row in rows if row.error and row.reward is None])
    if never_started:
        errors["never_started"] = never_started
    judged = scored(rows)
    mean_reward = mean(map(_REWARD, judged))
    passed = [row.kind for row in judged].count("passed")
    at, hat = pass_tables(rows)
    counted = [row for row in rows if row.input_tokens is not None and row.output_tokens is not None]
    costs = [row.cost_usd for row in rows if row.cost_usd is not None]
    return Summary(
        job_name=job_name,
        agent=agent,
        model=model,
        sandbox=sandbox,
        concurrency=concurrency,
        total=len(rows) + never_started,
        passed=kinds["passed"],
        failed=kinds["failed"],
        errored=kinds["errored"],
        verifier_errored=kinds["verifier_errored"],
        unscored=kinds["unscored"],
        cancelled=kinds["cancelled"] + never_started,
        score=passed / len(judged) if judged else None,
        mean_reward=mean_reward,
        interval=clustered_interval(judged),
        pass_at_k=at,
        pass_hat_k=hat,
        error_categories=dict(sorted(errors.items())),
        mask_rate=mask_rates(rows),
        elapsed_sec=round(elapsed_sec, 3),
        total_input_tokens=sum([row.input_tokens or 0 for row in counted]) if counted else None,
        total_output_tokens=sum([row.output_tokens or 0 for row in counted]) if counted else None,
        total_cost_usd=math.fsum(costs) if costs else None,
        usage_coverage=round(len(counted) / len(rows), 6) if rows else None,
        avg_reward=mean_reward,
        avg_tool_calls=mean([float(row.tool_calls) for row in rows if row.tool_calls is not None]),
        avg_duration_sec=mean(map(_DURATION, rows)),
        final=final,
    )


def totals_by(rows: Iterable[Row]) -> Mapping[tuple[str, str | None], list[Row]]:
    """Rows by agent and model, in order of name."""
    groups: dict[tuple[str, str | None], list[Row]] = defaultdict(list)
    for row in rows:
        groups[row.agent, row.model].append(row)
    return dict(sorted(groups.items(), key=lambda item: (item[0][0], item[0][1] or "")))
