"""Raw output on the host: bounded, and masked whatever the chunks."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from benchflow.agents.logs import TAIL, RawLog
from benchflow.kernel.storage import Redactor


def written(path: Path, chunks: list[bytes], **options) -> bytes:
    path.unlink(missing_ok=True)
    log = RawLog(path, options.pop("redact", bytes), **options)
    for chunk in chunks:
        log.write(chunk)
    log.close()
    return path.read_bytes() if path.exists() else b""


@given(st.lists(st.binary(max_size=50), max_size=20))
def test_what_is_written_is_kept_as_it_was(tmp_path_factory, chunks):
    path = tmp_path_factory.getbasetemp() / "whole.txt"
    assert written(path, chunks) == b"".join(chunks)


def test_a_secret_is_masked_wherever_it_is_cut(tmp_path: Path):
    text = b"before\nkey=hunter2hunter2 after\n"
    for cut in range(len(text)):
        kept = written(tmp_path / "log", [text[:cut], text[cut:]], redact=Redactor(["hunter2hunter2"]))
        assert kept == b"before\nkey=[REDACTED] after\n"


def test_a_secret_at_the_cut_of_an_endless_line_is_masked(tmp_path: Path):
    secret = b"hunter2hunter2"
    for start in range((1 << 20) - 20, (1 << 20) + 20):
        chunk = b"x" * start + secret
        kept = written(tmp_path / "log", [chunk, b"y" * 10], redact=Redactor([secret.decode()]))
        assert secret not in kept


def test_beyond_the_limit_head_and_tail_are_kept(tmp_path: Path):
    lines = [b"%08d\n" % number for number in range(100_000)]
    kept = written(tmp_path / "log", lines, limit=90_000)
    assert kept.startswith(b"00000000\n") and kept.endswith(b"00099999\n")
    assert b"[... %d bytes left out ...]" % (900_000 - 90_000 - TAIL) in kept


def test_a_little_beyond_the_limit_nothing_is_lost(tmp_path: Path):
    kept = written(tmp_path / "log", [b"12345\n", b"67890\n"], limit=8)
    assert kept.replace(b"\n[... 0 bytes left out ...]\n", b"") == b"12345\n67890\n"


def test_the_tail_includes_an_unfinished_line(tmp_path: Path):
    log = RawLog(tmp_path / "log", bytes)
    log.write(b"one\ntwo")
    assert log.tail() == "one\ntwo"
    assert log.tail(5) == "e\ntwo"
    log.close()


def test_a_second_session_continues_the_file(tmp_path: Path):
    for text in (b"first\n", b"second\n"):
        log = RawLog(tmp_path / "log", bytes)
        log.write(text)
        log.close()
    assert (tmp_path / "log").read_bytes() == b"first\nsecond\n"
