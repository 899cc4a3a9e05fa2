"""Names to agents, and declarations as data."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from benchflow.agents import catalog, declaration
from benchflow.agents.nop import NopAgent
from benchflow.contracts.agent import Agent
from benchflow.contracts.errors import UsageError

MINIMAL = {"name": "x", "kind": "acp", "description": "d", "start": {"command": ["x"]}}


@pytest.mark.parametrize("name", ["oracle", "nop", "mini", "scripted", "opencode"])
def test_every_declared_agent_loads(name):
    agent = catalog.load(name)
    assert isinstance(agent, Agent)
    assert agent.name == name


def test_an_alias_is_the_same_agent():
    assert catalog.load("noop").name == "nop"


def test_an_unknown_name_lists_what_exists():
    with pytest.raises(UsageError, match=r"unknown agent 'minni' .*mini, nop, opencode, oracle, scripted"):
        catalog.load("minni")


class MyAgent(NopAgent):
    """Mine."""

    def __init__(self) -> None:
        super().__init__(declaration.parse(MINIMAL, "here"))


def test_a_dotted_path_is_an_agent(monkeypatch):
    monkeypatch.setitem(sys.modules, "my_agents", sys.modules[__name__])
    assert isinstance(catalog.load("my_agents:MyAgent"), MyAgent)
    assert catalog.show("my_agents:MyAgent")["description"] == "Mine."


def test_a_dotted_path_to_something_else_is_refused():
    with pytest.raises(UsageError, match="does not give an agent"):
        catalog.load("collections:OrderedDict")
    with pytest.raises(UsageError, match="no module 'nowhere'"):
        catalog.load("nowhere:Agent")


def test_an_entry_point_is_an_agent(monkeypatch):
    monkeypatch.setitem(sys.modules, "my_agents", sys.modules[__name__])
    point = EntryPoint("theirs", "my_agents:MyAgent", "benchflow.agents")

    def points(*, group: str, name: str | None = None) -> list[EntryPoint]:
        return [point] if group == point.group and name in (None, point.name) else []

    monkeypatch.setattr("benchflow.kernel.registry.entry_points", points)
    assert isinstance(catalog.load("theirs"), MyAgent)
    assert "theirs" in [record["name"] for record in catalog.listing()]


def test_the_listing_says_what_a_user_must_know():
    records = {record["name"]: record for record in catalog.listing()}
    assert records["mini"]["needs_model"] and records["mini"]["runs"] == "engine"
    assert records["scripted"]["protocol"] == "acp" and records["scripted"]["runs"] == "sandbox"
    assert records["mini"]["session_fork"] == "fork" and records["scripted"]["session_fork"] == "resume"
    assert "BENCHFLOW_SCRIPT" in records["scripted"]["usage"]


def test_listing_agents_imports_nothing_heavy():
    code = (
        "import sys; from benchflow.agents import catalog; catalog.listing(); "
        "print([m for m in ('acp', 'aiohttp', 'pydantic', 'yaml') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"colour": 1}, "here: unknown key colour"),
        ({"quirks": {"modus": "yolo"}}, "here: unknown key quirks.modus .*mode"),
        ({"kind": "daemon"}, "here: kind = 'daemon'"),
        ({"session_fork": "clone"}, "here: session_fork = 'clone'"),
        ({"needs_model": "yes"}, "here: needs_model is not a bool"),
        ({"aliases": [1]}, "here: aliases holds 1"),
        ({"env": {"A": 1}}, "here: env.A is not a string"),
        ({"start": {}, "kind": "builtin"}, "here: factory is missing"),
        ({"install": {"npm": "x", "node": "24.1.0"}}, "here: version is missing .*pin it"),
        ({"install": {"npm": "x"}, "version": "1"}, "here: install.node is missing"),
        ({"quirks": {"handshake_timeout": True}}, "here: quirks.handshake_timeout is not a float"),
    ],
)
def test_a_wrong_declaration_names_file_and_key(change, words):
    with pytest.raises(UsageError, match=words):
        declaration.parse(MINIMAL | change, "here")


@pytest.mark.parametrize("key", ["name", "kind", "description", "start"])
def test_a_missing_key_is_named(key):
    data = {name: value for name, value in MINIMAL.items() if name != key}
    with pytest.raises(UsageError, match=f"here: {key}.* is missing"):
        declaration.parse(data, "here")


def test_a_file_that_is_not_toml_is_named(tmp_path: Path):
    path = tmp_path / "bad.toml"
    path.write_text("name = ")
    with pytest.raises(UsageError, match=r"bad\.toml"):
        declaration.read(path)


async def test_templates_are_filled_and_json_in_them_survives(context, route, endpoint):
    made = context(route=await route("vllm/m", policy_url=endpoint.url), user="agent", env={"MINE": "1"})
    declared = declaration.parse(
        MINIMAL
        | {
            "env": {
                "CONFIG": '{"url": "{base_url}/v1", "model": {"id": "{model}"}}',
                "KEY": "{api_key}",
                "HOME": "{home}",
                "EFFORT": "{effort}",
                "MINE": "theirs",
            }
        },
        "here",
    )
    assert declared.environment(made) == {
        "CONFIG": f'{{"url": "{made.route.inside_url}/v1", "model": {{"id": "{made.route.model}"}}}}',
        "KEY": made.route.key,
        "HOME": "/home/agent",
        "MINE": "1",
    }


def test_a_variable_that_needs_a_model_is_left_out_without_one(context):
    declared = declaration.parse(MINIMAL | {"env": {"URL": "{base_url}/v1", "PLAIN": "1"}}, "here")
    assert declared.environment(context()) == {"PLAIN": "1"}
