"""The line a rollout leaves for trainers in its own folder."""

from __future__ import annotations

from benchflow.contracts.records import Result
from benchflow.kernel.storage import Redactor
from benchflow.training.records import VerifiersRow
from benchflow.training.trainer_files import write_trainer_files


def test_one_line_per_scored_rollout(jobs):
    folder = jobs.rollout(0.5)
    result = Result.model_validate_json((folder / "result.json").read_bytes())
    assert write_trainer_files(folder, result, Redactor(["counts.csv"]))
    [line] = (folder / "trainer" / "verifiers.jsonl").read_bytes().splitlines()
    row = VerifiersRow.model_validate_json(line)
    assert (row.reward, len(row.prompt), len(row.completion)) == (0.5, 2, 3)
    assert row.completion[1].content == "[REDACTED]"


def test_nothing_is_written_without_a_conversation(jobs):
    folder = jobs.rollout(1.0, agent="oracle", model=None, calls=[])
    result = Result.model_validate_json((folder / "result.json").read_bytes())
    assert not write_trainer_files(folder, result)
    assert list((folder / "trainer").iterdir()) == []


def test_a_masked_reward_is_not_handed_on(jobs):
    folder = jobs.rollout(1.0, mask="sandbox_lost")
    result = Result.model_validate_json((folder / "result.json").read_bytes())
    assert write_trainer_files(folder, result.model_dump())
    [line] = (folder / "trainer" / "verifiers.jsonl").read_bytes().splitlines()
    assert VerifiersRow.model_validate_json(line).reward is None
