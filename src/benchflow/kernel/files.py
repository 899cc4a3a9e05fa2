"""The folder of one rollout."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchflow.contracts.config import RolloutConfig
from benchflow.contracts.records import Result, RewardLine, Timing
from benchflow.contracts.reward import VerifyResult
from benchflow.contracts.task import Task
from benchflow.kernel.clock import utc_now
from benchflow.kernel.names import rollout_name, start_name
from benchflow.kernel.session_log import SessionLog
from benchflow.kernel.storage import LineWriter, Redactor, write_json
from benchflow.kernel.tree import Tree

FOLDERS = ("agent", "trajectory")
"""Made at once; ``verifier``, ``artifacts`` and ``trainer`` come with their content."""


class RolloutFiles:
    """Writes each record of a rollout in its place. Only ``result.json`` is synced to disk:
    it is written last, and a folder without it counts as unfinished."""

    def __init__(self, folder: Path, redact: Redactor) -> None:
        self.folder = folder
        self._redact = redact
        for name in FOLDERS:
            (folder / name).mkdir(parents=True, exist_ok=True)
        self._events = SessionLog(folder / "trajectory" / "acp_trajectory.jsonl", redact)
        self._rewards = LineWriter(folder / "rewards.jsonl", redact)
        self._seq = 0
        self._tree: dict[str, Any] | None = None

    @property
    def calls(self) -> Path:
        return self.folder / "trajectory" / "llm_trajectory.jsonl"

    def write(self, name: str, record: Any) -> None:
        write_json(self.folder / name, record, self._redact, sync=False)

    def event(self, node_id: str, event: Mapping[str, object]) -> None:
        """Append one event of the session; ``ts``, ``seq`` and ``node_id`` are added here."""
        self._events.append({"ts": utc_now(), "seq": self._seq, "node_id": node_id, **event})
        self._seq += 1

    def reward(self, verdict: VerifyResult) -> None:
        for event in verdict.events:
            kind = "terminal" if event.granularity == "terminal" else "process"
            self._rewards.append(
                RewardLine(
                    ts=utc_now(),
                    type=kind,
                    source=event.source,
                    value=event.value,
                    tag=event.source,
                    space=event.space,
                    granularity=event.granularity,
                ).model_dump()
            )
        meta: dict[str, Any] = {"items": dict(verdict.items), "mode": verdict.mode}
        if verdict.notes:
            meta["notes"] = list(verdict.notes)
        if verdict.error is not None:
            meta["error"] = {"category": verdict.error.category, "message": str(verdict.error)}
        self._rewards.append(
            RewardLine(
                ts=utc_now(),
                type="terminal",
                source="verifier",
                value=verdict.reward,
                tag="reward",
                meta=meta,
            ).model_dump()
        )

    def tree(self, tree: Tree) -> None:
        """Write ``tree.json``, unless it says the same already."""
        record = tree.record()
        if record != self._tree:
            self.write("tree.json", record)
            self._tree = record

    def close(self, tree: Tree, timing: Timing) -> None:
        self._events.close()
        self._rewards.close()
        self.tree(tree)
        self.write("timing.json", {"schema_version": 1, **timing.model_dump()})

    def result(self, result: Result) -> None:
        write_json(self.folder / "result.json", result.model_dump(), self._redact)


def rollout_folder(config: RolloutConfig, task: Task) -> Path:
    """Where the rollout writes: as told, or ``<jobs_dir>/<job or start time>/<task>__<8 hex>``."""
    if config.rollout_dir is not None:
        return Path(config.rollout_dir)
    job = config.job or f"{start_name()}__{secrets.token_hex(2)}"
    return Path(config.jobs_dir) / job / (config.rollout_name or rollout_name(task.name))
