"""``bench doctor``: what this machine can run, and what to do about the rest."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from benchflow.cli.apps import make_app

app = make_app()


@app.command("doctor")
def doctor(
    sandbox: Annotated[str | None, typer.Option(help="Check only this sandbox; it must work.")] = None,
    agent: Annotated[str | None, typer.Option("--agent", "-a", help="This agent must be usable.")] = None,
    model: Annotated[str | None, typer.Option("--model", "-m", help="This model must answer.")] = None,
    policy_url: Annotated[str | None, typer.Option(help="Base URL of the policy's endpoint.")] = None,
    jobs_dir: Annotated[Path, typer.Option("--jobs-dir", "-o", help="Where a run would write.")] = Path(
        "jobs"
    ),
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check runtime, sandboxes, agents, credentials, disk and the policy's endpoint, each line
    with its fix; exit 3 when what was asked for, or every sandbox, is unavailable."""
    import asyncio

    from benchflow.jobs.doctor import Question, examine

    report = asyncio.run(examine(Question(sandbox, agent, model, policy_url, jobs_dir)))
    print(report.model_dump_json(indent=2) if as_json else "\n".join(report.lines()))
    raise typer.Exit(report.exit_code)
