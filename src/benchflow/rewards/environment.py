"""The environment variables a hardened verifier runs with."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

from benchflow.contracts.sandbox import Sandbox
from benchflow.contracts.task import VerifierPlan
from benchflow.rewards.inventory import PATH, check, is_inside, names

GUARD = "/verifier-guard"
"""Folder of ``pytest_guard``, the only one on the verifier's ``PYTHONPATH``."""
_GUARD_MODULE = "benchflow_pytest_guard"
GUARD_FILE = f"{GUARD}/{_GUARD_MODULE}.py"

_PYTHON = "PATH HOME STARTUP USERBASE PLATLIBDIR WARNINGS BREAKPOINT INSPECT PYCACHEPREFIX EXECUTABLE"
_TOOLS = (
    "PYTEST_ADDOPTS PYTEST_PLUGINS PERL5LIB PERL5OPT PERL5DB RUBYLIB RUBYOPT NODE_OPTIONS NODE_PATH "
    "GIT_CONFIG_GLOBAL GIT_CONFIG_SYSTEM GIT_EXEC_PATH"
)
_SHELL = "PATH HOME USER LOGNAME LD_PRELOAD LD_AUDIT BASH_ENV ENV PROMPT_COMMAND CDPATH IFS"
_REMOVED = frozenset([*(f"PYTHON{name}" for name in _PYTHON.split()), *f"{_TOOLS} {_SHELL}".split()])
_PATHS = ("LD_LIBRARY_PATH",)
# Run as the agent: prints the folders that it can write neither directly nor by way of a
# parent, with shell built-ins only.
_TRUSTED = r"""
for folder; do
    kept=$folder
    for place in "$folder" "$(cd -P "$folder" 2>/dev/null && pwd -P)"; do
        [ "$place" ] || kept=
        while [ "$place" ]; do
            if [ -w "$place" ] || [ -O "$place" ]; then kept=; fi
            place=${place%/*}
        done
    done
    [ -z "$kept" ] || printf '%s\0' "$kept"
done
"""


async def hardened_env(
    sandbox: Sandbox,
    verifier: VerifierPlan,
    *,
    base: Mapping[str, str],
    own: Mapping[str, str],
    workspace: str,
    agent_user: str | None,
    pytest: bool,
    timeout: float,
) -> dict[str, str]:
    """``base`` (image and task) without what steers tools, then ``own`` (the verifier's
    declared variables), then what pins the tools. Folders the agent can write are left
    out of every search path."""
    searched = {key: _folders(base.get(key, "")) for key in ("PATH", *_PATHS)}
    asked = {folder for folders in searched.values() for folder in folders} - set(PATH.split(":"))
    if agent_user is not None:  # a fresh sandbox holds the agent's files under another owner
        asked = {folder for folder in asked if not is_inside(folder, workspace)}
    trusted = await _trusted(sandbox, sorted(asked), agent_user, timeout) | set(PATH.split(":"))
    env = {key: value for key, value in base.items() if key not in _REMOVED and key not in _PATHS}
    for key in _PATHS:
        if kept := [folder for folder in searched[key] if folder in trusted]:
            env[key] = ":".join(kept)
    path = [folder for folder in searched["PATH"] if folder in trusted]
    env["PATH"] = ":".join(dict.fromkeys([*path, *PATH.split(":")]))
    env |= _identity(verifier.user, agent_user)
    env |= own
    return env | _python(verifier, own, workspace, agent_user, pytest)


def _identity(user: str | None, agent_user: str | None) -> dict[str, str]:
    """A home that the agent cannot have filled."""
    if user is None:
        return {"HOME": "/root", "USER": "root", "LOGNAME": "root"}
    home = "/nonexistent" if user == agent_user else f"/home/{user}"
    return {"HOME": home, "USER": user, "LOGNAME": user}


def _python(
    verifier: VerifierPlan, own: Mapping[str, str], workspace: str, agent_user: str | None, pytest: bool
) -> dict[str, str]:
    options = ["-c", "/dev/null", f"--rootdir={workspace}", f"--confcutdir={verifier.target}"]
    options += ["-p", "no:cacheprovider"]
    env = {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONNOUSERSITE": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    if pytest:
        options += ["-p", _GUARD_MODULE]
        env["PYTHONPATH"] = ":".join(filter(None, [GUARD, own.get("PYTHONPATH", "")]))
        home = [f"/home/{agent_user}"] if agent_user else []
        env["BENCHFLOW_UNTRUSTED"] = ":".join([workspace, *home, "/tmp", "/var/tmp", "/dev/shm"])
        env["BENCHFLOW_PYTEST_PLUGINS"] = ",".join(verifier.pytest_plugins)
    env["PYTEST_ADDOPTS"] = f"{shlex.join(options)} {own.get('PYTEST_ADDOPTS', '')}".strip()
    return env


def _folders(value: str) -> list[str]:
    return [folder.rstrip("/") or "/" for folder in value.split(":") if folder.startswith("/")]


async def _trusted(
    sandbox: Sandbox, folders: Sequence[str], agent_user: str | None, timeout: float
) -> set[str]:
    if not folders or agent_user is None:
        return set(folders)
    argv = ["/bin/sh", "-c", _TRUSTED, "trusted", *folders]
    done = await sandbox.exec(
        argv, user=agent_user, clean_env=True, env={"PATH": PATH}, cwd="/", timeout=timeout
    )
    check(done, "checking the search path")
    return set(names(done.stdout))
