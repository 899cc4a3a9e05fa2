"""Exact tokens: where engines put them, what does not fit together, what the agent sees."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchflow.contracts.records import TokenCapture
from benchflow.gateway import tokens


def reply(**choice):
    return {"prompt_token_ids": [1, 2], "choices": [{"index": 0, "message": {}, **choice}]}


def logprobs(ids, values=None, name="token_id:{}"):
    values = values or [-0.5] * len(ids)
    return {"content": [{"token": name.format(i), "logprob": v} for i, v in zip(ids, values, strict=True)]}


def test_ids_and_logprobs_that_agree_are_exact():
    capture = tokens.read("vllm", reply(token_ids=[7, 8], logprobs=logprobs([7, 8], [-1.0, 0.0])))
    TokenCapture.model_validate(capture)
    assert tokens.exact(capture)
    assert capture["prompt_token_ids"] == [1, 2]
    assert capture["completions"] == [{"index": 0, "token_ids": [7, 8], "logprobs": [-1.0, 0.0]}]


@pytest.mark.parametrize(
    "body",
    [
        {"sglext": {"input_ids": [5]}, "choices": [{}]},
        {"choices": [{"prompt_token_ids": [5]}]},
        {"choices": [{"raw_output": {"prompt_token_ids": [5]}}]},
    ],
)
def test_prompt_ids_are_found_where_engines_put_them(body):
    assert tokens.read("vllm", body)["prompt_token_ids"] == [5]


@pytest.mark.parametrize(
    ("choice", "outer"),
    [
        ({"token_ids": [7]}, {}),
        ({"response_token_ids": [7]}, {}),
        ({"raw_output": {"completion_token_ids": [7]}}, {}),
        ({}, {"sglext": {"output_ids": [[7]]}}),
        ({"logprobs": {"content": [{"token": "a", "token_id": 7, "logprob": -1.0}]}}, {}),
        ({"logprobs": logprobs([7])}, {}),
    ],
)
def test_completion_ids_are_found_where_engines_put_them(choice, outer):
    choice = {"logprobs": logprobs([7]), **choice}
    capture = tokens.read("vllm", {**reply(**choice), **outer})
    assert capture["completions"][0]["token_ids"] == [7]
    assert tokens.exact(capture)


def test_logprobs_that_name_other_ids_make_the_ids_unavailable():
    capture = tokens.read("vllm", reply(token_ids=[7, 8], logprobs=logprobs([7, 9])))
    assert capture["completions"][0]["token_ids"] is None
    assert capture["unavailable"]["completion_token_ids"]["reason"] == "mismatch"


def test_logprobs_of_another_length_are_unavailable():
    capture = tokens.read("vllm", reply(token_ids=[7, 8], logprobs=logprobs(["a"], name="{}")))
    assert capture["completions"][0]["logprobs"] is None
    assert capture["unavailable"]["logprobs"] == {
        "reason": "mismatch",
        "detail": "choice 0: 1 logprobs for 2 ids",
    }


def test_one_unnamed_logprob_token_means_that_none_is_believed():
    content = [{"token": "token_id:7", "logprob": -1.0}, {"token": "x", "logprob": -1.0}]
    capture = tokens.read("vllm", reply(logprobs={"content": content}))
    assert capture["completions"][0]["token_ids"] is None
    assert capture["unavailable"]["completion_token_ids"]["reason"] == "not_returned"


def test_a_text_only_reply_lists_everything_that_is_missing():
    capture = tokens.read("vllm", {"choices": [{"index": 0, "message": {"content": "hi"}}]})
    TokenCapture.model_validate(capture)
    assert set(capture["unavailable"]) == {"prompt_token_ids", "completion_token_ids", "logprobs"}
    assert {entry["reason"] for entry in capture["unavailable"].values()} == {"not_returned"}
    assert not tokens.exact(capture)


def test_versions_per_token_are_kept_when_there_is_one_for_each():
    choice = {"token_ids": [7, 8], "logprobs": logprobs([7, 8])}
    capture = tokens.read("vllm", reply(**choice, policy_versions=[3, 4]))
    assert capture["completions"][0]["policy_versions"] == ["3", "4"]
    capture = tokens.read("vllm", reply(**choice, policy_versions=[3]))
    assert "policy_versions" not in capture["completions"][0]


def test_the_agent_sees_neither_ids_nor_logprobs_it_did_not_ask_for():
    body = {**reply(token_ids=[7], logprobs=logprobs([7]), stop_reason=None), "usage": {"prompt_tokens": 2}}
    plain = tokens.strip(body, keep_logprobs=False)
    assert plain == {
        "choices": [{"index": 0, "message": {}, "stop_reason": None}],
        "usage": {"prompt_tokens": 2},
    }
    assert tokens.strip(body, keep_logprobs=True)["choices"][0]["logprobs"] == logprobs([7])
    assert body["choices"][0]["token_ids"] == [7], "the reply itself is not changed"


@given(st.lists(st.integers(0, 300), max_size=8), st.lists(st.integers(0, 300), max_size=8))
def test_two_sources_of_ids_are_exact_only_when_they_agree(ids, named):
    capture = tokens.read("vllm", reply(token_ids=ids, logprobs=logprobs(named)))
    assert tokens.exact(capture) == (ids == named)
