"""The script of the scripted agent, and what it can play."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchflow.agents import catalog
from benchflow.agents.scripted import script
from benchflow.contracts.agent import StopReason
from benchflow.contracts.errors import AgentInstallError, AgentProtocolError, UsageError
from benchflow.contracts.sandbox import ModelDoor


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ([], "either actions"),
        ({}, "either actions"),
        ({"actions": [], "turns": []}, "either actions"),
        ({"actions": [], "colour": 1}, "unknown key colour"),
        ({"actions": {}}, "actions is not a list"),
        ({"actions": ["say"]}, r"actions\[0\] is not a mapping with one key"),
        ({"actions": [{"say": "a", "run": "b"}]}, r"actions\[0\] is not a mapping"),
        ({"turns": [[], [{"shout": "a"}]]}, r"unknown action turns\[1\]\[0\].shout .*known: .*say"),
        ({"actions": [{"say": 3}]}, r"actions\[0\].say has the wrong type: 3"),
        ({"actions": [{"write": {"path": "a"}}]}, r"actions\[0\].write lacks content"),
        ({"actions": [{"late": [{"say": 1}]}]}, r"actions\[0\].late\[0\].say has the wrong type"),
        ({"actions": [{"choose": [{"weight": 0, "actions": []}]}]}, r"choose\[0\]: weight is not a positive"),
        ({"actions": [{"ask": {"question": "q", "options": [{"name": "a"}]}}]}, "an option is"),
    ],
)
def test_a_wrong_script_names_the_file_and_the_place(data, words):
    with pytest.raises(UsageError, match=f"^here: .*{words}|^here: {words}"):
        script.check(data, "here")


def test_a_script_that_is_missing_or_no_yaml_is_named(tmp_path: Path):
    with pytest.raises(UsageError, match=r"no script .*absent.yaml"):
        script.load(tmp_path / "absent.yaml")
    broken = tmp_path / "broken.yaml"
    broken.write_text("actions: [")
    with pytest.raises(UsageError, match=r"broken.yaml"):
        script.load(broken)


async def test_without_a_script_it_says_how_to_give_one(sandbox, context):
    agent = catalog.load("scripted")
    with pytest.raises(UsageError, match="--agent-env BENCHFLOW_SCRIPT"):
        await agent.connect(sandbox, context())


async def test_writes_plans_and_stop_reasons(scripted, record, sandbox, context):
    session = await scripted(
        [
            {"plan": ["a", "b"]},
            {"write": {"path": "d/x.txt", "content": "é"}},
            {"end": "refusal"},
            {"say": "never"},
        ]
    )
    assert await session.prompt("Go.") is StopReason.REFUSAL
    assert [entry["content"] for entry in record.last("plan")["update"]["entries"]] == ["a", "b"]
    assert record.last("tool_call_update")["tool_kind"] == "edit"
    assert (await sandbox.exec("cat d/x.txt", cwd=context().workspace)).out == "é"
    assert record.said() == []


async def test_choices_differ_by_trial_and_repeat_by_seed(scripted, record):
    actions = [{"choose": [{"weight": 1, "actions": [{"say": str(number)}]} for number in range(20)]}]

    async def draw(**changes: int) -> str:
        session = await scripted(actions, **changes)
        await session.prompt("Go.")
        return record.said()[-1]

    first = [await draw(seed=1, trial=trial) for trial in (1, 2, 3)]
    again = [await draw(seed=1, trial=trial) for trial in (1, 2, 3)]
    assert first == again
    assert len(set(first)) > 1


async def test_a_failure_inside_an_action_is_an_answer_and_not_a_hang(scripted):
    session = await scripted([{"model": True}])
    with pytest.raises(AgentProtocolError, match="OPENAI_BASE_URL"):
        await session.prompt("Go.")


async def test_it_calls_its_model_through_the_gateway(scripted, new_sandbox, route, endpoint, record):
    opened = await route("vllm/m", policy_url=endpoint.url)
    inside = await new_sandbox(model_door=ModelDoor(opened.socket, opened.inside_port))
    endpoint.say("from the model")
    session = await scripted([{"model": {"prompt": "Who is there?"}}], into=inside, route=opened)
    assert await session.prompt("Go.") is StopReason.END_TURN
    assert record.said() == ["from the model"]
    assert endpoint.requests[0]["messages"] == [{"role": "user", "content": "Who is there?"}]
    assert opened.totals().calls == 1


async def test_an_image_without_python_is_told_in_one_line(new_sandbox):
    bare = await new_sandbox(env={"PATH": "/nowhere"})
    with pytest.raises(AgentInstallError, match="needs python3 in the image"):
        await catalog.load("scripted").install(bare)


async def test_the_program_is_root_owned_and_off_the_path(scripted, sandbox):
    await scripted([])
    found = await sandbox.exec("stat -c '%U %a' /opt/benchflow/scripted/agent.py")
    assert found.out.split()[0] == "root"
    assert not (await sandbox.exec("touch /opt/benchflow/scripted/agent.py", user="agent")).ok
