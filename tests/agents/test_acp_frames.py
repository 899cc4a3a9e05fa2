"""Lines of an agent's stdout to frames, whatever is on them."""

from __future__ import annotations

import json

import orjson
from hypothesis import given
from hypothesis import strategies as st

from benchflow.agents.acp.frames import parse

json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 63) - 1) | st.text(),
    lambda children: st.lists(children, max_size=4) | st.dictionaries(st.text(), children, max_size=4),
    max_leaves=20,
)
frames = st.fixed_dictionaries(
    {"jsonrpc": st.just("2.0"), "method": st.text(), "params": st.dictionaries(st.text(), json_values)}
)


@given(frames, st.booleans(), st.text(alphabet=st.characters(codec="utf-8", exclude_characters="{\n")))
def test_a_frame_is_read_back_however_it_is_written(frame, ascii_only, banner):
    line = json.dumps(frame, ensure_ascii=ascii_only).encode() + b"\r\n"
    assert parse(line) == frame
    assert parse(banner.encode() + line) == frame


@given(st.binary())
def test_no_bytes_break_it_and_what_it_returns_can_be_recorded(data):
    frame = parse(data)
    assert frame is None or orjson.loads(orjson.dumps(frame)) == frame


@given(frames, st.data())
def test_a_frame_with_broken_bytes_is_still_something_we_can_record(frame, data):
    line = bytearray(json.dumps(frame, ensure_ascii=False).encode())
    for _ in range(data.draw(st.integers(1, 4))):
        line[data.draw(st.integers(0, len(line) - 1))] = data.draw(st.integers(0, 255))
    found = parse(bytes(line))
    assert found is None or orjson.dumps(found)


def test_numbers_beyond_64_bits_and_lone_surrogates_are_made_recordable():
    frame = parse(b'{"method":"m","params":{"a":123456789012345678901234567890,"b":"\\ud83d","c":NaN}}')
    assert frame is not None
    assert frame["params"]["a"] == 1.2345678901234568e29
    assert frame["params"]["b"] == "\ufffd"
    assert orjson.dumps(frame)


def test_absurdly_deep_json_is_no_frame():
    assert parse(b'{"method":"m","params":' + b"[" * 100_000 + b"]" * 100_000 + b"}") is None
