"""``bench eval``: create, list, measure and resume evaluations."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Annotated, Any

import typer

from benchflow.cli.apps import make_app
from benchflow.cli.options import config_command, parameters, with_parameters
from benchflow.cli.reading import list_jobs, metrics
from benchflow.cli.run import start

app = make_app("Create, list, measure and resume evaluations.")

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

app.command("list")(list_jobs)
app.command("metrics")(metrics)
