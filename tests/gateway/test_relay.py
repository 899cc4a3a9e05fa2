"""Upstreams that are passed through: byte for byte, as it comes, and recorded whatever happens."""

from __future__ import annotations

import asyncio

import orjson
from aiohttp import web

HELLO = [{"role": "user", "content": "hi"}]


def chunk(delta, finish=None, **extra):
    choices = [{"index": 0, "delta": delta, "finish_reason": finish}]
    return b"data: " + orjson.dumps({"id": "c", "model": "m", "choices": choices, **extra}) + b"\n\n"


STREAM = [
    chunk({"role": "assistant", "content": ""}),
    chunk({"reasoning_content": "hm"}),
    chunk({"content": "he"}),
    chunk({"content": "llo"}),
    chunk({"tool_calls": [{"index": 0, "id": "1", "function": {"name": "bash", "arguments": '{"a"'}}]}),
    chunk({"tool_calls": [{"index": 0, "function": {"arguments": ": 1}"}}]}),
    chunk({}, "tool_calls"),
    b'data: {"id":"c","choices":[],"usage":{"prompt_tokens":9,"completion_tokens":4,'
    b'"prompt_tokens_details":{"cached_tokens":8}}}\r\n\r\n',
    b"data: [DONE]\n\n",
]


def streaming(parts, *, gate=None, broken=False):
    async def answer(request):
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for position, part in enumerate(parts):
            if gate is not None and position == 1:
                await gate.wait()
            await response.write(part)
        if broken:
            request.transport.abort()
        return response

    return answer


async def test_a_stream_is_relayed_byte_for_byte_and_recorded_whole(bench, openai):
    openai.answers.append(streaming(STREAM))
    route = await bench.open("openai/m")
    async with bench.post(route, {"model": "m", "messages": HELLO, "stream": True}) as reply:
        assert await reply.read() == b"".join(STREAM)
    (call,) = bench.calls(route)
    message = call["response"]["body"]["choices"][0]["message"]
    assert message["content"] == "hello"
    assert message["reasoning_content"] == "hm"
    assert message["tool_calls"][0]["function"] == {"name": "bash", "arguments": '{"a": 1}'}
    assert call["metadata"]["finish_reason"] == "tool_calls"
    capture = call["metadata"]["token_capture"]
    assert capture["requested"] is False
    assert {entry["reason"] for entry in capture["unavailable"].values()} == {"not_requested"}
    totals = route.totals()
    assert (totals.prompt_tokens, totals.completion_tokens, totals.cache_read_tokens) == (9, 4, 8)
    assert totals.token_capture == "text"


async def test_the_first_bytes_do_not_wait_for_the_rest(bench, openai):
    gate = asyncio.Event()
    openai.answers.append(streaming(STREAM, gate=gate))
    route = await bench.open("openai/m")
    async with bench.post(route, {"messages": HELLO, "stream": True}) as reply:
        assert await reply.content.readany() == STREAM[0]
        gate.set()
        assert await reply.read() == b"".join(STREAM[1:])


async def test_a_whole_reply_is_passed_through_unchanged(bench, openai):
    raw = b'{ "choices" : [ {"index":0, "message":{"role":"assistant","content":"x"}} ], "odd": 1.0 }'

    async def answer(_):
        return web.Response(body=raw, content_type="application/json")

    openai.answers.append(answer)
    route = await bench.open("openai/m")
    async with bench.post(route, {"model": "m", "messages": HELLO}) as reply:
        assert await reply.read() == raw


async def test_only_the_model_name_is_put_right(bench, openai):
    openai.reply()
    route = await bench.open("openai/real-name")
    async with bench.post(route, b'{"model": "alias", "messages": [], "x": [1]}') as reply:
        assert reply.status == 200
    assert orjson.loads(openai.bodies[0]) == {"model": "real-name", "messages": [], "x": [1]}
    facts = bench.calls(route)[0]["metadata"]
    assert (facts["request_model"], facts["upstream_model"]) == ("alias", "real-name")


async def test_a_stream_that_breaks_off_is_recorded_and_told(bench, openai):
    openai.answers.append(streaming(STREAM[:4], broken=True))
    route = await bench.open("openai/m")
    async with bench.post(route, {"messages": HELLO, "stream": True}) as reply:
        received = await reply.read()
    assert received.startswith(b"".join(STREAM[:4]))
    assert b'"error"' in received and b"[DONE]" not in received
    (call,) = bench.calls(route)
    assert call["response"]["body"]["choices"][0]["message"]["content"] == "hello"
    assert call["metadata"]["error"]
    assert call["metadata"]["token_capture"]["unavailable"]["logprobs"]["reason"] == "request_failed"
    assert route.totals().failure[0] == "endpoint"


async def test_a_stream_that_only_holds_an_error_is_a_failure(bench, openai):
    openai.answers.append(streaming([b'data: {"error": {"message": "overloaded"}}\n\n']))
    route = await bench.open("openai/m")
    async with bench.post(route, {"messages": HELLO, "stream": True}) as reply:
        assert b"overloaded" in await reply.read()
    assert route.totals().failure == ("endpoint", "overloaded")


async def test_an_agent_that_hangs_up_frees_the_model_and_what_came_is_recorded(bench, openai):
    gone = asyncio.Event()

    async def endless(request):
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        await response.write(STREAM[2])
        try:
            await asyncio.Event().wait()
        finally:
            gone.set()
        return response

    openai.answers.append(endless)
    route = await bench.open("openai/m")
    async with bench.post(route, {"messages": HELLO, "stream": True}) as reply:
        assert await reply.content.readany() == STREAM[2]
        reply.close()
    await gone.wait()
    totals = await route.close()
    (call,) = bench.calls(route)
    assert call["metadata"]["error"] == "the agent disconnected"
    assert call["response"]["body"]["choices"][0]["message"]["content"] == "he"
    assert (totals.calls, totals.failed_calls, totals.failure) == (1, 1, None)


async def test_closing_a_route_breaks_off_its_calls(bench, openai, monkeypatch):
    monkeypatch.setattr("benchflow.gateway.server._CLOSE_GRACE", 0.01)
    arrived = asyncio.Event()

    async def never(_):
        arrived.set()
        await asyncio.Event().wait()

    openai.answers.append(never)
    route = await bench.open("openai/m")
    asking = asyncio.create_task(bench.ask(route, HELLO))
    await arrived.wait()
    totals = await route.close()
    status, reply = await asking
    assert (status, reply["error"]["code"]) == (503, "rollout_closed")
    assert totals.failed_calls == 1
    assert bench.calls(route)[0]["metadata"]["error"] == "the rollout is over"
