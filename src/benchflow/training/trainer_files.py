"""The files in a rollout's own ``trainer/`` folder, written when it is finished."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchflow.kernel.storage import NO_REDACTION, Redactor, dumps, write_bytes
from benchflow.training.calls import Skip
from benchflow.training.formats import Source, verifiers
from benchflow.training.rollouts import RolloutRecord

if TYPE_CHECKING:
    from benchflow.contracts.records import Result


def write_trainer_files(
    rollout_dir: Path, result: Result | Mapping[str, Any], redact: Redactor = NO_REDACTION
) -> bool:
    """Write ``trainer/verifiers.jsonl``: one line with prompt, completion and reward. Returns
    False, and writes nothing, when the rollout has no conversation (an oracle's, or one that
    never reached its model)."""
    record = dict(result) if isinstance(result, Mapping) else result.model_dump()
    rollout = RolloutRecord(str(rollout_dir), os.path.dirname(os.path.abspath(rollout_dir)), record)
    try:
        rows = verifiers.rows(Source(rollout))
    except Skip:
        return False
    folder = Path(rollout_dir, "trainer")
    folder.mkdir(exist_ok=True)
    data = b"".join(dumps(row) + b"\n" for row in rows)
    write_bytes(folder / "verifiers.jsonl", redact(data), sync=False)
    return True
