"""The call log: one true line per call, whole again when it is read."""

from __future__ import annotations

import asyncio
import errno
import os

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchflow.contracts.records import Call
from benchflow.gateway.calls import load_calls
from benchflow.gateway.capture import CallLog
from benchflow.kernel.storage import Redactor

HELLO = [{"role": "user", "content": "hi"}]


async def test_every_call_has_the_shape_of_the_contract(bench, policy_file, openai):
    openai.reply()
    openai.reply({"error": {"message": "no such model"}}, status=404)
    passed = await bench.open("openai/m")
    await bench.ask(passed, HELLO)
    await bench.ask(passed, HELLO, stream=True)
    policy = await bench.open(policy_file("turns: [{fail: {status: 503}}, {say: a}]"))
    await bench.ask(policy, HELLO)
    await bench.ask(policy, [*HELLO, {"role": "assistant", "content": "?"}, *HELLO], temperature=0.5)
    for route in (passed, policy):
        for call in bench.calls(route):
            Call.model_validate(call)
            assert call["request"]["body"]["messages"][0] == HELLO[0]


async def test_a_record_says_what_was_asked_answered_and_counted(bench, policy_file):
    route = await bench.open(policy_file("turns: [{say: fine}]"), policy_version="3")
    await bench.ask(route, HELLO, temperature=0.5, top_p=0.9)
    (call,) = bench.calls(route)
    assert call["rollout"] == "t__1"
    assert call["response"]["status_code"] == 200
    assert call["response"]["body"]["choices"][0]["message"]["content"] == "fine"
    assert call["duration_ms"] >= 0
    facts = call["metadata"]
    assert facts["policy_version"] == "3"
    assert facts["finish_reason"] == "stop"
    assert facts["usage"]["completion_tokens"] == len("fine") + 1
    assert (facts["cost_usd"], facts["cost_reason"]) == (None, "self-hosted")
    assert facts["sampling"]["requested"] == {"temperature": 0.5, "top_p": 0.9}
    assert facts["sampling"]["submitted"]["top_p"] == 1.0
    assert facts["token_capture"]["unavailable"] == {}


async def test_calls_come_back_whole_though_each_line_holds_only_what_is_new(bench, policy_file, bash_tool):
    turns = "".join(f"  - {{say: step {n}, run: 'echo {n}'}}\n" for n in range(30))
    route = await bench.open(policy_file("turns:\n" + turns))
    sent = []
    messages = [{"role": "system", "content": "s" * 5000}, {"role": "user", "content": "go"}]
    for _ in range(30):
        sent.append(list(messages))
        _, reply = await bench.ask(route, messages, tools=[bash_tool], metadata={"x": "y" * 500})
        message = reply["choices"][0]["message"]
        call_id = message["tool_calls"][0]["id"]
        messages += [message, {"role": "tool", "tool_call_id": call_id, "content": "o" * 300}]
    calls = bench.calls(route)
    assert [call["request"]["body"]["messages"] for call in calls] == sent
    assert all(call["request"]["body"]["tools"] == [bash_tool] for call in calls)
    assert all(call["request"]["body"]["metadata"] == {"x": "y" * 500} for call in calls)
    prompts = [call["metadata"]["token_capture"]["prompt_token_ids"] for call in calls]
    assert len(prompts[-1]) == calls[-1]["metadata"]["usage"]["prompt_tokens"]
    sizes = [len(line) for line in route.log.path.read_bytes().splitlines()]
    assert max(sizes[5:]) < 1.5 * min(sizes[5:]), "a line grows with the conversation"


async def test_a_last_line_cut_by_a_crash_is_passed_over(bench, policy_file):
    route = await bench.open(policy_file("turns: [{say: a}]"))
    await bench.ask(route, HELLO)
    await bench.ask(route, [*HELLO, {"role": "assistant", "content": "a"}, *HELLO])
    path = route.log.path
    data = path.read_bytes()
    path.write_bytes(data[: len(data) - 40])
    assert [call["index"] for call in load_calls(path)] == [0]
    assert list(load_calls(path.with_name("missing.jsonl"))) == []


async def test_a_lost_line_is_told_by_the_calls_that_needed_it(bench, policy_file):
    route = await bench.open(policy_file("turns: [{say: a}, {say: b}]"))
    await bench.ask(route, HELLO)
    await bench.ask(route, [*HELLO, {"role": "assistant", "content": "a"}, *HELLO])
    path = route.log.path
    path.write_bytes(path.read_bytes().splitlines(keepends=True)[1])
    (call,) = load_calls(path)
    assert call["request"]["prefix_lost"] is True
    capture = call["metadata"]["token_capture"]
    assert capture["prompt_token_ids"] is None
    assert capture["unavailable"]["prompt_token_ids"]["reason"] == "record_lost"


async def test_a_prompt_of_3_mib_arrives_byte_identical(bench, openai):
    openai.reply()
    route = await bench.open("openai/m")
    text = "".join(chr(32 + n % 900) for n in range(3 * 2**20 // 2))
    body = orjson.dumps({"model": "m", "messages": [{"role": "user", "content": text}], "x_unknown": [1.50]})
    assert len(body) > 3 * 2**20 // 2
    padded = body[:-1] + b' , "spaced" :  1.0000 }'
    async with bench.post(route, padded) as reply:
        assert reply.status == 200
    assert openai.bodies == [padded]
    (call,) = bench.calls(route)
    assert call["request"]["body"]["messages"][0]["content"] == text


async def test_a_policy_gets_the_same_3_mib_of_text(bench, flaky):
    flaky.reply()
    route = await bench.open("vllm/m", policy_url=flaky.url)
    text = "line é\u2028\U0001f600\n" * (3 * 2**20 // 12)
    await bench.ask(route, [{"role": "user", "content": text}])
    assert orjson.loads(flaky.bodies[0])["messages"][0]["content"] == text


async def test_half_a_surrogate_pair_reaches_the_model_and_is_recorded(bench, openai):
    openai.reply()
    route = await bench.open("openai/other")
    async with bench.post(
        route, b'{"model": "m", "messages": [{"role": "user", "content": "a\\ud83d"}]}'
    ) as r:
        assert r.status == 200
    assert b"\\ud83d" in openai.bodies[0] and b'"other"' in openai.bodies[0]
    (call,) = bench.calls(route)
    assert call["request"]["body"]["messages"][0]["content"] == "a\ufffd"


async def test_keys_are_in_no_record(bench, openai):
    async def echo(request):
        from aiohttp import web

        reply = {"echo": request.headers["authorization"], "choices": [{"index": 0, "message": {}}]}
        return web.json_response(reply, headers={"set-cookie": "session=1"})

    openai.answers.append(echo)
    route = await bench.open("openai/m")
    headers = {"authorization": f"Bearer {route.key}", "x-api-key": "agents-own", "cookie": "a=b"}
    async with bench.post(route, {"messages": HELLO}, headers=headers) as reply:
        assert reply.status == 200
    assert openai.headers[0]["authorization"] == "Bearer secret-key-of-the-provider"
    written = route.log.path.read_text()
    for secret in ("secret-key-of-the-provider", "agents-own", route.key, "session=1", "a=b"):
        assert secret not in written
    assert "[REDACTED]" in written


async def test_a_full_disk_ends_the_call_and_is_not_an_endpoint_failure(bench, policy_file, monkeypatch):
    route = await bench.open(policy_file("turns: [{say: a}]"))
    written = os.write

    def full(fd, data):
        if b"schema_version" in bytes(data):
            raise OSError(errno.ENOSPC, "no space left")
        return written(fd, data)

    monkeypatch.setattr(os, "write", full)
    status, reply = await bench.ask(route, HELLO)
    assert (status, reply["error"]["code"]) == (503, "host_pressure")
    assert route.totals().failure[0] == "host_pressure"


async def test_calls_at_the_same_time_get_lines_and_indexes_of_their_own(bench, policy_file):
    route = await bench.open(policy_file("turns: [{say: a, delay_ms: 1}]"))
    asked = (bench.ask(route, [{"role": "user", "content": str(n)}]) for n in range(40))
    assert {status for status, _ in await asyncio.gather(*asked)} == {200}
    calls = bench.calls(route)
    assert [call["index"] for call in calls] == list(range(40))
    assert {call["request"]["body"]["messages"][0]["content"] for call in calls} == set(map(str, range(40)))


_messages = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant"]), "content": st.text(max_size=5)}),
    max_size=4,
)
_ids = st.lists(st.integers(0, 5), max_size=6)


@given(st.lists(st.tuples(_messages, _ids, _ids), max_size=8))
def test_whatever_is_written_is_read_back(tmp_path_factory, written):
    """Prefixes that appear by chance, repeated prompts, empty ones: all come back."""
    path = tmp_path_factory.mktemp("log") / "calls.jsonl"
    log = CallLog(path, Redactor())
    for messages, prompt, completion in written:
        capture = {
            "prompt_token_ids": prompt,
            "completions": [{"index": 0, "token_ids": completion}],
            "unavailable": {},
        }
        log.append({"request": {"body": {"messages": messages}}, "metadata": {"token_capture": capture}})
    log.close()
    read = [
        (
            call["request"]["body"]["messages"],
            call["metadata"]["token_capture"]["prompt_token_ids"],
            call["metadata"]["token_capture"]["completions"][0]["token_ids"],
        )
        for call in load_calls(path)
    ]
    assert read == written


def test_a_newer_file_is_refused(tmp_path):
    path = tmp_path / "calls.jsonl"
    path.write_bytes(b'{"schema_version": 99, "index": 0}\n')
    with pytest.raises(ValueError, match="upgrade"):
        list(load_calls(path))
