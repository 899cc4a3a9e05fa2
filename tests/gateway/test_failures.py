"""Trouble upstream: waited out, told once and clearly, or passed on."""

from __future__ import annotations

import asyncio

import pytest
from aiohttp import web

from benchflow.contracts.errors import PrerequisiteError
from benchflow.contracts.gateway import ModelSpec
from benchflow.gateway import failures
from benchflow.gateway.client import Client
from benchflow.gateway.exchange import Patience
from benchflow.gateway.probe import probe_endpoint
from benchflow.gateway.providers import resolve
from benchflow.gateway.upstream import Breaker, Guard, HttpUpstream

HELLO = [{"role": "user", "content": "hi"}]
MORE = [*HELLO, {"role": "assistant", "content": "hello"}, {"role": "user", "content": "more"}]


async def test_passing_trouble_is_waited_out_and_recorded(bench, openai):
    openai.reply({"error": {"message": "busy"}}, status=503)
    openai.reply({"error": {"message": "slow down"}}, status=429, **{"retry-after": "0.02"})
    openai.reply()
    route = await bench.open("openai/m")
    status, _ = await bench.ask(route, HELLO)
    assert status == 200
    calls = bench.calls(route)
    assert [call["response"]["status_code"] for call in calls] == [503, 429, 200]
    assert [call["metadata"]["attempt"] for call in calls] == [1, 2, 3]
    assert [call["metadata"]["retry_of"] for call in calls] == [None, 0, 0]
    assert [call["metadata"]["error"] for call in calls] == ["busy", "slow down", None]
    totals = route.totals()
    assert (totals.calls, totals.failed_calls, totals.failure) == (1, 0, None)
    assert 0.02 <= totals.retry_wait_sec <= totals.model_wait_sec


async def test_a_dropped_connection_is_retried(bench, openai):
    async def drop(request):
        request.transport.abort()
        return web.Response()

    openai.answers.append(drop)
    openai.reply()
    route = await bench.open("openai/m")
    assert (await bench.ask(route, HELLO))[0] == 200
    first, second = bench.calls(route)
    assert first["response"] is None and first["metadata"]["error"]
    assert second["metadata"]["retry_of"] == 0


async def test_an_endpoint_that_is_gone_fails_fast_once_that_is_known(bench, refused):
    route = await bench.open("vllm/m", policy_url=refused)
    status, reply = await bench.ask(route, HELLO)
    assert (status, reply["error"]["code"]) == (503, "endpoint_unavailable")
    assert refused in reply["error"]["message"]
    assert len(bench.calls(route)) == 3, "one line per attempt"
    again = await bench.open("vllm/m", policy_url=refused)
    status, reply = await bench.ask(again, HELLO)
    assert status == 503
    (call,) = bench.calls(again)
    assert (call["response"], call["metadata"]["attempt"]) == (None, 1)
    category, message = again.totals().failure
    assert category == "endpoint"
    assert "connection refused" in message


async def test_the_breaker_lets_one_call_try_after_its_cooldown(open_bench, openai):
    for _ in range(3):
        openai.reply(status=503, body={})
    openai.reply()
    async with open_bench(cooldown=0.0, patience=Patience(attempts=3, first=0.001)) as bench:
        route = await bench.open("openai/m")
        assert (await bench.ask(route, HELLO))[0] == 503
        assert route.totals().failure[0] == "endpoint"
        assert (await bench.ask(route, HELLO))[0] == 200
        assert route.totals().failure is None, "a success clears what passed"


async def test_one_request_the_server_chokes_on_does_not_stop_the_others(bench, openai):
    async def choke(request):
        if b"poison" in await request.read():
            return web.json_response({"error": {"message": "boom"}}, status=500)
        return web.json_response({"choices": [{"index": 0, "message": {}}]})

    openai.answers.append(choke)
    route = await bench.open("openai/m")
    assert (await bench.ask(route, [{"role": "user", "content": "poison"}]))[0] == 503
    assert (await bench.ask(route, HELLO))[0] == 200


async def test_a_rate_limit_that_stays_is_passed_on(bench, openai):
    openai.reply({"error": {"message": "quota"}}, status=429)
    route = await bench.open("openai/m")
    status, reply = await bench.ask(route, HELLO)
    assert (status, reply) == (429, {"error": {"message": "quota"}})
    assert route.totals().failure[0] == "endpoint"


async def test_a_wait_longer_than_the_budget_is_not_waited(open_bench, openai):
    openai.reply({}, status=429, **{"retry-after": "3600"})
    async with open_bench(patience=Patience(budget=1.0)) as bench:
        route = await bench.open("openai/m")
        assert (await bench.ask(route, HELLO))[0] == 429
        assert len(openai.bodies) == 1


async def test_an_upstream_that_stays_silent_times_out(open_bench, openai):
    async def never(_):
        await asyncio.Event().wait()

    openai.answers.append(never)
    async with open_bench(read_timeout=0.01, patience=Patience(attempts=1)) as bench:
        route = await bench.open("openai/m")
        status, reply = await bench.ask(route, HELLO)
    assert status == 503
    assert "no answer in time" in reply["error"]["message"]


async def test_a_rejection_reaches_the_agent_unchanged(bench, openai):
    body = {"error": {"message": "model not found", "type": "invalid", "code": "model_not_found"}}
    openai.reply(body, status=404)
    route = await bench.open("openai/m")
    assert await bench.ask(route, HELLO) == (404, body)
    assert route.totals().failure == ("endpoint_rejected", "404: model not found")
    assert len(openai.bodies) == 1, "no retry would change it"


async def test_a_reply_that_is_no_completion_is_endpoint_trouble(bench, openai):
    async def page(_):
        return web.Response(text="<html>hello</html>")

    openai.answers.append(page)
    route = await bench.open("openai/m")
    assert (await bench.ask(route, HELLO))[0] == 503
    assert route.totals().failure[0] == "endpoint"


@pytest.mark.parametrize(
    ("status", "message", "code"),
    [
        (
            400,
            "This model's maximum context length is 10 tokens. However, your request has 20 input tokens.",
            None,
        ),
        (400, "anything", "context_length_exceeded"),
        (413, "prompt is too long: 200001 tokens > 200000 maximum", None),
        (400, "the request exceeds the available context size", None),
    ],
)
async def test_an_overflow_is_told_in_the_form_agents_know(bench, openai, status, message, code):
    openai.reply({"error": {"message": message, "code": code}}, status=status)
    route = await bench.open("openai/m")
    answered, reply = await bench.ask(route, HELLO)
    assert (answered, reply["error"]["code"]) == (400, "context_length_exceeded")
    assert route.totals().failure == ("context_limit", message)


async def test_other_refusals_are_no_overflow():
    body = b'{"error": {"message": "temperature must be below 2"}}'
    assert not failures.context_overflow(400, body)
    assert not failures.context_overflow(500, b'{"error": {"code": "context_length_exceeded"}}')


async def test_a_reply_length_that_does_not_fit_is_shortened(bench, flaky):
    """Agents ask for 32k tokens by habit; the prompt itself fits."""
    message = (
        "'max_tokens' or 'max_completion_tokens' is too large: 32000. This model's maximum context length "
        "is 4096 tokens and your request has 96 input tokens (32000 > 4096 - 96)."
    )
    flaky.reply({"error": {"message": message, "code": 400}}, status=400)
    flaky.reply()
    route = await bench.open("vllm/m", policy_url=flaky.url)
    status, _ = await bench.ask(route, HELLO, max_completion_tokens=32000)
    assert status == 200
    assert b'"max_tokens":4000' in flaky.bodies[1] and b"max_completion_tokens" not in flaky.bodies[1]
    assert route.totals().failure is None


async def test_max_context_ends_a_conversation_that_has_outgrown_it(bench, flaky):
    flaky.reply()
    route = await bench.open("vllm/m", policy_url=flaky.url, max_context=15)
    assert (await bench.ask(route, HELLO))[0] == 200
    status, reply = await bench.ask(route, MORE)
    assert (status, reply["error"]["code"]) == (400, "context_length_exceeded")
    assert len(flaky.bodies) == 1, "the model is not asked"
    assert route.totals().failure[0] == "context_limit"
    assert (await bench.ask(route, [{"role": "user", "content": "fresh"}]))[0] == 200
    assert route.totals().failure is None, "the agent compacted and went on"


async def test_a_first_prompt_over_max_context_is_refused_too(bench, flaky):
    flaky.reply()
    route = await bench.open("vllm/m", policy_url=flaky.url, max_context=9)
    status, reply = await bench.ask(route, HELLO)
    assert (status, reply["error"]["code"]) == (400, "context_length_exceeded")


@pytest.mark.parametrize(
    ("limit", "words"), [({"max_calls": 1}, "1 model calls"), ({"max_tokens": 15}, "15 tokens")]
)
async def test_a_spent_budget_ends_the_rollout_cleanly(bench, flaky, limit, words):
    flaky.reply()
    route = await bench.open("vllm/m", policy_url=flaky.url, **limit)
    assert (await bench.ask(route, HELLO))[0] == 200
    assert route.totals().failure is None
    status, reply = await bench.ask(route, MORE)
    assert (status, reply["error"]["code"]) == (400, "budget_exceeded")
    category, message = route.totals().failure
    assert category == "budget" and words in message
    assert len(flaky.bodies) == 1
    assert len(bench.calls(route)) == 2, "the refusal is recorded"


async def test_a_cost_budget_uses_what_the_provider_charges(bench, openai, make_completion):
    openai.reply(make_completion(usage={"prompt_tokens": 1, "completion_tokens": 1, "cost": 0.25}))
    route = await bench.open("openai/m", max_cost_usd=0.25)
    assert (await bench.ask(route, HELLO))[0] == 200
    assert route.totals().cost_usd == 0.25
    assert (await bench.ask(route, MORE))[0] == 400
    assert "0.25 USD" in route.totals().failure[1]


async def test_a_cost_budget_that_cannot_be_kept_is_not_ignored(bench, openai):
    openai.reply()
    route = await bench.open("openai/m", max_cost_usd=0.25)
    assert (await bench.ask(route, HELLO))[0] == 200
    assert (await bench.ask(route, MORE))[0] == 400
    assert "no known price" in route.totals().failure[1]


async def test_counts_that_are_none_stay_unknown(bench, openai, make_completion):
    openai.reply(make_completion(usage={"prompt_tokens": "many", "completion_tokens": -3, "cost": -1}))
    route = await bench.open("openai/m")
    assert (await bench.ask(route, HELLO))[0] == 200
    totals = route.totals()
    assert (totals.prompt_tokens, totals.completion_tokens, totals.cost_usd) == (None, None, None)


async def test_a_failed_title_call_says_nothing_about_the_rollout(bench, openai):
    openai.reply({"error": {"message": "no"}}, status=400)
    route = await bench.open("openai/m")
    title = [{"role": "system", "content": "You are a title generator."}, *HELLO]
    assert (await bench.ask(route, title))[0] == 400
    totals = route.totals()
    assert (totals.failed_calls, totals.failure) == (1, None)
    assert bench.calls(route)[0]["metadata"]["purpose"] == "title"


async def test_the_probe_names_an_endpoint_that_refuses(bench, refused, openai):
    with pytest.raises(PrerequisiteError) as caught:
        await bench.gateway.probe(ModelSpec("vllm/m", policy_url=refused))
    assert refused in str(caught.value) and caught.value.exit_code == 3
    openai.reply({"error": {"message": "model x is not served"}}, status=404)
    with pytest.raises(PrerequisiteError, match="model x is not served"):
        await bench.gateway.probe(ModelSpec("vllm/x", policy_url=openai.url))


async def test_the_probe_does_not_wait_for_a_silent_endpoint(flaky):
    asked = asyncio.Event()

    async def silent(_: web.Request) -> web.StreamResponse:
        asked.set()
        await asyncio.Event().wait()
        raise AssertionError

    flaky.answers.append(silent)
    target = resolve(ModelSpec("vllm/m", policy_url=flaky.url), {})
    async with Client(900) as client:
        upstream = HttpUpstream(target, Guard(Breaker(1)), client)
        with pytest.raises(PrerequisiteError, match=r"answered none within 0\.2 s"):
            await probe_endpoint(upstream, client, patience=0.2)
    assert asked.is_set()


@pytest.mark.parametrize("body", [{"usage": {}}, {"choices": []}, [1], "text"])
async def test_the_probe_wants_a_completion(bench, flaky, body):
    flaky.reply(body)
    with pytest.raises(PrerequisiteError, match="does not answer like a model server"):
        await bench.gateway.probe(ModelSpec("vllm/m", policy_url=flaky.url))


def test_retry_after_is_read_as_seconds_or_as_a_date():
    assert failures.retry_after({"retry-after": "1.5"}) == 1.5
    assert failures.retry_after({"retry-after": "Thu, 01 Jan 1970 00:00:00 GMT"}) == 0.0
    assert failures.retry_after({"retry-after": "soon"}) is None
    assert failures.retry_after({}) is None


def test_patience_grows_and_ends():
    patience = Patience(attempts=4, budget=10, first=1, longest=3)
    delays = [patience.delay(attempt, 0.0, None) for attempt in (1, 2, 3)]
    assert 0.5 <= delays[0] <= 1 <= delays[1] <= 2 and 1.5 <= delays[2] <= 3
    assert patience.delay(4, 0.0, None) is None
    assert patience.delay(1, 9.9, None) is None
    assert patience.delay(1, 0.0, 7.0) == 7.0
