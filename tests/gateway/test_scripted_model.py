"""The scripted model: the same draw again, another for a sibling, and honest probabilities."""

from __future__ import annotations

import math
import subprocess
from collections import Counter
from pathlib import Path

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchflow.gateway.scripted import tokens
from benchflow.gateway.scripted.engine import answer, rollout_seed
from benchflow.gateway.scripted.policy import Choice, Policy, Turn, load_policy, parse_policy

POLICIES = sorted((Path(__file__).parents[2] / "examples" / "policies").glob("*.yaml"))
USER = [{"role": "user", "content": "go"}]


def policy(text):
    return parse_policy(text, "p.yaml", "p")


def tool(name, required=(), **properties):
    schema = {"type": "object", "properties": properties, "required": list(required)}
    return {"type": "function", "function": {"name": name, "parameters": schema}}


TEXT = {"type": "string"}


def ask(script, messages=USER, *, seed=0, attempt=1, **body):
    body = {"return_token_ids": True, "logprobs": True, "messages": messages, **body}
    return answer(script, body, seed=seed, attempt=attempt)


def made(reply):
    """``[(tool, arguments)]`` of a reply."""
    assert reply.status == 200, reply.body
    functions = [call["function"] for call in reply.body["choices"][0]["message"].get("tool_calls", [])]
    return [(function["name"], orjson.loads(function["arguments"])) for function in functions]


def said(reply):
    return reply.body["choices"][0]["message"]["content"]


def test_members_of_a_group_differ_and_a_re_run_does_not():
    script = policy("turns: [{choices: [{weight: 3, say: a}, {weight: 1, say: b}]}]")
    seeds = [rollout_seed(0, "task", trial) for trial in range(400)]
    drawn = [said(ask(script, seed=seed)) for seed in seeds]
    assert drawn == [said(ask(script, seed=seed)) for seed in seeds]
    assert 250 < Counter(drawn)["a"] < 350
    assert rollout_seed(1, "task", 1) != rollout_seed(0, "task", 1) != rollout_seed(0, "other", 1)


def test_tool_output_takes_no_part_in_the_draw_but_the_assistants_words_do():
    script = policy("turns: [{say: x}, {choices: [{say: a}, {say: b}]}]")

    def draws(assistant, output):
        messages = [
            *USER,
            {"role": "assistant", "content": assistant},
            {"role": "tool", "content": output},
        ]
        return [said(ask(script, messages, seed=seed)) for seed in range(50)]

    assert draws("x", "took 0.1 s") == draws("x", "took 0.2 s")
    assert draws("x", "") != draws("y", "")


def test_the_first_token_carries_the_log_of_the_probability():
    script = policy("turns: [{choices: [{weight: 3, say: ab}, {weight: 1, say: cd}, {fail: {}, weight: 2}]}]")
    for seed in range(20):
        reply = ask(script, seed=seed, attempt=2)
        expected = {"ab": 0.75, "cd": 0.25}[said(reply)]
        values = [entry["logprob"] for entry in reply.body["choices"][0]["logprobs"]["content"]]
        assert math.isclose(values[0], math.log(expected))
        assert values[1:] == [0.0, 0.0]
        assert reply.body["scripted"]["probability"] == expected


def test_temperature_reshapes_the_weights_and_zero_is_ignored():
    script = policy("turns: [{choices: [{weight: 4, say: a}, {weight: 1, say: b}]}]")

    def probability_of_a(temperature):
        replies = (ask(script, seed=seed, temperature=temperature) for seed in range(30))
        return next(r.body["scripted"]["probability"] for r in replies if said(r) == "a")

    assert math.isclose(probability_of_a(1), 0.8)
    assert math.isclose(probability_of_a(2), 2 / 3)
    assert math.isclose(probability_of_a(0), 0.8)


def test_an_alternative_of_weight_zero_is_never_taken():
    script = policy("turns: [{choices: [{weight: 0, say: a}, {weight: 1, say: b}]}]")
    assert {said(ask(script, seed=seed, top_logprobs=2)) for seed in range(50)} == {"b"}


def test_a_turn_is_found_by_number_or_by_what_was_last_heard():
    script = policy("turns: [{say: one}, {when: 'oh no', say: caught}, {say: two}]")
    after = [*USER, {"role": "assistant", "content": "one"}]
    assert said(ask(script)) == "one"
    assert said(ask(script, [*after, {"role": "tool", "content": "fine"}])) == "two"
    assert said(ask(script, [*after, {"role": "tool", "content": "oh no!"}])) == "caught"
    assert said(ask(script, [*after, *after])) == "Done."


def test_without_tools_a_turn_that_needs_one_falls_back_to_text():
    script = policy("turns: [{run: ls}]\notherwise: {say: nothing to run}")
    assert said(ask(script)) == "nothing to run"
    assert made(ask(script, tools=[tool("bash", command=TEXT)])) == [("bash", {"command": "ls"})]


@pytest.mark.parametrize(
    ("offered", "expected"),
    [
        (tool("bash", ["command"], command=TEXT), {"command": "ls"}),
        (tool("run_shell_command", ["command"], command=TEXT, directory=TEXT), {"command": "ls"}),
        (tool("executeCommand", ["cmd"], cmd=TEXT), {"cmd": "ls"}),
        (tool("shell", ["command"], command={"type": "array"}), {"command": ["bash", "-lc", "ls"]}),
        (
            tool("Bash", ["command", "description", "timeout", "quiet"], command=TEXT, description=TEXT,
                 timeout={"type": "number", "minimum": 5}, quiet={"type": "boolean"}),
            {"command": "ls", "description": "I look.", "timeout": 5, "quiet": False},
        ),
    ],
)  # fmt: skip
def test_the_shell_like_tool_is_found(offered, expected):
    others = [tool("read_file", path=TEXT), tool("web_search", query=TEXT)]
    reply = ask(policy("turns: [{say: I look., run: ls}]"), tools=[*others, offered])
    assert made(reply) == [(offered["function"]["name"], expected)]


@pytest.mark.parametrize(
    ("offered", "expected"),
    [
        (tool("write", content=TEXT, filePath=TEXT), {"filePath": "/a/b", "content": "hi"}),
        (tool("Write", file_path=TEXT, content=TEXT), {"file_path": "/a/b", "content": "hi"}),
        (
            tool("str_replace_based_edit_tool", ["command", "path"], path=TEXT, file_text=TEXT,
                 command={"enum": ["view", "create"]}),
            {"path": "/a/b", "file_text": "hi", "command": "create"},
        ),
    ],
)  # fmt: skip
def test_the_write_like_tool_is_found(offered, expected):
    reply = ask(
        policy("turns: [{write: {path: /a/b, content: hi}}]"), tools=[tool("bash", command=TEXT), offered]
    )
    assert made(reply) == [(offered["function"]["name"], expected)]


def test_without_a_write_like_tool_the_shell_writes(tmp_path):
    target = tmp_path / "it's" / "new.txt"
    write = {"path": str(target), "content": "a $HOME `b`\n'c'"}
    script = policy(orjson.dumps({"turns": [{"write": write}]}).decode())
    ((name, arguments),) = made(ask(script, tools=[tool("bash", command=TEXT)]))
    assert name == "bash"
    subprocess.run(["sh", "-c", arguments["command"]], check=True)
    assert target.read_text() == "a $HOME `b`\n'c'\n"


def test_a_tool_that_is_not_offered_is_a_clear_refusal():
    reply = ask(policy("turns: [{run: ls}]"), tools=[tool("read_file", path=TEXT)])
    assert reply.status == 400 and "read_file" in reply.body["error"]["message"]
    reply = ask(policy("turns: [{call: {name: finish}}]"), tools=[tool("bash", command=TEXT)])
    assert reply.status == 400 and "'finish'" in reply.body["error"]["message"]


def test_a_failure_passes_after_its_times():
    script = policy(
        "turns: [{choices: [{fail: {status: 503, retry_after: 2, times: 2}}, {say: a, weight: 0.001}]}]"
    )
    statuses = [ask(script, attempt=attempt).status for attempt in (1, 2, 3)]
    assert statuses == [503, 503, 200]
    assert ask(script).retry_after == 2
    only = policy("turns: [{fail: {disconnect: true}}]")
    assert all(ask(only, attempt=attempt).disconnect for attempt in (1, 2, 50))


def test_a_reply_is_cut_at_max_tokens_and_says_so():
    script = policy("turns: [{say: häuser}]")
    reply = ask(script, max_tokens=2)
    choice = reply.body["choices"][0]
    assert (said(reply), choice["finish_reason"]) == ("h", "length"), "half a character is not said"
    assert choice["token_ids"] == tokens.encode("h")
    assert ask(script, max_tokens=8).body["choices"][0]["finish_reason"] == "stop"


def test_an_overflow_is_refused_like_vllm_does():
    script = policy("turns: [{say: a}]\ncontext: 20")
    assert ask(script, [{"role": "user", "content": "x"}]).status == 200
    reply = ask(script, [{"role": "user", "content": "x" * 30}])
    assert reply.status == 400
    assert "maximum context length is 20 tokens" in reply.body["error"]["message"]


def test_usage_can_be_claimed():
    reply = ask(policy("turns: [{say: a, usage: {prompt_tokens: 1000}}]"))
    assert reply.body["usage"] == {"prompt_tokens": 1000, "completion_tokens": 2, "total_tokens": 1002}


_words = st.text(max_size=12)
_assistant = st.fixed_dictionaries(
    {"say": st.none() | _words, "think": st.none() | _words, "run": st.lists(st.text(min_size=1), max_size=2)}
)


@given(_words, st.lists(_assistant, min_size=1, max_size=4), st.booleans())
def test_each_prompt_starts_with_the_prompt_and_completion_before_it(question, turns, with_system):
    """The token-prefix property, for any text an agent and a model may exchange."""
    choices = [
        Choice.model_construct(say=turn["say"], think=turn["think"], run=turn["run"]) for turn in turns
    ]
    rules = Policy.model_construct(name="p", turns=[Turn.model_construct(several=[c]) for c in choices])
    offered = [tool("bash", command=TEXT)]
    messages = [{"role": "system", "content": "s"}] if with_system else []
    messages.append({"role": "user", "content": question})
    whole: list[int] = []
    for _ in turns:
        reply = ask(rules, messages, tools=offered)
        choice = reply.body["choices"][0]
        prompt = reply.body["prompt_token_ids"]
        assert prompt[: len(whole)] == whole
        assert len(choice["token_ids"]) == len(choice["logprobs"]["content"])
        whole = prompt + choice["token_ids"]
        messages.append(choice["message"])
        for call in choice["message"].get("tool_calls", []):
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": question})


@given(st.text())
def test_text_survives_the_tokenizer(text):
    ids = tokens.encode(text)
    assert bytes(token - tokens.OFFSET for token in ids).decode() == text
    assert all(tokens.OFFSET <= token < tokens.VOCABULARY for token in ids)


@pytest.mark.parametrize("path", POLICIES, ids=lambda path: path.stem)
def test_the_first_four_trials_of_an_example_differ(path):
    script, offered = load_policy(path), [tool("bash", ["command"], command=TEXT)]
    stories = set()
    for trial in (1, 2, 3, 4):
        messages, story = list(USER), []
        for _ in range(20):
            reply = ask(script, messages, seed=rollout_seed(0, path.stem, trial), tools=offered)
            assert reply.status == 200
            story.append(reply.body["scripted"]["label"])
            messages.append(reply.body["choices"][0]["message"])
            if not messages[-1].get("tool_calls"):
                break
            messages.append({"role": "tool", "content": "output"})
        else:
            pytest.fail("the policy never stops")
        stories.add(tuple(story))
    assert len(stories) > 1
