"""The record of a session: every event in its order, secrets masked across pieces (C54)."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchflow.kernel.session_log import SessionLog
from benchflow.kernel.storage import MASK, Redactor, read_lines

SECRET = "pl-9f8e7d6c5b4a-zz"


def piece(text, kind="agent_message"):
    update = {"sessionUpdate": f"{kind}_chunk", "content": {"type": "text", "text": text}}
    return {"kind": kind, "update": update}


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    """Writes records and returns what is on disk, and what was there before the end."""

    def write(records):
        path = tmp_path_factory.mktemp("log") / "acp_trajectory.jsonl"
        log = SessionLog(path, Redactor([SECRET]))
        for record in records:
            log.append(record)
        early = list(read_lines(path)) if path.exists() else []
        log.close()
        return list(read_lines(path)), early

    return write


def said(records):
    return "".join(record["update"]["content"]["text"] for record in records)


@pytest.mark.parametrize("size", [1, 2, 5, len(SECRET) - 1])
def test_a_secret_in_pieces_is_masked_and_no_event_is_lost(log, size):
    text = f"the key is {SECRET}, keep it"
    pieces = [piece(text[at : at + size]) for at in range(0, len(text), size)]
    written, _ = log(pieces)
    assert said(written) == f"the key is {MASK}, keep it"
    assert len(written) == len(pieces)


def test_pieces_of_different_kinds_are_never_joined(log):
    records = [piece("pl-9f8e7d"), piece("6c5b4a-zz", "agent_thought"), {"kind": "turn_end"}]
    assert log(records)[0] == records


def test_only_what_may_become_a_secret_waits(log):
    records = [
        piece("hello "),
        piece("the key is pl-9f8e"),
        {"kind": "tool_call", "input": "x"},
        piece("pl-"),
    ]
    written, early = log(records)
    assert (written, early) == (records, records[:3])


@given(st.lists(st.one_of(st.text(alphabet="pl-9f8", max_size=4).map(piece), st.just({"kind": "turn_end"}))))
def test_what_holds_no_secret_is_written_as_it_came(log, records):
    assert (log(records)[0] if records else []) == records
