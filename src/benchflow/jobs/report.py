"""The lines a job ends with: each rollout, the numbers, where the files are, what next."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from benchflow.contracts.records import Result, Summary
from benchflow.jobs.progress import without_score
from benchflow.jobs.store import read_result

if TYPE_CHECKING:
    from benchflow.jobs.evaluation import EvaluationResult

SHOWN = 64
"""A larger job is told by its numbers alone."""

LAST_LINE_BYTES = 16 * 1024


def report(result: EvaluationResult) -> Iterator[str]:
    """Everything printed at the end of ``bench run``."""
    yield from rollout_lines(result)
    yield from summary_lines(result.summary)
    for lost in result.lost:
        yield f"no record: {lost}"
    if result.stopped:
        yield f"stopped: {result.stopped}"
    yield from (f"gate not met: {gate}" for gate in result.gates)
    yield f"files: {_where(result)}"
    if result.exit_code == 1:
        yield f"some rollouts have no score; run them again: {resume_command(result.jobs[0])}"


def rollout_lines(result: EvaluationResult) -> Iterator[str]:
    """``trial-01  reward 1.0: <last line the test printed>`` for each rollout that ended."""
    plan = result.plan
    if plan is None or plan.rollouts > SHOWN:
        return
    width = max(len(task) for task in plan.tasks)
    for job, planned in plan.in_order():
        found = read_result(job.folder / planned.name)
        if found is not None:
            trial = f"trial-{planned.trial:02d}" if len(plan.jobs) > 1 else ""
            task = planned.task.ljust(width) if len(plan.tasks) > 1 or not trial else ""
            label = "  ".join(part for part in (task, trial) if part)
            yield f"{label}  {_told(found, job.folder / planned.name)}"


def _told(result: Result, folder: Path) -> str:
    if result.reward is None:
        return without_score(result)
    last = last_line(folder / "verifier" / "test-stdout.txt")
    early = f" [{result.error_category}]" if result.error_category else ""
    if last.startswith("reward "):
        return last + early
    return f"reward {_number(result.reward)}" + (f": {last}" if last else "") + early


def last_line(path: Path) -> str:
    """The last line with text in it; empty when there is none."""
    try:
        with path.open("rb") as handle:
            handle.seek(0, 2)
            handle.seek(max(0, handle.tell() - LAST_LINE_BYTES))
            lines = handle.read().decode("utf-8", "replace").splitlines()
    except OSError:
        return ""
    text = next((line.strip() for line in reversed(lines) if line.strip()), "")
    return "".join(c if c.isprintable() else " " for c in text)[:200]


def summary_lines(summary: Summary) -> Iterator[str]:
    mean = "unknown" if summary.mean_reward is None else f"{summary.mean_reward:.3f}"
    interval = summary.interval
    spread = f"  95% [{interval.low:.3f}, {interval.high:.3f}] ({interval.method})" if interval else ""
    yield f"mean reward {mean}{spread}  n={summary.passed + summary.failed} of {summary.total}"
    counts = {
        "passed": summary.passed,
        "failed": summary.failed,
        "errored": summary.errored,
        "verifier errors": summary.verifier_errored,
        "unscored": summary.unscored,
        "cancelled": summary.cancelled,
    }
    yield "  ".join(
        f"{name} {count}" for name, count in counts.items() if count or name in ("passed", "failed")
    )
    tables = [("pass@", summary.pass_at_k), ("pass^", summary.pass_hat_k)]
    told = [
        f"{name}{k} {value:.3f}" for name, table in tables for k, value in table.items() if value is not None
    ]
    if len(summary.pass_at_k) > 1 and told:
        yield "  ".join(told)
    if summary.error_categories:
        yield "errors: " + ", ".join(f"{name} {count}" for name, count in summary.error_categories.items())
    if summary.total_input_tokens is not None:
        cost = "?" if summary.total_cost_usd is None else f"${summary.total_cost_usd:.4f}"
        yield f"tokens {summary.total_input_tokens} in, {summary.total_output_tokens} out  cost {cost}"


def resume_command(job: Path) -> str:
    return f"bench eval resume {shlex.quote(str(job))}"


def _where(result: EvaluationResult) -> str:
    folders = [str(folder) for folder in result.jobs]
    if len(folders) == 1:
        return folders[0]
    return f"{folders[0]} … {folders[-1]}"


def _number(value: float) -> str:
    return str(float(value)) if float(value) == round(value, 4) else f"{value:.4g}"
