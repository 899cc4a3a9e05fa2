"""``bench run TASKS``: the short front door of ``bench eval create``."""

from __future__ import annotations

import typer

from benchflow.cli.options import config_command
from benchflow.jobs.config import EvaluationConfig

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


def start(config: EvaluationConfig) -> int:
    from benchflow.cli.main import STARTED
    from benchflow.jobs.foreground import run_in_foreground

    return run_in_foreground(config, began=STARTED)


app.command("run")(
    config_command(
        start,
        positional=True,
        help="Run tasks with an agent and score them. The same command again continues the job.",
    )
)
