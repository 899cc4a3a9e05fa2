"""Choosing a provider: a short name, or a dotted path ``package.module:Class``.

The built-in table holds strings, so that nothing is imported before it is chosen.
Third parties add names with entry points in the group ``benchflow.<kind>``.
"""

from __future__ import annotations

import importlib
from importlib.metadata import entry_points
from typing import Any

from benchflow.contracts.errors import PrerequisiteError, UsageError

BUILTIN: dict[str, dict[str, str]] = {
    "sandboxes": {
        "docker": "benchflow.sandboxes.docker.provider:DockerProvider",
        "local": "benchflow.sandboxes.local.provider:LocalProvider",
    },
    "rewards": {"script": "benchflow.rewards.script:ScriptReward"},
    "gateways": {"default": "benchflow.gateway.server:GatewayServer"},
    "agent_catalogs": {"default": "benchflow.agents.catalog:load"},
    "task_loaders": {"default": "benchflow.tasks.load:load_task"},
    "exporters": {
        "chat": "benchflow.training.formats.chat:rows",
        "tokens": "benchflow.training.formats.tokens:rows",
        "verifiers": "benchflow.training.formats.verifiers:rows",
    },
}

_SINGULAR = {"sandboxes": "sandbox"}


def names(kind: str) -> list[str]:
    plugins = {point.name for point in entry_points(group=f"benchflow.{kind}")}
    return sorted(set(BUILTIN.get(kind, {})) | plugins)


def resolve(kind: str, name: str) -> Any:
    """Import and return the class or function behind ``name``."""
    target = BUILTIN.get(kind, {}).get(name)
    if target is None and ":" in name:
        target = name
    if target is not None:
        return _import(kind, name, target)
    for point in entry_points(group=f"benchflow.{kind}", name=name):
        return point.load()
    raise UsageError(
        f"unknown {_SINGULAR.get(kind, kind.removesuffix('s'))} {name!r}",
        fix=f"known: {', '.join(names(kind))}; or give a dotted path package.module:Class",
    )


def _import(kind: str, name: str, target: str) -> Any:
    module_name, _, attribute = target.partition(":")
    try:
        return getattr(importlib.import_module(module_name), attribute)
    except ModuleNotFoundError as error:
        if error.name and (module_name == error.name or module_name.startswith(f"{error.name}.")):
            raise UsageError(
                f"{kind} {name!r}: no module {module_name!r}", fix="check the dotted path"
            ) from error
        raise PrerequisiteError(
            f"{kind} {name!r} needs the package {error.name!r}", fix=f"pip install {error.name}"
        ) from error
    except AttributeError as error:
        raise UsageError(
            f"{kind} {name!r}: {module_name} has no {attribute!r}", fix="check the dotted path"
        ) from error
