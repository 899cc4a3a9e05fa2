"""The scripted model as a server of its own, with vLLM's fields."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import aiohttp
import pytest

from benchflow.contracts.errors import PrerequisiteError
from benchflow.gateway import sse

HELLO = [{"role": "user", "content": "hi"}]
BENCH = "from benchflow.cli.main import main; main()"
TWO = "turns: [{choices: [{say: a}, {say: b}]}]"


@pytest.fixture
async def client():
    async with aiohttp.ClientSession() as session:
        yield session


async def post(client, server, body=None, **headers):
    body = {"model": "m", "messages": HELLO, **(body or {})}
    async with client.post(f"{server.url}/chat/completions", json=body, headers=headers) as reply:
        return reply.status, await reply.json()


async def test_it_answers_with_vllms_fields_when_asked(client, serve_policy):
    server = await serve_policy("turns: [{say: hi}]\nversion: 12")
    _, plain = await post(client, server)
    assert "prompt_token_ids" not in plain
    assert plain["choices"][0]["logprobs"] is None
    _, reply = await post(
        client,
        server,
        {"return_token_ids": True, "logprobs": True, "top_logprobs": 1, "return_tokens_as_token_ids": True},
    )
    choice = reply["choices"][0]
    named = [entry["token"] for entry in choice["logprobs"]["content"]]
    assert named == [f"token_id:{token}" for token in choice["token_ids"]]
    assert len(reply["prompt_token_ids"]) == reply["usage"]["prompt_tokens"]
    assert reply["policy_version"] == "12"


async def test_it_lists_its_model_and_knows_no_other_path(client, serve_policy):
    server = await serve_policy("model: tiny\ncontext: 512\nturns: [{say: hi}]")
    async with client.get(f"{server.url}/models") as reply:
        assert (await reply.json())["data"][0]["id"] == "tiny"
        assert reply.status == 200
    async with client.get(f"{server.url}/nothing") as reply:
        assert reply.status == 404
    for body in (b"{", b"[]"):
        async with client.post(f"{server.url}/chat/completions", data=body) as reply:
            assert reply.status == 400


async def test_it_streams(client, serve_policy):
    server = await serve_policy(f"turns: [{{say: {'word ' * 30}}}]")
    body = {"messages": HELLO, "stream": True, "stream_options": {"include_usage": True}}
    async with client.post(f"{server.url}/chat/completions", json=body) as reply:
        stream = await reply.read()
    assert stream.count(b"data: ") > 5
    spelled = sse.assemble(stream)
    assert spelled["choices"][0]["message"]["content"] == ("word " * 30).strip()
    assert spelled["usage"]["completion_tokens"] == 150


async def test_the_seed_comes_from_headers_then_body_then_session(client, serve_policy):
    server = await serve_policy(TWO)

    async def draws(**headers):
        return [(await post(client, server, **headers))[1]["id"] for _ in range(2)]

    first = await draws(**{"X-Benchflow-Seed": "0", "X-Benchflow-Task": "t", "X-Benchflow-Trial": "1"})
    second = await draws(**{"X-Benchflow-Seed": "0", "X-Benchflow-Task": "t", "X-Benchflow-Trial": "2"})
    assert first[0] == first[1] != second[0]
    bodies = [(await post(client, server, {"seed": seed}))[1]["id"] for seed in (1, 2, 1)]
    assert bodies[0] == bodies[2] != bodies[1]
    assert (await draws(**{"X-Session-ID": "x"}))[0] != (await draws(**{"X-Session-ID": "y"}))[0]


async def test_the_gateway_draws_the_same_in_process_and_through_a_server(bench, policy_file, serve_policy):
    text = "turns: [{choices: [{say: a}, {say: b}, {say: c}, {say: d}]}]"
    server = await serve_policy(text)
    for trial in range(8):
        inside = await bench.open(policy_file(text), seed=3, task="x", trial=trial)
        outside = await bench.open("vllm/m", policy_url=server.url, seed=3, task="x", trial=trial)
        _, one = await bench.ask(inside, HELLO)
        _, two = await bench.ask(outside, HELLO)
        assert one["choices"] == two["choices"]


async def test_scripted_trouble_is_real_trouble(bench, client, serve_policy):
    text = (
        "turns:\n"
        "  - choices: [{fail: {disconnect: true}}, {weight: 0.00001, say: a}]\n"
        "  - choices: [{fail: {status: 503, retry_after: 0.001}}, {weight: 0.00001, say: b}]\n"
    )
    server = await serve_policy(text)
    route = await bench.open("vllm/m", policy_url=server.url)
    status, reply = await bench.ask(route, HELLO)
    assert status == 200
    status, _ = await bench.ask(route, [*HELLO, reply["choices"][0]["message"], *HELLO])
    assert status == 200
    assert [call["metadata"]["attempt"] for call in bench.calls(route)] == [1, 2, 1, 2]
    assert route.totals().token_capture == "tokens"


async def test_a_port_that_is_taken_is_one_clear_line(serve_policy):
    server = await serve_policy(TWO)
    port = int(server.url.rsplit(":", 1)[1].split("/")[0])
    with pytest.raises(PrerequisiteError, match=f"127.0.0.1:{port}"):
        await serve_policy(TWO, port=port)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_bench_model_serve_runs_until_it_is_interrupted(tmp_path: Path, number: signal.Signals):
    policy = tmp_path / "tiny.yaml"
    policy.write_text(TWO)
    command = [sys.executable, "-c", BENCH, "model", "serve", str(policy), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        line = process.stdout.readline()
        assert line.startswith("serving tiny at http://127.0.0.1:")
        os.kill(process.pid, number)
        assert process.wait(20) == 0
        assert process.stderr.read() == ""


def test_bench_model_serve_tells_what_is_wrong_in_one_line(tmp_path: Path):
    policy = tmp_path / "bad.yaml"
    policy.write_text("turns: [{sya: x}]")
    for argument, word in ((policy, "bad.yaml:1: sya"), (tmp_path / "none.yaml", "no scripted policy")):
        done = subprocess.run(
            [sys.executable, "-c", BENCH, "model", "serve", str(argument)], capture_output=True, text=True
        )
        assert done.returncode == 2
        assert word in done.stderr and done.stderr.count("\n") == 1
