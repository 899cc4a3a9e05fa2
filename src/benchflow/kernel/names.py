"""Names of folders: of tasks, safe on every file system and different for different names, of jobs."""

from __future__ import annotations

import hashlib
import re
import secrets
from datetime import UTC, datetime

_SAFE = re.compile(r"[a-z0-9][a-z0-9_.-]{0,78}[a-z0-9_-]|[a-z0-9]")
_LOOKS_HASHED = re.compile(r"-[0-9a-f]{8}$")


def rollout_slug(name: str) -> str:
    """A folder name for ``name``; also legal as a container name.

    A plain lower-case name is kept. Anything that two names could share (``x/y`` and
    ``x_y``, ``Task`` and ``task``, a cut tail) gets eight hex digits of its own hash, and
    so does a name that ends as if it had them already.
    """
    if _SAFE.fullmatch(name) and ".." not in name and not _LOOKS_HASHED.search(name):
        return name
    word = re.sub(r"[^a-z0-9_.-]+", "-", name.lower())
    word = re.sub(r"\.\.+", ".", word).strip("-._")[:64] or "task"
    return f"{word}-{hashlib.sha256(name.encode('utf-8', 'surrogatepass')).hexdigest()[:8]}"


def rollout_name(task: str) -> str:
    """``<task>__<8 hex>``, another one each time."""
    return f"{rollout_slug(task)}__{secrets.token_hex(4)}"


def start_name() -> str:
    """The start time as a job name; whoever makes the folder makes it unique."""
    return datetime.now(UTC).strftime("%Y-%m-%d__%H-%M-%S")
