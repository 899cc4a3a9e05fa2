"""Command-line options made from the fields of ``EvaluationConfig``."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import typer
from pydantic.fields import FieldInfo

from benchflow.jobs.config import EvaluationConfig, make_config, read_config_file


def config_command(
    handle: Callable[[EvaluationConfig], int], *, positional: bool, help: str
) -> Callable[..., Any]:
    """A typer command that builds an ``EvaluationConfig`` and calls ``handle`` with it.

    What is typed wins over the ``--config`` file, and that over the defaults. Tasks are
    arguments when ``positional``, else ``--tasks-dir``.
    """

    def command(**given: Any) -> None:
        raise typer.Exit(handle(config_from(given, positional=positional)))

    command.__doc__ = help
    return with_parameters(command, [_config_parameter(), *parameters(positional=positional)])


def with_parameters(command: Callable[..., Any], made: list[inspect.Parameter]) -> Callable[..., Any]:
    """Give ``command`` the signature that typer reads its parameters from."""
    command.__signature__ = inspect.Signature(made)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in made}
    return command


def config_from(given: dict[str, Any], *, positional: bool) -> EvaluationConfig:
    """The configuration asked for by typed options over the ``--config`` file."""
    path = given.pop("config", None)
    values, names = read_config_file(path) if path else ({}, {})
    typed = {name: value for name, value in given.items() if value not in (None, [], ())}
    for name in typed:
        for other in _names(name):
            values.pop(other, None)
    names |= {name: flag_of(name, positional=positional) for name in typed}
    return make_config({**values, **typed}, names)


def parameters(*, positional: bool, only: frozenset[str] | None = None) -> list[inspect.Parameter]:
    """One keyword parameter per field that belongs on the command line."""
    made: list[inspect.Parameter] = []
    for name, field in EvaluationConfig.model_fields.items():
        extra = _extra(field)
        if extra.get("cli", True) and (only is None or name in only):
            made.append(_parameter(name, field, extra, positional=positional))
    return made


def flag_of(name: str, *, positional: bool = False) -> str:
    """The long flag of a field, as the user typed it."""
    if name == "tasks":
        return "TASKS" if positional else "--tasks-dir"
    field = EvaluationConfig.model_fields[name]
    long = [flag for flag in _extra(field).get("flags", ()) if flag.startswith("--")]
    return long[0] if long else "--" + name.replace("_", "-")


def _parameter(name: str, field: FieldInfo, extra: dict[str, Any], *, positional: bool) -> inspect.Parameter:
    kind, metavar = _kind(field.annotation)
    metavar = extra.get("metavar", metavar)
    help = (field.description or "") + _default_words(field)
    if name == "tasks" and positional:
        info: Any = typer.Argument(metavar="TASKS", help=help)
    else:
        flags = _flags(name, extra, kind)
        info = typer.Option(*flags, help=help, metavar=metavar)
    annotation = Annotated[Union[kind, None], info]  # noqa: UP007 - typer reads the runtime value
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _flags(name: str, extra: dict[str, Any], kind: Any) -> list[str]:
    long = flag_of(name)
    if kind is bool and not extra.get("switch"):
        long = f"{long}/--no-{long.removeprefix('--')}"
    return [long, *(flag for flag in extra.get("flags", ()) if not flag.startswith("--"))]


def _kind(annotation: Any) -> tuple[Any, str | None]:
    """The type typer should parse, and what to call the value in the help. Everything but
    switches is text; the model converts it, so that errors read the same everywhere."""
    options = [arg for arg in _members(annotation) if arg is not type(None)]
    first = options[0]
    if get_origin(first) is tuple:
        return list[str], _kind(get_args(first)[0])[1]
    if get_origin(first) is dict:
        return list[str], "KEY=VALUE"
    if get_origin(first) is Literal:
        return str, "|".join(get_args(first))
    if first is bool:
        return bool, None
    return str, {int: "N", float: "NUMBER", Path: "PATH"}.get(first, "TEXT")


def _members(annotation: Any) -> tuple[Any, ...]:
    union = get_origin(annotation) in (Union, types.UnionType)
    return get_args(annotation) if union else (annotation,)


def _default_words(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True)  # pyright: ignore[reportCallIssue]
    if isinstance(value, bool) or value is None or value in ((), {}):
        return ""
    return f" [default: {value}]"


def _names(name: str) -> list[str]:
    """Every name of a field in a file."""
    alias = EvaluationConfig.model_fields[name].validation_alias
    return [name, *(str(choice) for choice in getattr(alias, "choices", ()))]


def _extra(field: FieldInfo) -> dict[str, Any]:
    return field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}


def _config_parameter() -> inspect.Parameter:
    info = typer.Option("--config", metavar="FILE", help="YAML file of these settings; what is typed wins.")
    return inspect.Parameter(
        "config", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[Path | None, info]
    )
