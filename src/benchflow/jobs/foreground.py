"""A job in the foreground of a terminal: signals, progress, the closing lines, the exit code."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from benchflow.jobs.config import EvaluationConfig
from benchflow.jobs.evaluation import Evaluation, EvaluationResult
from benchflow.jobs.interrupts import Interrupts
from benchflow.jobs.plan import Plan
from benchflow.jobs.progress import Reporter, make_reporter
from benchflow.jobs.report import report, resume_command, summary_lines
from benchflow.kernel.storage import dumps

T = TypeVar("T")


def run_in_foreground(config: EvaluationConfig, *, began: float | None = None) -> int:
    """Run (or with ``dry_run`` print) the job, print its closing lines, return the exit code."""
    if config.dry_run:
        plan, notes, finished = run_async(Evaluation(config=config, began=began).plan)
        _print_plan(plan, notes, finished, as_json=config.json_output)
        return 0
    reporter = make_reporter(quiet=config.quiet, interactive=False if config.json_output else None)
    return run_async(lambda: _watched(config, reporter, began))


async def _watched(config: EvaluationConfig, reporter: Reporter, began: float | None) -> int:
    evaluation = Evaluation(config=config, reporter=reporter, began=began)
    interrupts = Interrupts(leftovers=evaluation.running)
    with interrupts.watching():
        try:
            result = await evaluation.run()
        except asyncio.CancelledError:
            if interrupts.exit_code is None:
                raise
            _print_interrupted(evaluation, config)
            return interrupts.exit_code
    _print_result(result, config)
    return result.exit_code


def _print_result(result: EvaluationResult, config: EvaluationConfig) -> None:
    if config.json_output:
        record = {
            **result.summary.model_dump(),
            "jobs": [str(folder) for folder in result.jobs],
            "exit_code": result.exit_code,
            "stopped": result.stopped,
            "gates": list(result.gates),
            "lost": list(result.lost),
        }
        sys.stdout.write(dumps(record, indent=True).decode() + "\n")
    elif not config.quiet:
        sys.stdout.writelines(line + "\n" for line in report(result))


def _print_interrupted(evaluation: Evaluation, config: EvaluationConfig) -> None:
    """After an interrupt: what was finished, and the command that goes on."""
    ended = evaluation.result
    if ended is None:
        print("interrupted before anything was started", file=sys.stderr)
        return
    if not config.quiet:
        for line in summary_lines(ended.summary):
            print(line, file=sys.stderr)
    print(f"interrupted; continue with: {resume_command(ended.jobs[0])}", file=sys.stderr)


def _print_plan(plan: Plan, notes: tuple[str, ...], finished: int, *, as_json: bool) -> None:
    if as_json:
        rollouts = [
            {"folder": str(job.folder / p.name), "task": p.task, "trial": p.trial, "group_id": p.group_id}
            for job, p in plan.in_order()
        ]
        record = {"settings": plan.settings, "notes": list(notes), "finished": finished, "rollouts": rollouts}
        sys.stdout.write(dumps(record, indent=True).decode() + "\n")
        return
    for note in notes:
        print(note)
    for job in plan.jobs:
        print(f"{job.folder}  trial {job.trial}, {len(job.rollouts)} rollout(s)")
    for task in plan.tasks.values():
        print(f"  {task.name}  {task.path}  {task.digest[:19]}")
    left = plan.rollouts - finished
    print(f"would run {left} rollout(s), {plan.config.concurrency} at once; nothing was written")


def run_async(main: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run a coroutine on uvloop when the platform has it."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(main())
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main())
