"""Names to agents: the declarations beside this file, entry points, dotted paths."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from benchflow.agents import declaration
from benchflow.agents.declaration import Declaration
from benchflow.contracts.agent import Agent
from benchflow.contracts.errors import UsageError
from benchflow.kernel import registry

FOLDER = Path(__file__).with_name("declarations")
ACP_FACTORY = "benchflow.agents.acp.agent:AcpAgent"


@lru_cache(maxsize=1)
def declarations() -> Mapping[str, Declaration]:
    """Every declared agent by its own name, in the order of names."""
    found: dict[str, Declaration] = {}
    for path in sorted(FOLDER.glob("*.toml")):
        declared = declaration.read(path)
        found[declared.name] = declared
    return found


def find(name: str) -> Declaration | None:
    """The declaration of ``name``, which may be an alias."""
    table = declarations()
    if name in table:
        return table[name]
    return next((declared for declared in table.values() if name in declared.aliases), None)


def load(name: str) -> Agent:
    """Return the agent behind a declared name, an alias, an entry point of the group
    ``benchflow.agents`` or a dotted path ``package.module:Class``. Raises ``UsageError``
    listing what exists for anything else."""
    declared = find(name)
    if declared is not None:
        return registry.resolve("agents", declared.factory or ACP_FACTORY)(declared)
    if ":" in name or name in registry.names("agents"):
        return _plugin(name, registry.resolve("agents", name))
    raise UsageError(
        f"unknown agent {name!r}",
        fix=f"known: {', '.join(names())}; or give a dotted path package.module:Class",
    )


def names() -> list[str]:
    return sorted({*declarations(), *registry.names("agents")})


def listing() -> list[dict[str, Any]]:
    """One record per agent for ``bench agent list``, declared ones and entry points."""
    return [show(name) for name in names()]


def show(name: str) -> dict[str, Any]:
    """What there is to say about one agent. Raises ``UsageError`` for an unknown one."""
    declared = find(name)
    agent = load(name) if declared is None else None
    can = agent.capabilities() if agent else declared.capabilities()  # pyright: ignore[reportOptionalMemberAccess]
    return {
        "name": declared.name if declared else name,
        "aliases": list(declared.aliases) if declared else [],
        "protocol": "acp" if declared and declared.kind == "acp" else "in-process",
        "dialect": can.dialect,
        "needs_model": can.needs_model,
        "runs": "sandbox" if can.runs_inside else "engine",
        "auth": declared.auth if declared else None,
        "session_fork": can.session_fork,
        "version": declared.version if declared else agent.version if agent else None,
        "description": declared.description if declared else (type(agent).__doc__ or "").strip(),
        "usage": declared.usage if declared else None,
    }


def _plugin(name: str, target: Any) -> Agent:
    """A third party's class, or a function that returns an agent; called without arguments."""
    agent = target()
    if not isinstance(agent, Agent):
        raise UsageError(
            f"agent {name!r}: {target!r} does not give an agent",
            fix="it must have name, version, capabilities(), install() and connect()",
        )
    return agent
