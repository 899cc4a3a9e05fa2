"""One look for every resource: plain help, no shell completion of half a command name, and
tracebacks left to ``cli.main``."""

from __future__ import annotations

import typer


def make_app(help: str | None = None) -> typer.Typer:
    """The typer app of a resource. One with ``help`` holds verbs and prints it when none is given."""
    return typer.Typer(
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        no_args_is_help=help is not None,
        help=help,
    )
