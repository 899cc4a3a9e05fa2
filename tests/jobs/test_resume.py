"""Which job the same command continues, and what of it runs again."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest

from benchflow.contracts.errors import UsageError
from benchflow.jobs.config import EvaluationConfig
from benchflow.jobs.identity import settings_record
from benchflow.jobs.plan import make_plan, renamed, reserve
from benchflow.jobs.resume import config_of_job, find, reason_to_run
from benchflow.jobs.store import job_record
from benchflow.kernel.storage import write_json
from benchflow.tasks.discover import load_tasks

EXAMPLES = Path(__file__).parents[2] / "examples" / "tasks"


@pytest.fixture
def tasks(tmp_path):
    """Three copies of an example, so that they can be edited."""
    for name in ("alpha", "beta", "gamma"):
        shutil.copytree(EXAMPLES / "hello", tmp_path / "tasks" / name)
        path = tmp_path / "tasks" / name / "task.md"
        path.write_text(path.read_text().replace("hello", name))
    return lambda *names: load_tasks([tmp_path / "tasks" / name for name in names])


class Jobs:
    """Plans and records jobs as a run does, without running them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def config(self, **fields) -> EvaluationConfig:
        return EvaluationConfig(**({"agent": "oracle", "sandbox": "local", "jobs_dir": self.folder} | fields))

    def settings(self, config):
        return settings_record(config, "1.0", "local")

    def start(self, found, **fields):
        config = self.config(**fields)
        plan = make_plan(config, self.settings(config), found)
        plan = renamed(plan, reserve(config, plan.job_name, exact=False))
        for job in plan.jobs:
            job.folder.mkdir(parents=True, exist_ok=True)
            write_json(job.folder / "job.json", job_record(plan, job, probe=None))
        return plan

    def again(self, found, *, began: float | None = None, **fields):
        config = self.config(**fields)
        return find(config, self.settings(config), found, began=began or time.time() + 60)


@pytest.fixture
def jobs(tmp_path) -> Jobs:
    return Jobs(tmp_path / "jobs")


def names(plan) -> dict[str, str]:
    return {planned.task: planned.name for _, planned in plan.in_order()}


def test_the_same_command_continues_the_same_folders(jobs, tasks):
    first = jobs.start(tasks("alpha", "beta"))
    again = jobs.again(tasks("alpha", "beta"))
    assert again.earlier and again.why_new is None
    assert (names(again.plan), again.plan.jobs[0].folder) == (names(first), first.jobs[0].folder)


def test_the_order_of_the_input_does_not_mix_tasks_up(jobs, tasks):
    """C30"""
    first = jobs.start(tasks("alpha", "beta"))
    again = jobs.again(tasks("beta", "alpha"))
    assert names(again.plan) == names(first)
    by_task = {planned.task: planned.task_digest for _, planned in again.plan.in_order()}
    assert by_task == {task.name: task.digest for task in tasks("alpha", "beta")}


def test_a_task_that_was_added_joins_the_job(jobs, tasks):
    first = jobs.start(tasks("alpha"), tasks="tasks")
    again = jobs.again(tasks("alpha", "beta"), tasks="tasks")
    assert again.plan.job_name == first.job_name
    assert names(again.plan)["alpha"] == names(first)["alpha"]


def test_naming_more_tasks_is_another_command(jobs, tasks):
    jobs.start(tasks("alpha"), tasks="tasks/alpha")
    assert "it ran fewer tasks" in jobs.again(tasks("alpha", "beta"), tasks="tasks").why_new


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"agent": "nop"}, "agent: oracle -> nop"),
        ({"model": "vllm/other"}, "model: None -> vllm/other"),
        ({"verify": "isolated"}, "verify: None -> isolated"),
        ({"sampling": {"temperature": 0.5}}, "sampling: "),
        ({"seed": 7}, "seed: 0 -> 7"),
    ],
)
def test_another_policy_starts_a_new_job_and_says_so(jobs, tasks, change, said):
    first = jobs.start(tasks("alpha"))
    again = jobs.again(tasks("alpha"), **change)
    assert not again.earlier
    assert (
        again.why_new.startswith(f"a new job, since {first.job_name} is another one: ")
        and said in again.why_new
    )


@pytest.mark.parametrize(
    "change", [{"concurrency": 9}, {"policy_url": "http://127.0.0.1:9/v1"}, {"max_retries": 0}]
)
def test_how_and_where_it_runs_is_not_what_it_is(jobs, tasks, change):
    jobs.start(tasks("alpha"))
    assert jobs.again(tasks("alpha"), **change).earlier


def test_an_edited_task_starts_a_new_job(jobs, tasks, tmp_path):
    jobs.start(tasks("alpha"))
    with (tmp_path / "tasks" / "alpha" / "task.md").open("a") as handle:
        handle.write("\nOne more line.\n")
    assert "task alpha was edited" in jobs.again(tasks("alpha")).why_new


def test_names_that_look_alike_are_not_the_same(jobs, tasks):
    """C34: another cell of a sweep never takes over the first one's rollouts."""
    first = jobs.start(tasks("alpha"), agent="mini", model="vllm/a/b")
    again = jobs.again(tasks("alpha"), agent="mini", model="vllm/a_b")
    assert not again.earlier and "model: vllm/a/b -> vllm/a_b" in (again.why_new or "")
    assert {p.identity for _, p in first.in_order()}.isdisjoint(p.identity for _, p in again.plan.in_order())


def test_other_tasks_are_another_job(jobs, tasks):
    jobs.start(tasks("alpha", "beta"))
    assert "it also ran task beta" in jobs.again(tasks("alpha")).why_new


def test_the_latest_matching_job_is_continued(jobs, tasks):
    jobs.start(tasks("alpha"))
    second = jobs.start(tasks("alpha"), job_name="second", new=True)
    jobs.start(tasks("alpha"), agent="nop")
    assert jobs.again(tasks("alpha")).plan.job_name == second.job_name


def test_jobs_started_together_do_not_continue_each_other(jobs, tasks):
    began = time.time() - 1
    plans = [jobs.start(tasks("alpha")) for _ in range(12)]
    assert len({plan.job_name for plan in plans}) == 12
    assert not jobs.again(tasks("alpha"), began=began).earlier


def test_new_is_new(jobs, tasks):
    jobs.start(tasks("alpha"))
    assert not jobs.again(tasks("alpha"), new=True).earlier


def test_more_trials_extend_the_same_groups(jobs, tasks):
    first = jobs.start(tasks("alpha"), trials=2)
    again = jobs.again(tasks("alpha"), trials=4)
    assert [job.folder.parent.name for job in again.plan.jobs] == [
        "trial-01",
        "trial-02",
        "trial-03",
        "trial-04",
    ]
    assert len({planned.group_id for _, planned in again.plan.in_order()}) == 1
    assert [job.rollouts for job in again.plan.jobs[:2]] == [job.rollouts for job in first.jobs]


def test_naming_another_job_is_refused(jobs, tasks):
    jobs.start(tasks("alpha"), job_name="mine")
    with pytest.raises(UsageError, match="job mine is another one: agent: oracle -> nop"):
        jobs.again(tasks("alpha"), job_name="mine", agent="nop")


@pytest.mark.parametrize("trials", [1, 3])
def test_a_job_can_be_continued_from_its_folder_alone(jobs, tasks, trials, monkeypatch):
    first = jobs.start(
        tasks("alpha", "beta"), trials=trials, sampling={"top_p": 1.0}, agent_env={"KEY": "value"}
    )
    monkeypatch.setenv("KEY", "value")
    config = config_of_job(first.jobs[-1].folder, {})
    again = find(config, jobs.settings(config), tasks("alpha", "beta"), began=time.time() + 60)
    assert again.earlier.keys() == set(range(1, trials + 1))
    assert config.agent_env == {"KEY": "value"}


def test_a_variable_that_is_gone_is_asked_for(jobs, tasks):
    first = jobs.start(tasks("alpha"), agent_env={"GONE_VARIABLE": "value"})
    with pytest.raises(UsageError, match="GONE_VARIABLE"):
        config_of_job(first.jobs[0].folder, {})


@pytest.mark.parametrize(
    ("reward", "fields", "why"),
    [
        (1.0, {}, None),
        (0.0, {}, None),
        (0.0, {"error_category": "timeout"}, None),
        (None, {"verifier_error_category": "verifier_timeout"}, "ended unscored (verifier_timeout)"),
        (None, {"error_category": "endpoint"}, "ended unscored (endpoint)"),
        (None, {"outcome": "cancelled"}, "was cancelled"),
    ],
)
def test_what_the_agent_earned_stays_and_what_broke_runs_again(make_result, reward, fields, why):
    """C28"""
    assert reason_to_run(make_result(reward=reward, **fields).model_dump()) == why


def test_what_never_finished_runs_again():
    assert reason_to_run(None) == "never finished"


def test_no_folder_is_no_job(tmp_path):
    with pytest.raises(UsageError, match="is no job"):
        config_of_job(tmp_path, {})
