"""Golden files pin every record: what is written, and what is read back from it.

After a wanted change run with UPDATE_GOLDEN=1 and read the difference.
"""

from __future__ import annotations

import json
import os
import runpy
from pathlib import Path

import pytest

from benchflow.contracts import records as contracts
from benchflow.training import records as training
from benchflow.training.convert import convert, make_options
from benchflow.training.stream import stream_rollouts

GOLDEN = Path(__file__).parent / "golden"
ROOT = Path(__file__).parents[2]
CONTRACTS = {
    "result": contracts.Result,
    "call": contracts.Call,
    "session_event": contracts.SessionEvent,
    "reward_line": contracts.RewardLine,
    "summary": contracts.Summary,
}
WRITTEN = {
    "chat_row": training.ChatRow,
    "verifiers_row": training.VerifiersRow,
    "token_row": training.TokenRow,
    "group_block": training.GroupBlock,
    "manifest": training.Manifest,
    "stream_record": training.StreamRecord,
}


def golden(name):
    return json.loads((GOLDEN / f"{name}.json").read_text())


@pytest.fixture
async def written(jobs, tmp_path):
    """One of each record, made by the code that writes it; machine-dependent parts replaced."""
    jobs.rollout(0.0, trial=1, error="timeout")
    jobs.rollout(1.0, trial=2)
    jobs.rollout(None, trial=1, task="other", group_id="group-2", mask="sandbox_lost")
    rows, manifest = tmp_path / "rows.jsonl", tmp_path / "manifest.json"

    def first_row(format):
        convert(jobs.root, rows, make_options(format=format, advantage="grpo"), manifest)
        return json.loads(rows.read_text().replace(str(jobs.root), "jobs").splitlines()[0])

    records = {f"{name}_row": first_row(format) for name, format in
               (("chat", "chat"), ("verifiers", "verifiers"), ("token", "tokens"))}  # fmt: skip
    records["group_block"] = records["chat_row"]["group"]
    records["manifest"] = json.loads(manifest.read_text())
    records["manifest"]["versions"]["benchflow"] = "0"
    stream = stream_rollouts(jobs.root, follow=False, group_size=2)
    streamed = [record async for record in stream]
    records["stream_record"] = json.loads(json.dumps(streamed[0]).replace(str(jobs.root), "jobs"))
    return records


async def test_writers_write_what_the_golden_files_say(written):
    if os.environ.get("UPDATE_GOLDEN"):
        for name, record in written.items():
            (GOLDEN / f"{name}.json").write_text(json.dumps(record, indent=2) + "\n")
    for name in WRITTEN:
        assert written[name] == golden(name), name


@pytest.mark.parametrize("name", WRITTEN)
def test_what_is_written_reads_back_the_same(name):
    record = golden(name)
    assert WRITTEN[name].model_validate(record).model_dump(mode="json", exclude_unset=True) == record


@pytest.mark.parametrize("name", CONTRACTS)
def test_contract_records_read_and_write_the_same(name):
    record = golden(name)
    assert CONTRACTS[name].model_validate(record).model_dump(mode="json") == record


def test_schemas_are_current():
    script = runpy.run_path(str(ROOT / "scripts" / "generate_schemas.py"))
    found = {path.name: path.read_text() for path in (ROOT / "docs" / "schemas").glob("*.json")}
    assert found == script["schemas"](), "run python scripts/generate_schemas.py"
