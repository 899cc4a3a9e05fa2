"""What ``bench eval list`` and ``bench eval metrics`` show, as lines and as records."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchflow.contracts.records import Summary
from benchflow.jobs.index import Index
from benchflow.jobs.metrics import Row, summarise, totals_by
from benchflow.jobs.report import summary_lines


def list_records(root: Path) -> list[dict[str, Any]]:
    with Index(root) as index:
        return [asdict(job) for job in index.jobs()]


def list_lines(root: Path) -> Iterator[str]:
    """A table of jobs, one line each."""
    head = ("job", "agent", "model", "sandbox", "finished", "passed", "errored", "mean reward")
    rows: list[tuple[str, ...]] = [head]
    for job in list_records(root):
        planned = job["planned"] if job["planned"] is not None else "?"
        mean = job["mean_reward"]
        rows.append(
            (
                job["path"] if job["path"] != "." else job["name"],
                job["agent"] or "-",
                job["model"] or "-",
                job["sandbox"] or "-",
                f"{job['finished'] - job['cancelled']}/{planned}",
                str(job["passed"]),
                str(job["errored"]),
                "?" if mean is None else f"{mean:.3f}",
            )
        )
    if len(rows) == 1:
        yield f"no evaluation under {root}"
        return
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def metrics_record(root: Path) -> dict[str, Any]:
    """All rollouts together, and each agent and model apart."""
    with Index(root) as index:
        jobs, rows = len(index.jobs()), index.rows()
    groups = totals_by(rows)
    parts = [_summary(root, found, *name).model_dump() for name, found in groups.items()]
    whole = parts[0] if len(parts) == 1 else _summary(root, rows, "(several)", None).model_dump()
    return {**whole, "jobs": jobs, "by_agent": parts}


def metrics_lines(root: Path) -> Iterator[str]:
    record = metrics_record(root)
    yield f"{root}: {record['jobs']} job(s), {record['total']} rollout(s)"
    for group in record["by_agent"]:
        yield ""
        yield f"{group['agent']}  {group['model'] or '-'}"
        summary = Summary.model_validate(group)
        yield from (f"  {line}" for line in summary_lines(summary))
        if summary.avg_tool_calls is not None:
            yield f"  tool calls {summary.avg_tool_calls:.1f} on average"
        if summary.avg_duration_sec is not None:
            yield f"  duration {summary.avg_duration_sec:.2f} s on average"
        for task, rate in summary.mask_rate.items():
            yield f"  masked {rate:.0%} of {task}"


def _summary(root: Path, rows: Sequence[Row], agent: str, model: str | None) -> Summary:
    return summarise(
        rows,
        job_name=root.name or str(root),
        agent=agent,
        model=model,
        sandbox="",
        concurrency=0,
        elapsed_sec=sum(row.duration for row in rows),
        final=True,
    )
