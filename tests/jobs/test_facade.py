"""``bf.run`` in its three calling forms, and reading its result back."""

from __future__ import annotations

from pathlib import Path

import pytest

import benchflow as bf
from benchflow.contracts.errors import PrerequisiteError, UsageError


@pytest.fixture
def form(make_task, tmp_path, monkeypatch):
    monkeypatch.setenv("DOCKER_HOST", "unix:///nowhere/docker.sock")
    task, jobs = make_task("easy"), tmp_path / "jobs"

    async def config():
        return await bf.run(
            bf.RolloutConfig(task_path=task, agent="oracle", environment="local", jobs_dir=jobs)
        )

    async def objects():
        where = bf.Environment.from_task(task, sandbox="local")
        return await bf.run(bf.Agent("oracle"), where, bf.RuntimeConfig(jobs_dir=jobs))

    async def name():
        settings = bf.RuntimeConfig(sandbox_setup_timeout=300, jobs_dir=jobs)
        return await bf.run("oracle", task_path=task, config=settings)

    return {"config": config, "objects": objects, "name": name}


@pytest.mark.parametrize("how", ["config", "objects", "name"])
async def test_each_form_runs_and_scores(form, how, tmp_path, capsys):
    result = await form[how]()
    assert (result.rewards, result.outcome, result.n_tool_calls) == ({"reward": 1.0}, "passed", 1)
    assert Path(result.rollout_path, "result.json").is_file()
    assert bf.load_job(tmp_path / "jobs").rewards == [1.0]
    said = capsys.readouterr().err
    assert ("sandbox local" in said) is (how == "name")


async def test_what_is_missing_stops_it_before_anything_is_written(make_task, tmp_path):
    settings = bf.RuntimeConfig(sandbox="local", jobs_dir=tmp_path / "jobs", policy_url="http://127.0.0.1:9")
    with pytest.raises(PrerequisiteError, match="connection refused"):
        await bf.run("mini", task_path=make_task(), model="vllm/m", config=settings)
    assert not (tmp_path / "jobs").exists()


async def test_a_scene_with_two_turns_is_one_rollout(make_task, tmp_path):
    role = bf.Role("solver", "oracle")
    scene = bf.Scene("solve", [role], [bf.Turn("solver"), bf.Turn("solver", "Look again.")])
    config = bf.RolloutConfig(
        task_path=make_task(), scenes=[scene], sandbox="local", rollout_dir=tmp_path / "mine"
    )
    result = await bf.run(config)
    assert (result.n_prompts, result.reward) == (2, 1.0)
    assert result.rollout_path == str(tmp_path / "mine")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("oracle",), "needs task_path"),
        ((bf.Agent("oracle"),), "needs an environment"),
        ((bf.RolloutConfig(task_path="x", agent="oracle"), bf.Environment(Path("x"))), "takes nothing else"),
    ],
)
async def test_a_form_that_is_none_of_the_three_is_refused(arguments, said):
    with pytest.raises(UsageError, match=said):
        await bf.run(*arguments)


async def test_public_phases_can_be_called_one_by_one(make_task, tmp_path):
    config = bf.RolloutConfig(
        task_path=make_task(), agent="oracle", sandbox="local", rollout_dir=tmp_path / "mine"
    )
    rollout = await bf.Rollout.create(config)
    try:
        await rollout.setup()
        await rollout.start()
        await rollout.install_agent()
        await rollout.connect()
        await rollout.execute()
        await rollout.disconnect()
        verdict = await rollout.verify()
    finally:
        result = await rollout.cleanup()
    assert verdict.reward == result.reward == 1.0
