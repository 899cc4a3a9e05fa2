"""``bench run TASKS``: the short front door of ``bench eval create``."""

from __future__ import annotations

from benchflow.cli.apps import make_app
from benchflow.cli.options import config_command
from benchflow.jobs.config import EvaluationConfig

app = make_app()


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
