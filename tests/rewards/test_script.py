"""The script verifier in a real sandbox, honest agents only."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchflow.contracts.errors import (
    HardeningError,
    RewardFileError,
    SandboxLostError,
    VerifierFailedError,
    VerifierTimeoutError,
)
from benchflow.tasks.load import load_task

EXAMPLES = ("hello", "half-life", "repair-service", "analyse-sales")


async def test_a_reward_with_its_output_and_files(lab, make_task):
    task = make_task(
        """\
        #!/bin/sh
        pwd; whoami; echo note >&2
        echo '{"reward": 0.5, "tests": 3}' > /logs/verifier/reward.json
        echo '{"why": "because"}' > /logs/verifier/reward-details.json
        """
    )
    scored = await lab.run(task)
    assert (scored.reward, dict(scored.result.items), scored.result.error) == (0.5, {"tests": 3.0}, None)
    assert scored.result.mode == "shared"
    assert [(event.value, event.space, event.granularity) for event in scored.result.events] == [
        (0.5, "output", "terminal")
    ]
    assert scored.file("test-stdout.txt") == b"/app\nroot\nnote\n"
    assert scored.result.output == "/app\nroot\nnote\n"
    assert b"because" in scored.file("reward-details.json")


async def test_output_that_is_not_utf8_is_kept_raw(lab, make_task):
    """C36"""
    task = make_task("printf 'ok\\303\\050\\n'; echo 1 > /logs/verifier/reward.txt\n")
    scored = await lab.run(task)
    assert scored.reward == 1
    assert scored.file("test-stdout.txt") == b"ok\xc3(\n"
    assert scored.result.output == "ok�(\n"


async def test_a_fresh_reward_counts_whatever_the_exit_code(lab, make_task):
    scored = await lab.run(make_task("#!/bin/sh\necho 0.25 > /logs/verifier/reward.txt\nexit 3\n"))
    assert scored.reward == 0.25
    assert any("exit code 3" in note for note in scored.result.notes)


async def test_no_reward_and_a_failing_exit(lab, make_task):
    scored = await lab.run(make_task("#!/bin/sh\necho broken pipe dream >&2\nexit 7\n"))
    assert scored.reward is None
    assert isinstance(scored.result.error, VerifierFailedError)
    assert "exit code 7" in str(scored.result.error) and "broken pipe dream" in str(scored.result.error)


async def test_a_script_that_cannot_start(lab, make_task):
    scored = await lab.run(make_task("#!/no/such/shell\n"))
    assert isinstance(scored.result.error, VerifierFailedError)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (":", "wrote no reward file"),
        ("ln -s /etc/hostname reward.txt", "reward.txt is a link"),
        ("mkfifo reward.txt", "reward.txt is a special"),
        ("mkdir reward.txt", "reward.txt is a folder"),
        ("ln -s /etc/hostname reward.json; echo 1 > reward.txt", "reward.json is a link"),
        ("echo nan > reward.txt", "it holds 'nan"),
        ("echo -1 > reward.txt; echo 0.5 > reward.json", "outside 0 to 1"),
        ("head -c 100000 /dev/zero > reward.txt", "larger than"),
        ("cd ..; rm -rf verifier; ln -s /app verifier; echo 1 > /app/reward.txt", "is no folder"),
        ("cd ..; rm -rf verifier; echo 1 > verifier", "is no folder"),
    ],
)
async def test_reward_files_that_do_not_count(lab, make_task, lines, message):
    """C02, C04, C06"""
    scored = await lab.run(make_task(f"#!/bin/sh\ncd /logs/verifier\n{lines}\n"))
    assert scored.reward is None
    assert isinstance(scored.result.error, RewardFileError)
    assert message in str(scored.result.error)


async def test_warnings_mixed_into_the_reward(lab, make_task):
    """C08"""
    task = make_task(
        """\
        #!/bin/sh
        python3 -c 'import warnings; warnings.warn("x"); print(0.5)' > /logs/verifier/reward.txt 2>&1
        """
    )
    scored = await lab.run(task)
    assert scored.reward is None and "UserWarning" in str(scored.result.error)
    assert b"UserWarning" in scored.file("reward.txt")


async def test_a_timeout_is_never_a_score(lab, make_task):
    task = load_task(make_task("#!/bin/sh\necho started; echo 1 > /logs/verifier/reward.txt; sleep 600\n"))
    scored = await lab.run(task, timeout=1.0)
    assert scored.reward is None
    assert isinstance(scored.result.error, VerifierTimeoutError)
    assert "started" in scored.result.output and scored.file("reward.txt") == b"1\n"


async def test_verifier_environment(lab, make_task, monkeypatch):
    monkeypatch.setenv("LAB_SECRET", "swordfish-42")
    monkeypatch.delenv("LAB_UNSET", raising=False)
    task = make_task(
        """\
        #!/bin/sh
        echo "$KEY $MODEL $MODE"
        echo "$KEY" > /logs/verifier/extra.txt
        [ "$KEY" = swordfish-42 ] && echo 1 > /logs/verifier/reward.txt
        """,
        frontmatter="""\
        verifier: {env: {KEY: "${LAB_SECRET}", MODEL: "${LAB_UNSET:-small}", MODE: plain}}
        """,
    )
    scored = await lab.run(task)
    assert scored.reward == 1
    assert scored.file("test-stdout.txt") == b"[REDACTED] small plain\n"
    assert scored.file("extra.txt") == b"[REDACTED]\n"
    assert "swordfish" not in scored.result.output


async def test_a_variable_that_is_not_set_is_named(lab, make_task, monkeypatch):
    monkeypatch.delenv("LAB_UNSET", raising=False)
    scored = await lab.run(make_task("#!/bin/sh\n", frontmatter='verifier: {env: {A: "${LAB_UNSET}"}}\n'))
    assert isinstance(scored.result.error, VerifierFailedError)
    assert "LAB_UNSET" in str(scored.result.error)


async def test_verifier_as_another_user(lab, make_task):
    task = make_task(
        "#!/bin/sh\nwhoami\ntouch /app/mine && echo 1 > /logs/verifier/reward.txt\n",
        frontmatter="verifier: {user: nobody}\n",
    )
    scored = await lab.run(task, agent="touch made-by-agent")
    assert (scored.reward, scored.result.output) == (1, "nobody\n")


async def test_script_strategy_runs_in_its_own_folder(lab, make_task):
    document = "---\nverifier:\n  strategies: {main: {type: script, command: ./score.py}}\n---\n"
    task = make_task(
        "#!/bin/sh\n",
        **{
            "verifier/verifier.md": document,
            "verifier/score.py": """
                #!/usr/bin/env python3
                import os
                print(os.getcwd())
                open("/logs/verifier/reward.txt", "w").write("1")
                """,
        },
    )
    scored = await lab.run(task)
    assert (scored.reward, scored.result.output) == (1, "/verifier\n")


async def test_large_results_are_left_behind_but_the_reward_is_kept(lab, make_task, monkeypatch):
    monkeypatch.setattr("benchflow.rewards.script._DOWNLOAD_LIMIT", 100_000)
    task = make_task("#!/bin/sh\ncd /logs/verifier; head -c 300000 /dev/zero > big; echo 1 > reward.txt\n")
    scored = await lab.run(task)
    assert scored.reward == 1 and not (scored.logs / "big").exists()
    assert any("only the reward files were kept" in note for note in scored.result.notes)


async def test_output_beyond_the_limit_is_noted(lab, make_task):
    task = make_task(
        "#!/bin/sh\nhead -c 20000000 /dev/zero | tr '\\0' x; echo 1 > /logs/verifier/reward.txt\n"
    )
    scored = await lab.run(task)
    assert scored.reward == 1
    assert any("of 20000000 bytes" in note for note in scored.result.notes)


@pytest.mark.parametrize(
    ("report", "reward"),
    [
        ('{"results": {"summary": {"tests": 3}}}', 0.0),
        ('{"results": {"summary": {"tests": 0}}}', None),
        ('{"results": {"tests": []}}', None),
        ("{", None),
        (None, None),
    ],
)
async def test_a_zero_without_a_test_report_is_the_verifiers_own_failure(lab, make_task, report, reward):
    """C10: the test runner was never installed, and the else-branch wrote 0."""
    make_report = f"echo '{report}' > /logs/verifier/ctrf.json" if report else ":"
    task = make_task(
        f"""\
        #!/bin/sh
        head -c 100000 /dev/zero | tr '\\0' x
        {make_report}
        no-such-runner --ctrf /logs/verifier/ctrf.json /verifier/test_x.py
        if [ $? -eq 0 ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
        """
    )
    scored = await lab.run(task)
    assert scored.reward == reward
    if reward is None:
        assert isinstance(scored.result.error, VerifierFailedError)
        assert "without a test report" in str(scored.result.error)


@pytest.mark.parametrize(
    ("runner", "reward"),
    [
        ("no-such-folder/pytest", None),
        ("python3 -S -m pytest", None),
        ("no-such-program", 0.0),
        ("sh -c 'echo \"1 failed in 0.02s\"; pytest --version; false'", 0.0),
    ],
)
async def test_a_zero_of_a_runner_that_is_not_there_is_no_score(lab, make_task, runner, reward):
    """C10: without a report the shell's own words tell, also behind 100 kB of noise."""
    task = make_task(
        f"""\
        #!/bin/sh
        head -c 100000 /dev/zero | tr '\\0' '\\n'
        echo no-such-pkg: cannot be installed
        {runner} /verifier/test_x.py  # pytest
        [ $? = 0 ] && echo 1 > /logs/verifier/reward.txt || echo 0 > /logs/verifier/reward.txt
        head -c 100000 /dev/zero | tr '\\0' '\\n'
        """
    )
    scored = await lab.run(task)
    assert scored.reward == reward, scored.result
    if reward is None:
        assert isinstance(scored.result.error, VerifierFailedError)
        assert "without running a test" in str(scored.result.error) and "pytest" in str(scored.result.error)


async def test_slow_helper_commands_do_not_fail_the_rollout(lab, make_task):
    """C18: under load each command may take as long as the verifier itself may."""
    asked: list[float | None] = []

    class Slow:
        def __init__(self, sandbox):
            self._sandbox = sandbox

        def __getattr__(self, name):
            return getattr(self._sandbox, name)

        async def exec(self, cmd, *, timeout=None, **options):
            asked.append(timeout)
            return await self._sandbox.exec(cmd, timeout=timeout, **options)

    task = make_task("#!/bin/sh\necho 1 > /logs/verifier/reward.txt\n")
    scored = await lab.run(task, wrap=Slow, timeout=1800.0, agent="ln -s /etc out")
    assert scored.reward == 1
    assert len(asked) >= 3 and all(limit is None or limit >= 1800 for limit in asked)


async def test_agent_processes_that_cannot_be_proved_gone(lab, make_task):
    class Stubborn:
        def __init__(self, sandbox):
            self._sandbox = sandbox

        def __getattr__(self, name):
            return getattr(self._sandbox, name)

        async def kill_processes(self, *, user=None):
            raise HardeningError("a process of the agent is still there")

    scored = await lab.run(make_task("#!/bin/sh\necho 1 > /logs/verifier/reward.txt\n"), wrap=Stubborn)
    assert scored.reward is None and isinstance(scored.result.error, HardeningError)


async def test_a_lost_sandbox_is_not_the_verifiers_fault(lab, make_task):
    class Gone:
        def __init__(self, sandbox):
            self._sandbox = sandbox

        def __getattr__(self, name):
            return getattr(self._sandbox, name)

        async def upload(self, *args, **options):
            await self._sandbox.teardown()
            return await self._sandbox.upload(*args, **options)

    with pytest.raises(SandboxLostError):
        await lab.run(make_task("#!/bin/sh\n"), wrap=Gone)


async def test_a_service_may_go_on_running(lab, make_task):
    task = make_task(
        """\
        #!/bin/sh
        [ "$(cat /app/pid)" ] && kill -0 "$(cat /app/pid)" && reward=1
        echo "${reward:-0}" > /logs/verifier/reward.txt
        """,
        frontmatter="verifier: {hardening: {kill_processes: false}}\n",
    )
    service = "setsid sleep 600 > /dev/null 2>&1 < /dev/null & echo $! > pid"
    assert (await lab.run(task, agent=service)).reward == 1
    killed = replace(load_task(task).verifier, kill_processes=True)
    assert (await lab.run(replace(load_task(task), verifier=killed), agent=service)).reward == 0


async def test_between_rounds_nothing_is_killed_or_restored(lab, make_task):
    task = make_task(
        """\
        #!/bin/sh
        [ -e /app/conftest.py ] && exit 1
        kill -0 "$(cat /app/pid)" && [ "$(stat -c %U /app/pid)" = agent ] && reward=1
        echo "${reward:-0}" > /logs/verifier/reward.txt
        """
    )
    agent = "setsid sleep 600 > /dev/null 2>&1 < /dev/null & echo $! > pid; touch conftest.py"
    scored = await lab.run(task, agent=agent, soft=True)
    assert scored.reward == 1


async def test_another_network_for_the_verifier_means_a_copy_of_the_sandbox(lab, make_task):
    task = make_task(
        """\
        #!/bin/sh
        grep -c : /proc/net/dev
        [ -e /home/agent/kept ] && echo 1 > /logs/verifier/reward.txt
        """,
        frontmatter="agent: {network_mode: public, timeout_sec: 60}\n",
    )
    text = (task / "task.md").read_text().replace("agent: {timeout_sec: 60}\n", "")
    (task / "task.md").write_text(text)
    scored = await lab.run(task, agent="touch /home/agent/kept")
    assert scored.reward == 1, scored.result
    assert scored.result.mode == "shared"
    assert scored.result.output == "1\n"  # only the loopback


@pytest.mark.parametrize("name", EXAMPLES)
@pytest.mark.parametrize("mode", ["shared", "isolated"])
async def test_examples(lab, request, name, mode):
    """Each example: its own solution scores 1, doing nothing scores less."""
    task = load_task(request.config.rootpath / "examples" / "tasks" / name)
    assert (await lab.run(task, solve=True, mode=mode)).reward == 1
    idle = await lab.run(task, mode=mode)
    assert idle.reward is not None and idle.reward < 1
    assert idle.result.mode == mode


async def test_the_root_folder_is_never_re_owned(lab, make_task):
    """C64"""
    task = make_task(
        """\
        #!/bin/sh
        [ "$(pwd)" = / ] && [ "$(stat -c %U /home/agent/mine)" = agent ] && echo 1 > /logs/verifier/reward.txt
        """
    )
    scored = await lab.run(task, workspace="/", agent="touch /home/agent/mine")
    assert scored.reward == 1, scored.result


MINE = """\
#!/bin/sh
[ "$(stat -c %U mine)" = root ] && echo 1 > /logs/verifier/reward.txt
"""


async def test_a_workspace_may_have_any_name(lab, make_task):
    """Its name travels in the expression that looks through it."""
    folder = "/srv/LIMIT [a]* 'UNDO'"
    task = replace(load_task(make_task(MINE)), workdir=folder)
    scored = await lab.run(task, workspace=folder, agent="touch mine")
    assert scored.reward == 1, scored.result
