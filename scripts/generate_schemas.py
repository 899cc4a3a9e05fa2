"""Write the JSON Schemas of all records to docs/schemas/.

    python scripts/generate_schemas.py [FOLDER]

They are generated from the record models; a test fails when they are not current.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from pydantic import BaseModel

from benchflow.contracts import records as contracts
from benchflow.jobs.doctor import DoctorReport
from benchflow.training import records as training

FOLDER = Path(__file__).parent.parent / "docs" / "schemas"
MODELS: dict[str, type[BaseModel]] = {
    "result": contracts.Result,
    "call": contracts.Call,
    "session-event": contracts.SessionEvent,
    "reward-line": contracts.RewardLine,
    "summary": contracts.Summary,
    "chat-row": training.ChatRow,
    "verifiers-row": training.VerifiersRow,
    "token-row": training.TokenRow,
    "segment": training.SegmentRecord,
    "group-block": training.GroupBlock,
    "manifest": training.Manifest,
    "stream-record": training.StreamRecord,
    "doctor": DoctorReport,
}


def schemas() -> dict[str, str]:
    """File name to content."""
    found = {}
    for name, model in MODELS.items():
        schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **model.model_json_schema()}
        found[f"{name}.json"] = json.dumps(schema, indent=2) + "\n"
    return found


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in schemas().items():
        (folder / name).write_text(content)
    print(f"{len(MODELS)} schemas in {folder}")


if __name__ == "__main__":
    main()
