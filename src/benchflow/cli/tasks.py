"""``bench tasks``: check task packages and pin their content."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from benchflow.cli.apps import make_app

app = make_app("Check task packages and pin their content.")

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.callback()
def tasks() -> None:
    """Check task packages and pin their content."""


class Level(StrEnum):
    schema = "schema"
    structural = "structural"


@app.command("check")
def check(
    paths: Annotated[list[str], typer.Argument(metavar="PATHS", help="Tasks, folders of tasks, or globs.")],
    level: Annotated[
        Level, typer.Option(help="schema: the definition and the prompt; structural: the whole package.")
    ] = Level.structural,
    as_json: AsJson = False,
) -> None:
    """Check tasks and list every problem with its file, line and key; exit 1 when there is one."""
    from benchflow.tasks.check import check_task
    from benchflow.tasks.discover import find_tasks

    checked = [check_task(folder, level.value) for folder in find_tasks(paths)]
    if as_json:
        print(json.dumps([item.record() for item in checked], indent=2))
    else:
        print("\n".join(line for item in checked for line in item.lines()))
    if not all(item.ok for item in checked):
        raise typer.Exit(1)


@app.command("digest")
def digest(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="A task, or a folder of tasks.")],
    as_json: AsJson = False,
) -> None:
    """Print the sha256 that pins a task's files; for a folder of tasks, one line each."""
    from benchflow.tasks.digest import task_digest
    from benchflow.tasks.discover import find_tasks
    from benchflow.tasks.package import is_task

    folders = find_tasks([path])
    digests = {folder.resolve().name: task_digest(folder.resolve()) for folder in folders}
    if as_json:
        print(json.dumps([{"name": name, "digest": value} for name, value in digests.items()], indent=2))
    elif is_task(path) or path.is_file():
        print(*digests.values())
    else:
        print("\n".join(f"{name} {value}" for name, value in digests.items()))
