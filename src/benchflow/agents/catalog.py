"""Names to agents: the declarations beside this file, entry points, dotted paths."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from benchflow.agents import bundle, declaration
from benchflow.agents.bundle import BundleStatus
from benchflow.agents.declaration import Declaration
from benchflow.contracts.agent import Agent
from benchflow.contracts.errors import UsageError
from benchflow.kernel import registry

FOLDER = Path(__file__).with_name("declarations")
_VERSION = re.compile(r"[0-9A-Za-z][0-9A-Za-z.+_]*(?:-[0-9A-Za-z.]+)?")
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
    """The declaration of ``name``: a declared name or an alias, with ``@VERSION`` another version
    of one that is installed, or the path of a declaration of the user's own (``….toml``)."""
    if name.endswith(".toml"):
        return _declaration_file(name)
    plain, at, version = name.partition("@")
    table = declarations()
    found = table.get(plain) or next((one for one in table.values() if plain in one.aliases), None)
    if found is None or not at:
        return found
    if found.install is None:
        raise UsageError(f"agent {plain} has no versions to choose from", fix=f"say {plain}")
    if not _VERSION.fullmatch(version):
        raise UsageError(f"{version!r} is no version", fix="give one, such as 1.2.3")
    return replace(found, version=version)


def bundle_status(name: str) -> BundleStatus:
    """Whether the agent ``name`` needs installing on this host, and is. Installs nothing."""
    return bundle.status(_declared(name))


async def ensure_bundle(name: str, say: bundle.Say | None = None) -> BundleStatus:
    """Install the agent ``name`` on this host unless it is there already, or needs none; ``say``
    gets one line when it begins. Raises ``PrerequisiteError`` when it cannot be installed."""
    declared = _declared(name)
    if declared.install is not None:
        await bundle.ensure(declared, say)
    return bundle.status(declared)


def remove_bundle(name: str) -> list[Path]:
    """Remove what was installed for the agent ``name``, every version unless ``@VERSION`` names one;
    returns the folders that are gone."""
    declared = _declared(name)
    own = name.endswith(".toml") or "@" not in name
    return bundle.remove(declared.name, None if own else declared.version)


def _declared(name: str) -> Declaration:
    """The declaration of a known agent; one without (a plugin) that needs nothing of the host."""
    declared = find(name)
    if declared is not None:
        return declared
    agent = load(name)
    return Declaration(agent.name, "builtin", "", version=agent.version)


def _declaration_file(path: str) -> Declaration:
    if not Path(path).is_file():
        raise UsageError(f"no agent declaration {path}", fix="give an existing .toml file")
    return declaration.read(Path(path))


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
    held = bundle.status(declared) if declared else None
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
        "installed": held.installed if held and held.needed else None,
        "size_bytes": held.size_bytes if held else None,
        "proof": held.proof if held else None,
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
