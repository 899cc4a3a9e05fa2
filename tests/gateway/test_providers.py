"""Model strings and the environment they need."""

from __future__ import annotations

import pytest

from benchflow.contracts.errors import PrerequisiteError, UsageError
from benchflow.contracts.gateway import ModelSpec
from benchflow.gateway.providers import resolve


def test_a_policy_takes_its_url_from_the_spec_then_from_the_environment():
    env = {"BENCHFLOW_PROVIDER_BASE_URL": "http://b:1/v1/"}
    target = resolve(ModelSpec("vllm/org/name", policy_url="http://a:1"), env)
    assert (target.base_url, target.name, target.key, target.policy) == (
        "http://a:1/v1",
        "org/name",
        None,
        True,
    )
    assert resolve(ModelSpec("vllm/m"), env).base_url == "http://b:1/v1"
    keyed = {**env, "BENCHFLOW_PROVIDER_API_KEY": "two", "VLLM_API_KEY": "one"}
    assert resolve(ModelSpec("vllm/m"), keyed).key == "one"


def test_a_missing_url_or_key_is_named_by_its_variable():
    with pytest.raises(PrerequisiteError, match=r"BENCHFLOW_PROVIDER_BASE_URL.*--policy-url"):
        resolve(ModelSpec("vllm/m"), {})
    with pytest.raises(PrerequisiteError, match="OPENAI_API_KEY"):
        resolve(ModelSpec("openai/m"), {})
    with pytest.raises(PrerequisiteError, match="DEEPSEEK_BASE_URL"):
        resolve(ModelSpec("deepseek/m"), {"DEEPSEEK_API_KEY": "k"})


def test_a_provider_of_its_own_is_used_once_its_url_is_set():
    env = {"MY_LAB_BASE_URL": "https://models.lab.example/openai", "MY_LAB_API_KEY": "k"}
    target = resolve(ModelSpec("my-lab/big"), env)
    assert (target.base_url, target.key, target.policy) == ("https://models.lab.example/openai", "k", False)


@pytest.mark.parametrize("model", ["nobody/m", "sglang/m", "m", "/m", "openai/", ""])
def test_what_cannot_be_served_is_a_usage_error(model):
    with pytest.raises(UsageError):
        resolve(ModelSpec(model), {"OPENAI_API_KEY": "k"})


def test_an_unknown_provider_lists_the_known_ones():
    with pytest.raises(UsageError, match=r"deepseek.*openai.*scripted.*vllm.*NOBODY_BASE_URL"):
        resolve(ModelSpec("nobody/m"), {})


@pytest.mark.parametrize(
    "url",
    [
        *("localhost:8000", "ftp://host/v1", "http://", "http://:8000/v1", "http://h:99999/v1", "http://h:x"),
        *("http://h:0/v1", "http://[::1/v1", "http://h/v1 x"),
    ],
)
def test_a_url_that_is_none_is_refused(url):
    with pytest.raises(UsageError, match="not an http"):
        resolve(ModelSpec("vllm/m", policy_url=url), {})
