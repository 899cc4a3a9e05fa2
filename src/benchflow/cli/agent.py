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
    columns = ("name", "protocol", "dialect", "runs", "model", "auth", "version", "installed", "description")
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


@app.command("install")
def install_agent(
    name: Annotated[str, typer.Argument(metavar="NAME[@VERSION]", help="As `bench agent list` shows it.")],
) -> None:
    """Install an agent on this host, once for every sandbox; a run does it by itself if need be."""
    import asyncio

    from benchflow.agents import catalog
    from benchflow.jobs.preflight import agent_whole

    held = asyncio.run(catalog.ensure_bundle(name, say=print))
    if not held.needed:
        print(f"agent {held.name} needs no installing")
        return
    agent_whole(held)
    print(f"agent {held.name} {held.version} is installed: {_size(held.size_bytes)}, {held.folder}")


@app.command("remove")
def remove_agent(
    name: Annotated[str, typer.Argument(metavar="NAME[@VERSION]", help="As `bench agent list` shows it.")],
) -> None:
    """Remove what was installed of an agent on this host: one version, or all."""
    from benchflow.agents import catalog

    gone = catalog.remove_bundle(name)
    print("\n".join(f"removed {folder}" for folder in gone) if gone else f"agent {name} was not installed")


def _cells(record: dict[str, Any]) -> tuple[str, ...]:
    model = "needed" if record["needs_model"] else "none"
    held = {None: "-", False: "no", True: _size(record["size_bytes"])}[record["installed"]]
    auth = (record["auth"] or "?").split(":")[0]
    version, dialect = record["version"] or "-", record["dialect"] or "-"
    return (
        *(record["name"], record["protocol"], dialect, record["runs"], model, auth, version, held),
        record["description"],
    )


def _size(size: int | None) -> str:
    return "?" if size is None else f"{size / 2**20:.0f} MB"


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(value) or "-"
    if isinstance(value, dict):
        return ", ".join(f"{key} {one}" for key, one in value.items())
    return "-" if value is None else str(value)
