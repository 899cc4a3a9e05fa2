"""The reward-file contract on bytes (C02, C04, C06, C08)."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchflow.contracts.errors import RewardFileError
from benchflow.rewards.reward_files import JSON_LIMIT, TEXT_LIMIT, RewardFile, read_reward


def text(data: bytes | None, kind: str = "file") -> RewardFile:
    return RewardFile("reward.txt") if data is None else RewardFile("reward.txt", kind, data)


def rich(data: bytes | None, kind: str = "file") -> RewardFile:
    return RewardFile("reward.json") if data is None else RewardFile("reward.json", kind, data)


@pytest.mark.parametrize(
    ("data", "value"),
    [
        (b"1", 1.0),
        (b"  1 \n", 1.0),
        (b"0.25\r\n", 0.25),
        (b"+.5", 0.5),
        (b"1.", 1.0),
        (b"1e-3", 0.001),
        (b"-0.0", 0.0),
        (b"0", 0.0),
    ],
)
def test_one_number_is_a_reward(data, value):
    assert read_reward(text(data), rich(None)).reward == value


@pytest.mark.parametrize(
    "data",
    [
        b"", b" \n", b"nan", b"inf", b"-inf", b"Infinity", b"1e400", b"-0.5", b"1.5", b"-1", b"1.0 junk",
        b"1 1", b"1_0", b"0x1", b"True", b"null", b'"1"', b"\xef\xbb\xbf1", b"1\0", b"\xff", "１".encode(),
        b"1,0", b"<stdin>:1: UserWarning: x\n0.5", b"0." + b"0" * TEXT_LIMIT,
    ],
)  # fmt: skip
def test_anything_else_is_an_error_with_the_text(data):
    with pytest.raises(RewardFileError) as caught:
        read_reward(text(data), rich(None))
    assert caught.value.message.startswith("reward.txt ")
    assert len(caught.value.message) < 400
    if data.strip():
        assert "it holds" in caught.value.message and caught.value.detail


@pytest.mark.parametrize(
    ("data", "value", "items"),
    [
        (b"0.75", 0.75, {}),
        (b'{"reward": 1}', 1.0, {}),
        (b'{"reward": 0.5, "speed": 3, "ok": true, "why": "x", "list": [1]}', 0.5, {"speed": 3.0}),
        (b' {"reward": 0.0, "regret": -7.5}\n', 0.0, {"regret": -7.5}),
    ],
)
def test_json_rewards(data, value, items):
    reading = read_reward(text(None), rich(data))
    assert (reading.reward, dict(reading.items)) == (value, items)


@pytest.mark.parametrize(
    "data",
    [
        b"", b'"0.75"', b"true", b"[0.75]", b"null", b"{}", b'{"reward": null}', b'{"reward": "1"}',
        b'{"reward": true}', b'{"reward": [1]}', b'{"reward": NaN}', b'{"reward": 1e400}', b'{"reward": 1.5}',
        b'{"reward": 1.0', b"\xff", b'{"reward": 0, "reward": 1}', b'{"metric": 1}', b"[" * 100_000,
        b'{"reward": 1, "pad": "' + b"x" * JSON_LIMIT + b'"}', b"1" * 5000,
    ],
)  # fmt: skip
def test_other_json_is_an_error_that_names_the_file(data):
    with pytest.raises(RewardFileError, match=r"^reward\.json "):
        read_reward(text(None), rich(data))


def test_metrics_without_a_reward_leave_it_to_the_text():
    reading = read_reward(text(b"0.5"), rich(b'{"latency": 3}'))
    assert (reading.reward, dict(reading.items)) == (0.5, {"latency": 3.0})


@pytest.mark.parametrize("first", [b"0.5", b"-1", b"junk", b""])
def test_both_files_must_agree(first):
    with pytest.raises(RewardFileError, match=r"reward\.txt"):
        read_reward(text(first), rich(b'{"reward": 1}'))


def test_both_files_that_agree():
    assert read_reward(text(b"0.3333333333333333"), rich(b'{"reward": 0.3333333333333333}')).reward == 1 / 3
    with pytest.raises(RewardFileError, match="must agree"):
        read_reward(text(b"0.33"), rich(b'{"reward": 0.3333333333333333}'))


@pytest.mark.parametrize("kind", ["link", "folder", "special"])
def test_only_regular_files_count(kind):
    with pytest.raises(RewardFileError, match=f"reward.txt is a {kind}"):
        read_reward(text(b"", kind), rich(None))


def test_nothing_written():
    with pytest.raises(RewardFileError, match="wrote no reward file"):
        read_reward(text(None), rich(None))


def test_a_declared_range():
    assert read_reward(text(b"-3"), rich(None), (-5.0, 5.0)).reward == -3
    with pytest.raises(RewardFileError, match="outside -5 to 5"):
        read_reward(text(b"5.01"), rich(None), (-5.0, 5.0))


@given(st.binary(max_size=40) | st.text("0123456789.eE+- \nnaif", max_size=12).map(str.encode))
def test_any_text_is_a_reward_in_range_or_an_error(data):
    try:
        reading = read_reward(text(data), rich(None))
    except RewardFileError as error:
        assert "reward.txt" in error.message
    else:
        assert 0 <= reading.reward <= 1 and reading.reward == float(data)


@given(st.floats(0, 1), st.dictionaries(st.text(max_size=5), st.floats(-9, 9) | st.text(max_size=3)))
def test_any_object_with_a_reward(value, extra):
    record = {key: item for key, item in extra.items() if key != "reward"} | {"reward": value}
    reading = read_reward(text(None), rich(json.dumps(record).encode()))
    assert reading.reward == value
    assert dict(reading.items) == {key: item for key, item in extra.items() if isinstance(item, float)} | {}


@given(st.binary(max_size=40) | st.text('{}[]":,.0123456789e-reward ', max_size=20).map(str.encode))
def test_any_json_text_is_a_reward_in_range_or_an_error(data):
    try:
        assert 0 <= read_reward(text(None), rich(data)).reward <= 1
    except RewardFileError as error:
        assert "reward.json" in error.message
