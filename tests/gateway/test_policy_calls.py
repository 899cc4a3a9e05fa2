"""Calls to a policy: asked for exact tokens upstream, plain chat completions for the agent."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import orjson
from aiohttp import web

from benchflow.contracts.gateway import ModelSpec
from benchflow.gateway import sse
from benchflow.gateway.exchange import Patience
from benchflow.gateway.tokens import PINNED

HELLO = [{"role": "user", "content": "hi"}]


async def test_train_mode_asks_for_tokens_and_pins_truncating_parameters(bench, flaky):
    flaky.reply()
    route = await bench.open("vllm/m", policy_url=flaky.url)
    await bench.ask(route, HELLO, top_p=0.5, top_k=40, temperature=0.7, presence_penalty=1)
    sent = orjson.loads(flaky.bodies[0])
    assert {name: sent[name] for name in PINNED} == PINNED
    assert sent["temperature"] == 0.7
    assert (sent["return_token_ids"], sent["logprobs"], sent["stream"]) == (True, True, False)
    sampling = bench.calls(route)[0]["metadata"]["sampling"]
    assert sampling["requested"]["top_k"] == 40
    assert sampling["submitted"]["top_k"] == -1


async def test_outside_train_mode_the_agents_parameters_stand(bench, flaky):
    flaky.reply()
    route = await bench.open("vllm/m", policy_url=flaky.url, train_mode=False)
    await bench.ask(route, HELLO, top_p=0.5)
    sent = orjson.loads(flaky.bodies[0])
    assert sent["top_p"] == 0.5
    assert "top_k" not in sent


async def test_the_specs_sampling_wins_over_the_agents(bench, flaky):
    flaky.reply()
    sampling = {"temperature": 1.0, "max_tokens": 99, "seed": 5}
    route = await bench.open("vllm/m", policy_url=flaky.url, sampling=sampling)
    await bench.ask(route, HELLO, temperature=0.1, max_completion_tokens=5, seed=1)
    sent = orjson.loads(flaky.bodies[0])
    assert (sent["temperature"], sent["max_tokens"], sent["seed"]) == (1.0, 99, 5)
    assert "max_completion_tokens" not in sent


async def test_the_seed_tells_members_of_a_group_apart_and_re_runs_not(bench, flaky):
    flaky.reply()
    for trial in (1, 2, 1):
        route = await bench.open("vllm/m", policy_url=flaky.url, seed=7, task="x", trial=trial)
        await bench.ask(route, HELLO)
    first, second, again = (orjson.loads(body)["seed"] for body in flaky.bodies)
    assert first == again != second


async def test_a_stream_spells_the_same_reply_with_usage_when_asked(bench, policy_file, bash_tool):
    text = 'turns: [{think: hm, say: "look é", run: [ls, pwd]}]'
    model = policy_file(text)
    body = {"messages": HELLO, "tools": [bash_tool]}
    plain = await bench.open(model, trial=1)
    _, whole = await bench.ask(plain, **body)
    streamed = await bench.open(model, trial=1)
    options = {"stream": True, "stream_options": {"include_usage": True}}
    async with bench.post(streamed, {**body, **options}) as reply:
        assert reply.headers["content-type"].startswith("text/event-stream")
        stream = await reply.read()
    assert stream.endswith(b"data: [DONE]\n\n")
    spelled = sse.assemble(stream)
    assert spelled["choices"] == whole["choices"]
    assert spelled["usage"] == whole["usage"]
    assert b"token_ids" not in stream and b"logprob" not in stream
    async with bench.post(streamed, {**body, "stream": True}) as reply:
        assert sse.assemble(await reply.read()).get("usage") is None
    assert bench.calls(streamed)[0]["metadata"]["token_capture"]["unavailable"] == {}


async def test_an_agent_that_asks_for_logprobs_gets_them_without_ids(bench, policy_file):
    route = await bench.open(policy_file("turns: [{say: ab}]"))
    _, reply = await bench.ask(route, HELLO, logprobs=True)
    (choice,) = reply["choices"]
    assert [entry["token"] for entry in choice["logprobs"]["content"]] == ["a", "b", "<end>"]
    assert "token_ids" not in choice and "prompt_token_ids" not in reply
    capture = bench.calls(route)[0]["metadata"]["token_capture"]
    assert capture["completions"][0]["tokens"] == ["a", "b", "<end>"]
    assert capture["unavailable"] == {}


async def test_prompts_extend_each_other_exactly_through_a_real_server(bench, serve_policy):
    server = await serve_policy("turns: [{say: one, run: ls}, {say: two, run: pwd}, {say: three}]")
    route = await bench.open("vllm/anything", policy_url=server.url)
    await bench.converse(route)
    captures = [call["metadata"]["token_capture"] for call in bench.calls(route)]
    assert len(captures) == 3
    for before, after in pairwise(captures):
        whole = before["prompt_token_ids"] + before["completions"][0]["token_ids"]
        assert after["prompt_token_ids"][: len(whole)] == whole
    assert route.totals().token_capture == "tokens"


async def test_one_conversation_keeps_one_session_upstream(bench, flaky):
    flaky.reply()
    route = await bench.open("vllm/m", policy_url=flaky.url)
    other = await bench.open("vllm/m", policy_url=flaky.url)
    await bench.ask(route, HELLO)
    await bench.ask(route, [*HELLO, {"role": "assistant", "content": "hello"}, *HELLO])
    await bench.ask(other, HELLO)
    async with bench.post(route, {"messages": HELLO}, headers={"X-Session-ID": "own"}) as reply:
        assert reply.status == 200
    sessions = [headers["x-session-id"] for headers in flaky.headers]
    assert sessions[0] == sessions[1] != sessions[2]
    assert sessions[3] == "own"


async def test_the_version_that_served_a_call_is_recorded(bench, flaky, make_completion):
    flaky.reply(make_completion(weight_version="from-body"))
    flaky.reply(make_completion(policy_version="from-body"), **{"x-policy-version": "from-header"})
    flaky.reply()
    route = await bench.open("vllm/m", policy_url=flaky.url, policy_version="from-spec")
    for _ in range(3):
        await bench.ask(route, HELLO)
    bench.gateway.set_policy_version("live")
    await bench.ask(route, HELLO)
    versions = [call["metadata"]["policy_version"] for call in bench.calls(route)]
    assert versions == ["from-body", "from-header", "from-spec", "live"]
    totals = route.totals()
    assert (totals.policy_version_first, totals.policy_version_last) == ("from-body", "live")


async def test_totals_tell_how_much_of_the_rollout_is_exact(bench, flaky, make_completion):
    flaky.reply()
    route = await bench.open("vllm/m", policy_url=flaky.url)
    assert route.totals().token_capture == "none"
    await bench.ask(route, HELLO)
    totals = route.totals()
    assert totals.token_capture == "text"
    assert (totals.prompt_tokens, totals.completion_tokens, totals.cost_usd) == (10, 5, None)
    assert totals.cost_reason == "self-hosted"


async def test_unknown_usage_stays_unknown(bench, flaky, make_completion):
    reply = make_completion()
    del reply["usage"]
    flaky.reply(reply)
    route = await bench.open("vllm/m", policy_url=flaky.url)
    await bench.ask(route, HELLO)
    assert (route.totals().prompt_tokens, route.totals().completion_tokens) == (None, None)


async def test_a_waiting_stream_is_kept_awake(open_bench, flaky, make_completion):
    heard = asyncio.Event()

    async def slow(_):
        await heard.wait()
        return web.json_response(make_completion("at last"))

    flaky.answers.append(slow)
    async with open_bench(patience=Patience(pulse=0.01)) as bench:
        route = await bench.open("vllm/m", policy_url=flaky.url)
        async with bench.post(route, {"messages": HELLO, "stream": True}) as reply:
            first = await reply.content.readany()
            heard.set()
            rest = await reply.read()
    assert first.startswith(b":")
    assert sse.assemble(first + rest)["choices"][0]["message"]["content"] == "at last"


async def test_a_kept_awake_stream_ends_with_its_error(open_bench, flaky, make_completion):
    heard = asyncio.Event()

    async def slow(_):
        await heard.wait()
        return web.json_response({"error": {"message": "bad request", "code": "nope"}}, status=400)

    flaky.answers.append(slow)
    async with open_bench(patience=Patience(pulse=0.01)) as bench:
        route = await bench.open("vllm/m", policy_url=flaky.url)
        async with bench.post(route, {"messages": HELLO, "stream": True}) as reply:
            first = await reply.content.readany()
            heard.set()
            rest = await reply.read()
        assert sse.assemble(first + rest)["error"]["message"] == "bad request"
        assert route.totals().failure[0] == "endpoint_rejected"


async def test_policy_concurrency_limits_the_calls_in_flight(open_bench, flaky, make_completion):
    running = most = 0

    async def count(_):
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.005)
        running -= 1
        return web.json_response(make_completion())

    flaky.answers.append(count)
    async with open_bench(policy_concurrency=2) as bench:
        routes = [await bench.open("vllm/m", policy_url=flaky.url) for _ in range(4)]
        await asyncio.gather(*(bench.ask(route, HELLO) for route in routes * 3))
    assert most == 2


async def test_the_probe_tells_processed_from_raw_logprobs(bench, serve_policy, flaky):
    weighted = "turns: [{choices: [{weight: 4, say: a}, {weight: 1, say: b}]}]"
    server = await serve_policy(weighted)
    facts = await bench.gateway.probe(ModelSpec("vllm/m", policy_url=server.url))
    assert (facts["level"], facts["logprobs_mode"], facts["endpoint"]) == ("tokens", "processed", server.url)

    top = [{"token": "a", "logprob": -0.1}, {"token": "b", "logprob": -2.0}]
    content = [{"token": "a", "logprob": -0.1, "top_logprobs": top}]
    flaky.reply({"choices": [{"index": 0, "message": {}, "logprobs": {"content": content}}]})
    facts = await bench.gateway.probe(ModelSpec("vllm/m", policy_url=flaky.url))
    assert (facts["level"], facts["logprobs_mode"]) == ("logprobs", "raw")


async def test_the_probe_says_text_when_there_is_no_more(bench, flaky, openai):
    flaky.reply()
    assert (await bench.gateway.probe(ModelSpec("vllm/m", policy_url=flaky.url)))["level"] == "text"
    assert (await bench.gateway.probe(ModelSpec("openai/m")))["level"] == "text"
