"""Who gets in, and what is served to whom."""

from __future__ import annotations

import pytest
import uvloop

from benchflow.contracts.errors import PrerequisiteError, UsageError
from benchflow.contracts.gateway import ModelSpec
from benchflow.gateway.server import GatewayServer
from benchflow.kernel.storage import Redactor

HELLO = [{"role": "user", "content": "hi"}]


async def test_an_unknown_key_is_refused(bench, policy_file):
    await bench.open(policy_file())
    async with bench.client.post("http://g/r/nope/v1/chat/completions", json={"messages": HELLO}) as reply:
        assert reply.status == 401
        assert (await reply.json())["error"]["code"] == "invalid_api_key"
    async with bench.client.post("http://g/v1/chat/completions", json={"messages": HELLO}) as reply:
        assert reply.status == 401


async def test_the_key_works_as_a_path_and_as_a_bearer_value(bench, policy_file):
    route = await bench.open(policy_file("turns: [{say: certainly}]"))
    status, reply = await bench.ask(route, HELLO)
    assert (status, reply["choices"][0]["message"]["content"]) == (200, "certainly")
    headers = {"authorization": f"Bearer {route.key}"}
    async with bench.client.post(
        "http://g/v1/chat/completions", json={"messages": HELLO}, headers=headers
    ) as answer:
        assert answer.status == 200
    assert route.totals().calls == 2


async def test_a_rollouts_key_is_masked_in_every_record(bench, policy_file):
    """An agent that prints its environment shows it, and a record outlives the rollout."""
    route = await bench.open(policy_file("turns: [{say: certainly}]"))
    shown = Redactor()(f"OPENAI_API_KEY={route.key}\nBASE={route.inside_url}\n".encode())
    assert route.key.encode() not in shown and b"BASE=http://" in shown


async def test_a_closed_route_refuses_and_keeps_its_totals(bench, policy_file):
    route = await bench.open(policy_file("turns: [{say: certainly}]"))
    await bench.ask(route, HELLO)
    totals = await route.close()
    assert totals.calls == 1
    assert await route.close() == totals
    status, reply = await bench.ask(route, HELLO)
    assert status == 401
    assert "over" in reply["error"]["message"]


async def test_another_path_is_a_404_that_names_what_is_served(bench, policy_file):
    route = await bench.open(policy_file())
    async with bench.client.post(f"http://g{route.host_path}/v1/messages", json={}) as reply:
        assert reply.status == 404
        message = (await reply.json())["error"]["message"]
    assert "/v1/messages" in message and "POST /v1/chat/completions" in message


async def test_the_model_list_holds_the_routes_own_model(bench, policy_file):
    route = await bench.open(policy_file(), max_context=4096)
    async with bench.client.get(f"http://g{route.host_path}/v1/models") as reply:
        listed = await reply.json()
    assert [(entry["id"], entry["max_model_len"]) for entry in listed["data"]] == [("two-turns", 4096)]


async def test_a_route_says_how_a_sandbox_reaches_it(bench, policy_file):
    route = await bench.open(policy_file())
    assert route.inside_port > 1024
    assert route.inside_url == f"http://127.0.0.1:{route.inside_port}/r/{route.key}"
    assert route.host_path == f"/r/{route.key}"


async def test_calls_carry_the_node_they_were_made_at(bench, policy_file):
    route = await bench.open(policy_file("turns: [{say: a}, {say: b}]"))
    await bench.ask(route, HELLO)
    route.set_node("n1")
    await bench.ask(route, HELLO)
    assert [call["node_id"] for call in bench.calls(route)] == ["n0", "n1"]


async def test_two_routes_of_one_rollout_share_a_file_without_sharing_an_index(bench, policy_file, tmp_path):
    path = tmp_path / "shared.jsonl"
    first = await bench.open(policy_file("turns: [{say: a}]", "a.yaml"), path=path)
    second = await bench.open(policy_file("turns: [{say: b}]", "b.yaml"), path=path)
    await bench.ask(first, HELLO)
    await bench.ask(second, HELLO)
    await first.close()
    await bench.ask(second, HELLO)
    await second.close()
    assert [call["index"] for call in bench.calls(second)] == [0, 1, 2]


async def test_a_body_that_is_no_request_is_a_400(bench, policy_file):
    route = await bench.open(policy_file())
    for body in (b"not json", b"[]", b'{"messages": "hi"}'):
        async with bench.post(route, body) as reply:
            assert reply.status == 400
            assert (await reply.json())["error"]["type"] == "invalid_request_error"
    assert route.totals().calls == 0


async def test_stopping_the_gateway_twice_is_fine(tmp_path):
    gateway = GatewayServer(tmp_path / "g.sock", redact=Redactor())
    await gateway.start()
    await gateway.stop()
    await gateway.stop()
    assert not (tmp_path / "g.sock").exists()


async def test_a_socket_path_that_is_too_long_is_one_clear_line(tmp_path):
    gateway = GatewayServer(tmp_path / ("x" * 120) / "g.sock", redact=Redactor())
    with pytest.raises(PrerequisiteError, match="longer than"):
        await gateway.start()


async def test_a_cost_budget_without_a_price_is_refused(bench, policy_file):
    with pytest.raises(UsageError, match="no price"):
        await bench.open(policy_file(), max_cost_usd=1.0)


async def test_a_missing_policy_file_is_a_usage_error(bench, tmp_path):
    with pytest.raises(UsageError, match="no scripted policy"):
        await bench.open(f"scripted/{tmp_path}/nowhere.yaml")
    with pytest.raises(UsageError, match="provider/name"):
        await bench.gateway.probe(ModelSpec("just-a-name"))


def test_it_runs_on_uvloop_too(open_bench, policy_file):
    async def talk():
        async with open_bench() as bench:
            route = await bench.open(policy_file())
            messages = await bench.converse(route)
            totals = await route.close()
            return messages[-1]["content"], totals.token_capture

    assert uvloop.run(talk()) == ("finished", "tokens")
