"""An agent as data: one TOML file that says what it is and how it is started.

    name = "…"            what the user types; ``aliases = […]`` are other names for it
    kind = "builtin"      runs in the engine, made by ``factory``; or ``"acp"``: a process that
                          speaks the Agent Client Protocol on its standard input and output
    factory = "pkg.mod:Class"   called with the declaration; an ``acp`` agent may leave it out
    description, version, auth, dialect, needs_model, runs_as_root, session_fork

    [start]               command = [argv…], for ``acp``; {bundle} and {node} are of its bundle;
                          before = "…": shell lines that its user runs in the sandbox first
    [install]             npm = "package", node = "24.…", scripts = [files that Node runs after npm],
                          drop = [globs to leave out]; ``version`` is then required. See ``bundle.py``
    [env]                 templates: {base_url} {api_key} {model} {effort} {workspace} {home}
    [state]               paths = […]: what must be copied to fork or resume a session
    [quirks]              mode, model_option, effort_option, handshake_timeout, min_memory_mb
    [options]             whatever the factory understands
    [help]                usage = "…": shown by ``bench agent show``

Unknown keys are refused, so that a misspelt key is never silently ignored.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

from benchflow.contracts.agent import AgentCapabilities, SessionContext
from benchflow.contracts.errors import UsageError
from benchflow.contracts.sandbox import Sandbox

_PLACEHOLDER = re.compile(r"\{(base_url|api_key|model|effort|workspace|home)\}")
_CHOICES = {"kind": ("builtin", "acp"), "session_fork": ("fork", "resume", "replay", "fresh")}
_TEXTS = ("name", "kind", "factory", "description", "version", "auth", "dialect", "session_fork")
_TABLES: dict[str, dict[str, type]] = {
    "start": {"command": list, "before": str},
    "install": {"npm": str, "node": str, "scripts": list, "drop": list},
    "state": {"paths": list},
    "quirks": {
        **{"mode": str, "model_option": str, "effort_option": str},
        **{"handshake_timeout": float, "min_memory_mb": int},
    },
    "help": {"usage": str},
}
_TOP: dict[str, type] = {
    **dict.fromkeys(_TEXTS, str),
    **{"aliases": list, "needs_model": bool, "runs_as_root": bool},
    **dict.fromkeys((*_TABLES, "env", "options"), dict),
}
_AS_GIVEN = (*_TEXTS, "needs_model", "runs_as_root", "env", "options")
"""Keys that are fields of ``Declaration`` as they stand."""


@dataclass(frozen=True, slots=True)
class Install:
    """How an agent's bundle is filled: a package of npm at the agent's version, and the version of
    the Node that installs it."""

    npm: str
    node: str
    scripts: tuple[str, ...] = ()
    drop: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Declaration:
    """One agent declaration; see the module docstring for what each field means."""

    name: str
    kind: Literal["builtin", "acp"]
    description: str
    aliases: tuple[str, ...] = ()
    factory: str | None = None
    version: str | None = None
    auth: str = "none"
    dialect: str | None = None
    needs_model: bool = True
    runs_as_root: bool = False
    session_fork: Literal["fork", "resume", "replay", "fresh"] = "fresh"
    start: tuple[str, ...] = ()
    before: str | None = None
    install: Install | None = None
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    state_paths: tuple[str, ...] = ()
    mode: str | None = None
    model_option: str | None = None
    effort_option: str | None = None
    handshake_timeout: float = 60.0
    min_memory_mb: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    usage: str | None = None

    def capabilities(self) -> AgentCapabilities:
        return AgentCapabilities(
            needs_model=self.needs_model,
            runs_inside=self.kind == "acp",
            runs_as_root=self.runs_as_root,
            session_fork=self.session_fork,
            dialect=self.dialect,
            min_memory_mb=self.min_memory_mb,
        )

    def prepared(self, argv: Sequence[str]) -> list[str]:
        """``argv`` with the lines of ``before`` run first, by the same process."""
        if self.before is None:
            return list(argv)
        return ["/bin/sh", "-c", f'{self.before}\nexec "$@"', "sh", *argv]

    def environment(self, context: SessionContext) -> dict[str, str]:
        """The declared variables with their templates filled in, then the user's own on top.
        A variable that names something this session does not have (a model, an effort) is left out."""
        route = context.route
        values = {
            "base_url": route.inside_url if route else None,
            "api_key": route.key if route else None,
            "model": route.model if route else None,
            "effort": context.reasoning_effort,
            "workspace": context.workspace,
            "home": f"/home/{context.user}" if context.user else "/root",
        }
        filled = {name: _fill(template, values) for name, template in self.env.items()}
        return {name: value for name, value in filled.items() if value is not None} | dict(context.env)


class DeclaredAgent:
    """What every agent with a declaration has; ``connect`` is its own."""

    def __init__(self, declaration: Declaration) -> None:
        self.name = declaration.name
        self.version = declaration.version
        self.declaration = declaration

    def capabilities(self) -> AgentCapabilities:
        return self.declaration.capabilities()

    async def install(self, sandbox: Sandbox) -> None:
        return


def _fill(template: str, values: Mapping[str, str | None]) -> str | None:
    if any(values[match] is None for match in _PLACEHOLDER.findall(template)):
        return None
    return _PLACEHOLDER.sub(lambda match: values[match[1]] or "", template)


def read(path: Path) -> Declaration:
    """Read one declaration. Raises ``UsageError`` naming the file and the key."""
    try:
        data = tomllib.loads(path.read_text("utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: {error}", fix="make it valid TOML") from error
    return parse(data, str(path))


def parse(data: Mapping[str, Any], source: str) -> Declaration:
    _check(data, _TOP, source, "")
    for table, keys in _TABLES.items():
        _check(data.get(table, {}), keys, source, f"{table}.")
    for name, value in data.get("env", {}).items():
        if not isinstance(value, str):
            raise UsageError(f"{source}: env.{name} is not a string", fix="quote the value")
    for key in ("name", "kind", "description"):
        if key not in data:
            raise UsageError(f"{source}: {key} is missing", fix=f"add {key} = …")
    for key, choices in _CHOICES.items():
        if data.get(key, choices[0]) not in choices:
            raise UsageError(f"{source}: {key} = {data[key]!r}", fix=f"use one of {', '.join(choices)}")
    if data["kind"] == "builtin" and "factory" not in data:
        raise UsageError(f"{source}: factory is missing", fix='add factory = "package.module:Class"')
    if data["kind"] == "acp" and not ("start" in data or "factory" in data):
        raise UsageError(f"{source}: start.command is missing", fix="add [start] command = [argv…]")
    given = {key: data[key] for key in _AS_GIVEN if key in data}
    return Declaration(
        **given,
        **data.get("quirks", {}),
        **data.get("help", {}),
        aliases=_strings(data.get("aliases", []), source, "aliases"),
        before=data.get("start", {}).get("before"),
        start=_strings(data.get("start", {}).get("command", []), source, "start.command"),
        install=_install(data, source),
        state_paths=_strings(data.get("state", {}).get("paths", []), source, "state.paths"),
    )


def _install(data: Mapping[str, Any], source: str) -> Install | None:
    if "install" not in data:
        return None
    table = data["install"]
    for key, there in (("version", data), ("install.npm", table), ("install.node", table)):
        if not there.get(key.rpartition(".")[2]):
            raise UsageError(f"{source}: {key} is missing", fix=f"pin it: {key} = …")
    lists = {key: _strings(table.get(key, []), source, f"install.{key}") for key in ("scripts", "drop")}
    return Install(table["npm"], table["node"], **lists)


def _check(table: Any, keys: Mapping[str, type], source: str, prefix: str) -> None:
    if not isinstance(table, dict):
        raise UsageError(f"{source}: {prefix.rstrip('.')} is not a table")
    for key, value in cast("dict[str, Any]", table).items():
        wanted = keys.get(key)
        if wanted is None:
            raise UsageError(f"{source}: unknown key {prefix}{key}", fix=f"known: {', '.join(sorted(keys))}")
        accepted = (int, float) if wanted is float else (wanted,)
        if not isinstance(value, accepted) or (isinstance(value, bool) and wanted is not bool):
            raise UsageError(f"{source}: {prefix}{key} is not a {wanted.__name__}")


def _strings(values: list[Any], source: str, key: str) -> tuple[str, ...]:
    for value in values:
        if not isinstance(value, str):
            raise UsageError(f"{source}: {key} holds {value!r}, which is not a string")
    return tuple(values)
