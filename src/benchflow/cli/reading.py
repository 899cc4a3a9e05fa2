"""``bench eval list|metrics``, apart from what runs jobs: a question about many rollouts should
not wait for the code and the options of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from benchflow.cli.apps import make_app

app = make_app("List and measure evaluations.")

Root = Annotated[Path, typer.Argument(metavar="JOBS", help="A jobs folder, or one job.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command("list")
def list_jobs(root: Root = Path("jobs"), json_output: AsJson = False) -> None:
    """List evaluations under a folder."""
    from benchflow.jobs.views import list_lines, list_records

    _print(list_records(root) if json_output else list_lines(root))


@app.command("metrics")
def metrics(root: Root = Path("jobs"), json_output: AsJson = False) -> None:
    """Score, mean reward with its interval, pass@k, errors and usage, per agent and model."""
    from benchflow.jobs.views import metrics_lines, metrics_record

    _print(metrics_record(root) if json_output else metrics_lines(root))


def _print(output: Any) -> None:
    from benchflow.kernel.storage import dumps

    if isinstance(output, (dict, list)):
        output = [dumps(output, indent=True).decode()]
    for line in output:
        print(line)
