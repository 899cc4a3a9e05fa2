"""``bench agent``: which agents there are and what each of them needs."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

import typer

from benchflow.cli.apps import make_app

app = make_app("The agents that solve tasks.")

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command("list")
def list_agents(as_json: AsJson = False) -> None:
    """List the agents with their protocol and what they need."""
    from benchflow.agents import catalog

    records = catalog.listing()
    if as_json:
        print(json.dumps(records, indent=2))
        return
    columns = ("name", "protocol", "runs", "model", "auth", "description")
    rows = [columns, *((_cells(record)) for record in records)]
    widths = [max(len(row[index]) for row in rows) for index in range(len(columns) - 1)]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
        sys.stdout.write("  ".join([*cells, row[-1]]).rstrip() + "\n")


@app.command("show")
def show_agent(
    name: Annotated[str, typer.Argument(metavar="NAME", help="As `bench agent list` shows it.")],
    as_json: AsJson = False,
) -> None:
    """Show one agent: protocol, dialect, where it runs, auth, how its session forks."""
    from benchflow.agents import catalog

    record = catalog.show(name)
    if as_json:
        print(json.dumps(record, indent=2))
        return
    usage = record.pop("usage")
    for key, value in record.items():
        print(f"{key.replace('_', ' '):13} {_text(value)}")
    if usage:
        print(f"\n{usage.rstrip()}")


def _cells(record: dict[str, Any]) -> tuple[str, ...]:
    model = "needed" if record["needs_model"] else "none"
    auth = (record["auth"] or "?").split(":")[0]
    return (record["name"], record["protocol"], record["runs"], model, auth, record["description"])


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(value) or "-"
    return "-" if value is None else str(value)
