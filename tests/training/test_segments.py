"""From calls to segments: exact prefixes, branches, retries, and what must always hold."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchflow.training.records import SegmentRecord
from benchflow.training.segments import segment_calls

USER = [{"role": "user", "content": "go"}]
OTHER = [{"role": "user", "content": "another matter"}]
ANSWER = {"role": "assistant", "content": "x"}


@pytest.fixture
def step(call):
    def make(index, prompt, completion, messages=USER, **details):
        return call(index, messages, ANSWER, prompt=prompt, completion=completion, **details)

    return make


def shapes(segmented):
    return [(s.start_reason, s.calls, s.prompt_ids, s.completion_ids) for s in segmented.segments]


def test_prompts_that_extend_exactly_make_one_segment(step):
    found = segment_calls([step(0, [1, 2], [3]), step(1, [1, 2, 3, 4], [5, 6])], "r")
    assert shapes(found) == [("start", [0, 1], [1, 2], [3, 4, 5, 6])]
    [segment] = found.segments
    assert segment.action_mask == [1, 0, 1, 1]
    assert segment.logprobs == [-0.5, 0.0, -0.5, -0.5]
    assert segment.call_spans == [[0, 1], [2, 4]]
    assert (segment.rollout_id, segment.loss_normaliser) == ("r", 3)
    assert found.drift == {"clean": 1, "realigned": 0, "forked": 0, "tokens_lost": 0}


def test_an_answer_that_comes_back_in_other_tokens_starts_a_new_segment(step):
    found = segment_calls([step(0, [1, 2], [3]), step(1, [1, 2, 33, 4], [5])])
    assert shapes(found) == [("start", [0], [1, 2], [3]), ("rerender", [1], [1, 2, 33, 4], [5])]
    assert found.segments[0].thread == found.segments[1].thread
    assert found.drift["forked"] == 1
    assert all(segment.loss_normaliser == 2 for segment in found.segments)


def test_a_shared_prefix_is_trained_once_when_two_calls_extend_it(step):
    calls = [step(0, [1], [2]), step(1, [1, 2, 3], [4], node="a"), step(2, [1, 2, 5], [6], node="b")]
    found = segment_calls(calls)
    assert shapes(found) == [("start", [0, 1], [1], [2, 3, 4]), ("branch", [2], [1, 2, 5], [6])]


def test_branch_children_may_ask_the_same_thing(step):
    calls = [step(0, [1], [2]), step(1, [1, 2, 3], [4], node="a"), step(2, [1, 2, 3], [5], node="b")]
    found = segment_calls(calls)
    assert sum(segment.n_sampled for segment in found.segments) == 3


def test_a_call_that_was_sent_again_is_kept_once(step):
    lost, kept = step(0, [1], [2]), step(1, [1], [3])
    found = segment_calls([lost, kept, step(2, [1, 3, 4], [5])])
    assert shapes(found) == [("start", [1, 2], [1], [3, 4, 5])]
    assert found.drift["tokens_lost"] == 1
    found = segment_calls([lost, kept, step(2, [1, 2, 4], [5])])
    assert shapes(found) == [("start", [0, 2], [1], [2, 4, 5])]
    assert segment_calls([lost, kept]).segments[0].calls == [1]


def test_compaction_and_dropped_calls_explain_a_new_segment(step, call):
    compaction = call(1, USER, ANSWER, purpose="compaction")
    found = segment_calls([step(0, [1], [2]), compaction, step(2, [9, 9], [8], OTHER)])
    assert [s.start_reason for s in found.segments] == ["start", "compaction"]
    assert found.segments[0].thread == found.segments[1].thread
    dropped = call(1, USER, None, status=500)
    found = segment_calls([step(0, [1], [2]), dropped, step(2, [1, 7], [8])])
    assert [s.start_reason for s in found.segments] == ["start", "after_dropped_call"]


def test_unrelated_conversations_are_threads_of_their_own(step):
    found = segment_calls([step(0, [1], [2]), step(1, [7], [8], OTHER)])
    assert [(s.thread, s.start_reason) for s in found.segments] == [(0, "start"), (1, "start")]


def test_helpers_and_sub_agents_are_left_out(step):
    calls = [step(0, [1], [2]), step(1, [5], [6], purpose="title"), step(2, [7], [8], purpose="subagent")]
    found = segment_calls(calls)
    assert (found.calls, [s.calls for s in found.segments]) == (1, [[0]])


def test_without_ids_messages_chain_the_calls(call):
    longer = [*USER, ANSWER, {"role": "user", "content": "more"}]
    found = segment_calls([call(0, USER, ANSWER), call(1, longer, ANSWER)])
    [segment] = found.segments
    assert (segment.kind, segment.calls, segment.completion_ids) == ("text", [0, 1], None)
    assert not found.capture_status()["training_grade"]


def test_logprobs_that_do_not_match_are_unknown_not_zero(step):
    calls = [step(0, [1], [2, 3], logprobs=[-0.1]), step(1, [1, 2, 3, 4], [5])]
    found = segment_calls(calls)
    assert found.segments[0].logprobs is None
    assert found.capture_status()["status"] == "partial"
    assert found.unavailable == {"logprobs": {"not_returned": 1}}


def test_token_versions_follow_the_tokens(step):
    first, second = step(0, [1], [2], version="v1"), step(1, [1, 2, 3], [4, 5], version="v2")
    second["metadata"]["token_capture"]["completions"][0]["policy_versions"] = ["v1", "v2"]
    [segment] = segment_calls([first, second]).segments
    assert segment.policy_versions == ["v1", "v2"]
    assert segment.token_policy_versions == [None, None, "v1", "v2"]


IDS = st.lists(st.integers(0, 3), min_size=1, max_size=4)


@given(st.lists(st.tuples(st.integers(-1, 8), IDS, IDS, st.sampled_from(["n1", "n2"])), max_size=9))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_what_must_hold_for_any_graph_of_calls(call, steps):
    """Each step extends an earlier call (or starts afresh at -1) by some environment tokens."""
    calls, wholes = [], []
    for index, (parent, environment, completion, node) in enumerate(steps):
        base = wholes[parent % len(wholes)] if wholes and parent >= 0 else []
        prompt = base + environment
        calls.append(call(index, USER, ANSWER, prompt=prompt, completion=completion, node=node))
        wholes.append(prompt + completion)
    found = segment_calls(calls, "r")
    trained = [index for segment in found.segments for index in segment.calls]
    assert len(trained) == len(set(trained))
    for segment in found.segments:
        SegmentRecord.model_validate(segment.record())
        assert len(segment.completion_ids) == len(segment.action_mask) == len(segment.logprobs)
        assert segment.prompt_ids + segment.completion_ids == wholes[segment.calls[-1]]
        for index, (start, end) in zip(segment.calls, segment.call_spans, strict=True):
            assert segment.completion_ids[start:end] == steps[index][2]
            assert segment.action_mask[start:end] == [1] * (end - start)
        assert sum(segment.action_mask) == sum(end - start for start, end in segment.call_spans)
        assert all(p == 0.0 for p, m in zip(segment.logprobs, segment.action_mask, strict=True) if not m)
    kept = sum(len(steps[index][2]) for index in trained)
    assert all(segment.loss_normaliser == kept for segment in found.segments)
    assert found.drift["tokens_lost"] + kept == sum(len(step[2]) for step in steps)
