"""Atomic documents, appended lines, redaction."""

import base64
import json
import math
import os
import re
import subprocess
from urllib.parse import quote, quote_plus

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchflow.contracts.errors import HostPressureError
from benchflow.kernel.storage import (
    MASK,
    LineWriter,
    Redactor,
    dumps,
    read_lines,
    write_json,
)

SECRET = "pl-9f8e7d6c5b4a-zz"

VENDOR_KEYS = [
    "sk-ant-" + "api03-Ab1Cd2Ef3Gh4Ij5Kl6Mn7Op8",
    "sk-proj-Zx9Yw8Vu7Ts6Rq5Po4Nm3",
    "AIzaSyA1b2C3d4E5f6G7h8I9j0KaLbMcNdOePf",
    "AKIAIOSFODNN7EXAMPLE0",
    "dtn_0123456789abcdef0123456789abcdef",
    "ghp_0123456789abcdefghijABCDEFGHIJ012345",
    "hf_abcdefghijklmnopqrstuvwxyz012345",
    "xoxb-123456789012-abcdefghijkl",
    "gsk_abcdefghijklmnopqrstuvwxyz",
    *(f"{start}0123456789abcdefghijABCD" for start in ("xai-", "gho_", "ghs_", "github_pat_", "glpat-")),
    *(f"{start}0123456789abcdefghijABCD" for start in ("sk-", "sk-or-", "ASIA", "ya29.", "xoxp-")),
]


def test_a_document_replaces_the_old_one_whole(tmp_path):
    target = tmp_path / "r.json"
    write_json(target, {"a": 1})
    write_json(target, {"a": 2, "nan": math.nan, "inf": math.inf})
    assert json.loads(target.read_text()) == {"a": 2, "nan": None, "inf": None}
    assert [entry.name for entry in tmp_path.iterdir()] == ["r.json"]


def test_lines_survive_a_cut_tail_and_nul_padding(tmp_path):
    """C32: a cut last line never makes a load fail, and nothing is glued onto it."""
    path = tmp_path / "lines.jsonl"
    path.write_bytes(b'{"n": 1}\n{"n": 2}\n{"n": 3, "tex')
    writer = LineWriter(path)
    writer.append({"n": 4})
    writer.close()
    assert [record["n"] for record in read_lines(path)] == [1, 2, 4]
    path.write_bytes(b'{"n": 1}\n' + b"\0" * 512)
    assert [record["n"] for record in read_lines(path)] == [1]


@given(st.lists(st.dictionaries(st.text(), st.text() | st.integers(-(2**53), 2**53) | st.none()), max_size=8))
def test_what_is_appended_is_read_back(tmp_path_factory, records):
    path = tmp_path_factory.mktemp("lines") / "x.jsonl"
    writer = LineWriter(path)
    for record in records:
        writer.append(record)
    writer.close()
    assert (list(read_lines(path)) if records else []) == records


@pytest.mark.skipif(os.getuid() != 0, reason="mounts a small file system")
def test_a_full_disk_is_one_clear_error_and_no_half_file(tmp_path):
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(tmp_path)], check=True)
    try:
        write_json(tmp_path / "kept.json", {"ok": True})
        with pytest.raises(HostPressureError, match="disk full"):
            write_json(tmp_path / "kept.json", {"x": "y" * 200_000})
        assert json.loads((tmp_path / "kept.json").read_text()) == {"ok": True}
        assert [entry.name for entry in tmp_path.iterdir()] == ["kept.json"]
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


@pytest.mark.parametrize(
    "leak",
    [
        SECRET,
        json.dumps({"k": SECRET}),
        f"https://user:{quote(SECRET, safe='')}@example.invalid/",
        base64.b64encode(SECRET.encode()).decode(),
        base64.b64encode(b"user:" + SECRET.encode()).decode(),
        base64.b64encode(b"x" + SECRET.encode() + b"tail").decode(),
        json.dumps(json.dumps({"k": SECRET})),
    ],
)
def test_a_secret_is_masked_in_every_form(leak):
    """C54: by value, also inside JSON, URLs and base64 at any alignment."""
    masked = Redactor([SECRET]).text(f"before {leak} after")
    assert MASK in masked
    assert SECRET not in masked and base64.b64encode(SECRET.encode()).decode()[:16] not in masked
    assert masked.startswith("before ") and masked.endswith(" after")


@pytest.mark.parametrize("key", VENDOR_KEYS)
def test_known_token_shapes_are_masked_unasked(key):
    assert key not in Redactor().text(f"export KEY={key};")


def test_escaped_secrets_and_short_words():
    quoted = 'quo"ted\\secret'
    assert quoted not in json.loads(Redactor([quoted])(dumps({"v": quoted})))["v"]
    assert Redactor(["on", "yes", "app"]).text("on yes app") == "on yes app"


AWKWARD = 'q"uo\\te/+ üs é0123456789'
"""Every encoding spells this one differently."""


@pytest.mark.parametrize(
    "leak",
    [
        json.dumps(AWKWARD)[1:-1],
        json.dumps(json.dumps(json.dumps(AWKWARD))),
        json.dumps(json.dumps(AWKWARD, ensure_ascii=False), ensure_ascii=False),
        quote(AWKWARD),
        quote(AWKWARD, safe=""),
        quote_plus(AWKWARD),
        base64.b64encode(b"u:" + AWKWARD.encode()).decode(),
    ],
)
def test_a_secret_with_quotes_slashes_and_spaces_is_masked_in_every_form(leak):
    """C54"""
    masked = Redactor([AWKWARD]).text(leak)
    assert MASK in masked and "0123456789" not in masked and leak[6:20] not in masked


@pytest.mark.parametrize("before", range(0, 90, 7))
def test_base64_with_line_breaks_is_masked_whole(before):
    """C54: ``env | base64`` breaks its lines anywhere, and a record escapes the breaks."""
    secret = "Zx9Yw8Vu7Ts6Rq5Po4Nm3-Ab1Cd2Ef3Gh4Ij5Kl6Mn7Op8Qr9-St0Uv1Wx2Yz3Ab4Cd5Ef6Gh7"
    text = base64.encodebytes(b"a" * before + secret.encode() + b"b" * 40)
    plain = text.replace(b"\n", b"")
    core = plain[-(-before // 3) * 4 : (before + len(secret)) // 3 * 4]
    assert core in plain
    for leak in (text, dumps(text.decode()), dumps(dumps(text.decode()).decode())):
        masked = Redactor([secret])(leak)
        assert MASK.encode() in masked
        left = re.sub(rb"\n|\\+n", b"", masked)
        assert [core[at : at + 9] for at in range(len(core) - 8) if core[at : at + 9] in left] == []


def test_each_line_of_a_key_file_is_masked():
    key = "-----BEGIN KEY-----\nMIIEvQIBADANBgkqhkiG\nSWNlIGNyZWFtIGlzIGdv\n-----END KEY-----\n"
    assert Redactor([key]).text("x SWNlIGNyZWFtIGlzIGdv y") == f"x {MASK} y"
    assert Redactor([key]).text("-----END KEY-----") == "-----END KEY-----"


@given(st.text(min_size=6), st.data())
def test_the_beginning_of_a_secret_is_known_as_such(secret, data):
    raw = secret.encode()
    cut = data.draw(st.integers(1, len(raw) - 1))
    assert Redactor([secret]).may_go_on(b"before " + raw[:cut])
    assert not Redactor().may_go_on(raw)


def test_a_secret_inside_a_longer_one_leaves_no_tail():
    assert Redactor(["abcdef", "abcdefghijkl"]).text("abcdefghijkl") == MASK
