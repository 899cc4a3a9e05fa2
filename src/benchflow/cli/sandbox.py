"""``bench sandbox``: imported bases, running sandboxes, leftovers of dead runs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from benchflow.cli.apps import make_app
from benchflow.contracts.sandbox import Running

app = make_app("Bases, running sandboxes and leftovers.")
image = make_app("Bases that FROM may name in the local sandbox.")
app.add_typer(image, name="image")

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command("list")
def list_sandboxes(as_json: AsJson = False) -> None:
    """List the sandboxes that exist, of runs that live and of runs that died."""
    import asyncio

    from benchflow.sandboxes.leftovers import all_running

    found = asyncio.run(all_running())
    if as_json:
        print(json.dumps([asdict(item) | {"age_sec": round(item.age_sec, 1)} for item in found], indent=2))
        return
    rows = [(item.provider, item.name, item.job or "-", _age(item.age_sec), _state(item)) for item in found]
    _table(("provider", "name", "job", "age", "owner"), rows, "no sandboxes")


@app.command("cleanup")
def cleanup(
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only list what would be removed.")] = False,
    max_age: Annotated[
        float, typer.Option("--max-age", min=0, help="Only leftovers older than this many minutes.")
    ] = 0,
    as_json: AsJson = False,
) -> None:
    """Remove what runs that no longer live have left behind; nothing of a living run."""
    import asyncio

    from benchflow.sandboxes.leftovers import reap_all

    found = asyncio.run(reap_all(older_than=max_age * 60, dry_run=dry_run))
    if as_json:
        print(json.dumps([asdict(item) for item in found], indent=2))
        return
    rows = [(item.provider, item.kind, item.name, _age(item.age_sec), item.owner) for item in found]
    if rows:
        print("would remove" if dry_run else "removed")
    _table(("provider", "kind", "name", "age", "owner"), rows, "nothing to remove")


@image.command("import")
def import_image(name: str, path: Path) -> None:
    """Import a root file system (directory or tar), an OCI layout, or a `docker save` archive."""
    from benchflow.sandboxes.local.bases import import_base

    base = import_base(_store(), name, path)
    print(f"imported {base.name} ({base.size_bytes / 2**20:.0f} MB, {base.digest[:19]})")
    for note in base.notes:
        print(f"note: {note}")


@image.command("list")
def list_images(as_json: AsJson = False) -> None:
    """List the imported bases."""
    from benchflow.sandboxes.local.bases import list_bases

    bases = list_bases(_store())
    if as_json:
        print(json.dumps([asdict(base) for base in bases], indent=2))
        return
    rows = [(b.name, f"{b.size_bytes / 2**20:.0f} MB", b.digest[:19], b.source) for b in bases]
    _table(("name", "size", "digest", "source"), rows, "no imported bases")


@image.command("remove")
def remove_image(name: str) -> None:
    """Remove an imported base and the images built on it."""
    from benchflow.sandboxes.local.bases import remove_base

    print(f"removed {remove_base(_store(), name).name}")


def _store():
    from benchflow.sandboxes.local.provider import LocalProvider

    return LocalProvider().store


def _age(seconds: object) -> str:
    value = float(str(seconds))
    return (
        f"{value:.0f} s"
        if value < 120
        else f"{value / 60:.0f} min"
        if value < 7200
        else f"{value / 3600:.0f} h"
    )


def _state(found: Running) -> str:
    return found.owner + ("" if found.alive else " (gone)")


def _table(header: tuple[str, ...], rows: Sequence[tuple[str, ...]], empty: str) -> None:
    if not rows:
        print(empty)
        return
    widths = [max(len(row[index]) for row in (header, *rows)) for index in range(len(header))]
    for row in (header, *rows):
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
