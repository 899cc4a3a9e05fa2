"""One model behind flags, YAML and Python; a wrong value is one line that says where."""

from __future__ import annotations

import pytest

from benchflow.contracts.errors import UsageError
from benchflow.jobs.config import EvaluationConfig, RetryConfig, make_config, read_config_file


def test_every_spelling_of_the_spec_is_read():
    config = EvaluationConfig(
        model="m", environment="local", concurrency=8, retry=RetryConfig(max_retries=5), tasks_dir="tasks"
    )
    assert (config.sandbox, config.tasks, config.retry.max_retries) == ("local", ("tasks",), 5)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"concurency": 3}, "concurency: no such setting"),
        ({"concurrency": 0}, "concurrency: input should be greater than or equal to 1"),
        ({"trials": "many"}, "trials: input should be a valid integer"),
        ({"tasks": "a", "tasks_dir": "b"}, "two names of one setting"),
        ({"verify": "elsewhere"}, "verify: input should be 'shared' or 'isolated'"),
        ({"job_name": "../up"}, "a job name is one folder name"),
        ({"agent_env": ["NOT_SET_ANYWHERE"]}, "no such variable here"),
        ({"sampling": ["temperature"]}, "is not KEY=VALUE"),
        ({"base_image_override": ["a=b=c"]}, "write IMAGE, or NAME=IMAGE"),
    ],
)
def test_a_wrong_value_is_named_in_one_line(values, said):
    with pytest.raises(UsageError) as raised:
        make_config(values)
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_wrong_line_of_a_file_is_found_by_its_number(tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text("agent: mini\n\nconcurrency: none\n")
    values, names = read_config_file(path)
    with pytest.raises(UsageError, match=r"job\.yaml line 3: concurrency: input should be"):
        make_config(values, names)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: [1", "line 1"),
        ("- a", "not a mapping"),
        ("\tx: 1", "line 1"),
        ("agent: nop\nagent: oracle", "line 2: agent: the key appears twice"),
    ],
)
def test_a_broken_file_says_where(tmp_path, text, said):
    path = tmp_path / "job.yaml"
    path.write_text(text)
    with pytest.raises(UsageError, match=said):
        read_config_file(path)


def test_secrets_are_written_by_name_only(monkeypatch):
    """C54"""
    monkeypatch.setenv("FROM_HOST", "s3cr3t-value-from-host")
    config = make_config({"agent_env": ["FROM_HOST", "TYPED=s3cr3t-value-typed"]})
    assert config.agent_env == {"FROM_HOST": "s3cr3t-value-from-host", "TYPED": "s3cr3t-value-typed"}
    assert config.public()["agent_env"] == ["FROM_HOST", "TYPED"]
    assert "s3cr3t" not in str(config.public())


def test_sampling_values_keep_their_types():
    config = make_config({"sampling": ["top_p=0.9", "greedy=true", "stop=END"], "temperature": "0.5"})
    assert config.all_sampling == {"top_p": 0.9, "greedy": True, "stop": "END", "temperature": 0.5}


def test_waits_grow_up_to_the_cap_and_are_jittered():
    retry = RetryConfig(wait_multiplier=2, min_wait_sec=1, max_wait_sec=5, jitter=0.5)
    assert [retry.wait(attempt, 0.0) for attempt in range(4)] == [1, 2, 4, 5]
    assert retry.wait(10_000, 0.999) < 5 * 1.5


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"agent_timeout": "inf"}, "agent_timeout: input should be a finite number"),
        ({"fail_under": "nan"}, "fail_under: input should be a finite number"),
        ({"seed": 1 << 64}, "seed: input should be less than or equal to"),
        ({"trials": 10**9}, "trials: input should be less than or equal to 100000"),
        ({"tasks": [""]}, "tasks: an empty text names nothing"),
        ({"prompt": ["one", " "]}, "prompt: an empty text names nothing"),
        ({"sandbox_user": "a:b"}, "sandbox_user: a user name is"),
        ({"sandbox_user": "a\nroot2:x:0:0"}, "sandbox_user: a user name is"),
        ({"jobs_dir": ""}, "jobs_dir: an empty text names nothing"),
    ],
)
def test_a_number_or_a_text_that_means_nothing_is_refused(values, said):
    with pytest.raises(UsageError) as raised:
        make_config(values)
    assert said in str(raised.value)


@pytest.mark.parametrize(
    "name", ["", " ", ".", "..", "a/b", "a\nb", "a\0b", "x" * 201, "\N{GRINNING FACE}" * 51]
)
def test_a_job_name_is_one_folder_name(name):
    with pytest.raises(UsageError, match="a job name is one folder name"):
        make_config({"job_name": name})
    assert make_config({"job_name": "\N{GRINNING FACE}" * 50}).job_name


def test_a_flag_is_named_once_and_a_long_value_is_cut():
    with pytest.raises(UsageError) as raised:
        make_config({"agent_env": ["=x"]}, {"agent_env": "--agent-env"})
    assert (raised.value.message, raised.value.fix) == (
        "--agent-env '=x' is not KEY=VALUE",
        "write --agent-env NAME=value",
    )
    with pytest.raises(UsageError) as raised:
        make_config({"trials": "x" * 500})
    assert len(str(raised.value)) < 250
