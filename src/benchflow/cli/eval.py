"""``bench eval``: create, list, measure and resume evaluations."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Annotated, Any

import typer

from benchflow.cli.apps import make_app
from benchflow.cli.options import config_command, parameters, with_parameters
from benchflow.cli.run import start

app = make_app("Create, list, measure and resume evaluations.")

Root = Annotated[Path, typer.Argument(metavar="JOBS", help="A jobs folder, or one job.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]

RESUMABLE = frozenset(
    {
        "concurrency",
        "build_concurrency",
        "agent_env",
        "policy_url",
        "max_retries",
        "max_cost_usd",
        "max_tokens",
        "max_rollouts",
        "max_seconds",
        "fail_under",
        "fail_on",
        "quiet",
        "json_output",
    }
)
"""What may be given anew when a job is resumed: nothing that changes what its rollouts are."""

_HELP = "Create and run an evaluation from a task, a folder of tasks, or a YAML file."
app.command("create")(config_command(start, positional=False, help=_HELP))
app.command("run")(config_command(start, positional=True, help="The same as `bench run`."))


def _resume(job: Path, **given: Any) -> None:
    """Continue a job: finished rollouts stay, missing and unscored ones run."""
    from benchflow.jobs.resume import config_of_job

    typed = {name: value for name, value in given.items() if value not in (None, [], ())}
    raise typer.Exit(start(config_of_job(job, typed)))


_JOB = inspect.Parameter(
    "job",
    inspect.Parameter.KEYWORD_ONLY,
    annotation=Annotated[Path, typer.Argument(metavar="JOB", help="The job's folder.")],
)
app.command("resume")(with_parameters(_resume, [_JOB, *parameters(positional=True, only=RESUMABLE)]))


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
