"""The labels that say whose a container or snapshot is: the engine's own lease.

They come into being with what they mark, in one request, so nothing of ours ever exists
without its owner's name on it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchflow.kernel.ownership import Owner
from benchflow.kernel.storage import dumps

KIND, ROLLOUT, JOB = "benchflow.kind", "benchflow.rollout", "benchflow.job"
OWNER, HOME = "benchflow.owner", "benchflow.home"


def labels(kind: str, home: Path, rollout: str = "", job: str = "") -> dict[str, str]:
    return {KIND: kind, ROLLOUT: rollout, JOB: job, OWNER: own_label(), HOME: str(home)}


def own_label() -> str:
    """This process, as the value of a label."""
    return dumps(Owner.current().record()).decode()


def ours(kind: str, home: Path) -> dict[str, Any]:
    """The engine's filter for what this state folder's runs have made."""
    return {"filters": {"label": [f"{KIND}={kind}", f"{HOME}={home}"]}}


def owner_of(found: Mapping[str, str], label: str = OWNER) -> Owner | None:
    """None for a label that nobody of us has written."""
    try:
        return Owner.parse(json.loads(found[label]))
    except (ValueError, KeyError, TypeError):
        return None
