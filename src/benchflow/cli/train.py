"""``bench train``: rows, stream and checks for trainers."""

from __future__ import annotations

import sys
from pathlib import Path

import typer

from benchflow.cli.apps import make_app

app = make_app("Hand rollouts to a trainer: rows, a live stream, checks.")

PATH = typer.Argument(metavar="PATH", help="A job, a jobs folder, an agent's folder, or one rollout.")
BY = typer.Option(
    None, "--group-by", help="Keys of a group, e.g. task,agent,model; default: the planned groups."
)


@app.command()
def convert(
    path: Path = PATH,
    out: Path = typer.Option(..., "--out", "-o", help="File to write; its folder is made."),
    format: str = typer.Option("chat", "--format", help="chat, verifiers, tokens, or a plug-in's."),
    group_advantage: str | None = typer.Option(None, "--group-advantage", help="grpo or loo."),
    group_by: str | None = BY,
    manifest: Path | None = typer.Option(
        None, "--manifest", help="Also write counts, groups and members to this file."
    ),
    min_reward: float | None = typer.Option(None, "--min-reward", help="Leave out rows below this reward."),
    drop_zero_variance: bool = typer.Option(False, "--drop-zero-variance", help="Leave out flat groups."),
    as_json: bool = typer.Option(False, "--json", help="Print the manifest instead of two lines."),
) -> None:
    """Write finished rollouts as rows, with the advantages of their groups when asked for."""
    from benchflow.kernel.storage import dumps
    from benchflow.training.convert import convert as run
    from benchflow.training.convert import make_options

    options = make_options(
        format=format,
        advantage=group_advantage,
        group_by=group_by,
        min_reward=min_reward,
        drop_zero_variance=drop_zero_variance,
    )
    report = run(path, out, options, manifest)
    if as_json:
        print(dumps(report.manifest(), indent=True).decode())
        return
    print("\n".join(report.lines()))
    for note in report.notes():
        print(note, file=sys.stderr)


@app.command()
def validate(
    file: Path = typer.Argument(metavar="FILE", help="A file of rows written by convert."),
    format: str | None = typer.Option(None, "--format", help="chat, verifiers or tokens; else by the rows."),
    require_tool_calls: bool = typer.Option(
        False, "--require-tool-calls", help="A row without tool calls is a failure."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print what is wrong as JSON too."),
) -> None:
    """Check rows before they are trained on. Exits 1 when something is wrong, or no row is there."""
    import json

    from benchflow.training.validate import validate as run

    check = run(file, format=format, require_tool_calls=require_tool_calls)
    print(json.dumps(check.record() if as_json else check.headline()))
    if not as_json:
        for line in check.lines():
            print(line, file=sys.stderr)
    if not check.ok:
        raise typer.Exit(1)


@app.command()
def stream(
    path: Path = PATH,
    follow: bool = typer.Option(True, "--follow/--no-follow", help="Wait for more until the job is done."),
    group_size: int | None = typer.Option(None, "--group-size", help="Deliver complete groups of N."),
    group_by: str | None = BY,
    group_advantage: str | None = typer.Option(None, "--group-advantage", help="grpo (default) or loo."),
    since: Path | None = typer.Option(
        None, "--since", help="File that remembers what was delivered; a restart goes on from it."
    ),
    timeout: float | None = typer.Option(None, "--timeout", help="Give up after SEC without anything new."),
    with_segments: bool = typer.Option(
        True, "--with-segments/--no-segments", help="Put the exact tokens into each line."
    ),
) -> None:
    """Print each finished rollout once, as a JSON line, in the order they finish.

    Exits 0 when the job is done, 1 when it died, 3 after --timeout.
    """
    import asyncio

    from benchflow.kernel.storage import dumps
    from benchflow.training.stream import stream_rollouts

    told = 0

    def note(text: str) -> None:
        nonlocal told
        told += 1
        print(text, file=sys.stderr, flush=True)

    async def run() -> None:
        nonlocal told
        records = stream_rollouts(
            path,
            follow=follow,
            group_size=group_size,
            group_by=group_by,
            group_advantage=group_advantage,
            since=since,
            timeout=timeout,
            with_segments=with_segments,
            on_note=note,
        )
        async for record in records:
            told += 1
            print(dumps(record).decode(), flush=True)

    asyncio.run(run())
    if not told:
        note(f"nothing new under {path}")
