from __future__ import annotations

import pytest

from benchflow.contracts.errors import TaskError, UsageError
from benchflow.contracts.sandbox import NetworkPolicy
from benchflow.tasks.load import load_task


def test_native_package(native):
    root = native(
        """\
        schema_version: "1.3"
        metadata: {difficulty: easy, nested: {deep: [1, 2]}}
        agent: {timeout_sec: 300, user: worker}
        verifier:
          timeout_sec: 12.5
          env: {KEY: "${KEY:-x}", PORT: 8080}
          user: nobody
          pytest_plugins: [ctrf]
          hardening: {cleanup_conftests: false, kill_processes: false}
          reward_range: [-1, 3]
        environment:
          cpus: 2
          memory: 2G
          storage: 512M
          network_mode: allowlist
          allowed_hosts: [pypi.org]
          env: {MODE: fast}
          workdir: /srv/work
          build_timeout_sec: 60
        oracle: {timeout_sec: 5, env: {A: b}}
        artifacts: [/app/out.json]
        benchflow:
          document_version: "0.6"
          runtime_policy: {backend: local, local_base: host}
        """,
        "\nWrite *it*.\n\n## notes\nstay\n",
    )
    task = load_task(root)
    assert (task.name, task.layout, task.path) == ("pkg", "task.md", root.resolve())
    assert task.instruction == "Write *it*.\n\n## notes\nstay"
    assert (task.agent_timeout_sec, task.agent_user) == (300, "worker")
    assert (task.limits.cpus, task.limits.memory_mb, task.limits.storage_mb) == (2, 2048, 512)
    assert task.network == NetworkPolicy("allowlist", ("pypi.org",))
    assert (task.env, task.workdir, task.build_timeout_sec) == ({"MODE": "fast"}, "/srv/work", 60)
    assert (task.backend, task.local_base, task.artifacts) == ("local", "host", ("/app/out.json",))
    assert task.metadata == {"difficulty": "easy", "nested": {"deep": [1, 2]}}
    plan = task.verifier
    assert (plan.target, plan.command, plan.timeout_sec, plan.user) == (
        "/verifier",
        "/verifier/test.sh",
        12.5,
        "nobody",
    )
    assert plan.env == {"KEY": "${KEY:-x}", "PORT": "8080"}
    assert (plan.cleanup_conftests, plan.kill_processes, plan.isolated) == (False, False, False)
    assert (plan.pytest_plugins, plan.reward_range, plan.network) == (("ctrf",), (-1.0, 3.0), None)
    assert task.oracle is not None
    assert (task.oracle.target, task.oracle.command, task.oracle.timeout_sec, task.oracle.env) == (
        "/oracle",
        "/oracle/solve.sh",
        5,
        {"A": "b"},
    )


def test_defaults(native):
    task = load_task(native())
    assert (task.agent_timeout_sec, task.agent_user, task.verifier.timeout_sec) == (None, "agent", 600)
    assert (task.limits.cpus, task.limits.memory_mb, task.limits.storage_mb) == (1, 2048, 10240)
    assert task.network == NetworkPolicy("open")
    assert (task.backend, task.local_base, task.docker_image, task.workdir) == (None, None, None, None)


def test_split_package(split):
    root = split(
        """\
        version = "1.0"
        artifacts = ["/root/results/x.json"]
        [task]
        name = "org/thing"
        authors = []
        [metadata.a.b]
        c = 1
        [agent]
        timeout_sec = 900.0
        [verifier]
        environment_mode = "separate"
        [verifier.env]
        [solution.env]
        TOKEN = "${TOKEN}"
        [environment]
        docker_image = "ghcr.io/org/thing:1"
        memory = "4G"
        storage_mb = 1024
        gpus = 0
        mcp_servers = []
        allow_internet = false
        """,
        **{"environment/Dockerfile": None},
    )
    task = load_task(root)
    assert (task.name, task.layout, task.docker_image) == ("org/thing", "split", "ghcr.io/org/thing:1")
    assert (task.limits.memory_mb, task.limits.storage_mb, task.network.mode) == (4096, 1024, "none")
    assert (task.verifier.target, task.verifier.command, task.verifier.isolated) == (
        "/tests",
        "/tests/test.sh",
        True,
    )
    assert task.oracle is not None and task.oracle.target == "/solution"
    assert task.oracle.env == {"TOKEN": "${TOKEN}"}
    assert task.warnings == ()


def test_task_md_wins_over_the_split_pair(native, split):
    root = native("agent: {timeout_sec: 1}\n")
    split("[agent]\ntimeout_sec = 2\n")
    task = load_task(root)
    assert (task.layout, task.agent_timeout_sec, task.verifier.target) == ("task.md", 1, "/verifier")
    assert task.oracle is not None and task.oracle.target == "/oracle"


def test_native_package_with_the_older_folder_names(native):
    root = native(
        **{
            "verifier/test.sh": None,
            "oracle/solve.sh": None,
            "tests/test.sh": "#!/bin/sh\n",
            "solution/solve.sh": "#!/bin/sh\n",
        }
    )
    task = load_task(root)
    assert task.verifier.target == "/tests"
    assert task.oracle is not None and task.oracle.target == "/solution"


def test_an_empty_native_folder_does_not_fall_back(native):
    root = native(**{"verifier/test.sh": None, "tests/test.sh": "#!/bin/sh\n"})
    (root / "verifier").mkdir()
    with pytest.raises(TaskError, match=r"verifier/test\.sh: no test\.sh"):
        load_task(root)


@pytest.mark.parametrize(
    ("frontmatter", "message"),
    [
        (
            "agent:\n  timeout_secs: 3\n",
            "task.md:3: agent.timeout_secs: unknown key; did you mean 'timeout_sec'?",
        ),
        ("verifer: {}\n", "task.md:2: verifer: unknown key; did you mean 'verifier'?"),
        ("agent:\n  timeout_sec: soon\n", "task.md:3: agent.timeout_sec: must be a number, not 'soon'"),
        ("agent: {timeout_sec: -1}\n", "agent.timeout_sec: must be above 0"),
        ("agent: {timeout_sec: true}\n", "agent.timeout_sec: must be a number, not True"),
        ("verifier: {timeout_sec: .nan}\n", "verifier.timeout_sec: must be a number, not nan"),
        ("environment: {memory: lots}\n", 'environment.memory: must be a size such as "2G"'),
        ("environment: {workdir: /}\n", "environment.workdir: must be an absolute folder below /"),
        ("environment: {workdir: app}\n", "environment.workdir: must be an absolute folder below /"),
        ("environment: {os: windows}\n", "environment.os: 'windows' is not supported yet"),
        ("environment: {gpus: 1}\n", "environment.gpus: GPUs are not supported yet"),
        ("environment: {env: {A: true}}\n", "environment.env.A: must be a text, not True"),
        ("environment: [1]\n", "environment: must be a mapping"),
        ("environment: {}\nsandbox: {cpus: 1}\n", "sandbox: is another name of environment"),
        ("steps: [{name: a}]\n", "steps: a task of several scored steps is not supported yet"),
        ("verifier: {service: db}\n", "verifier.service: a verifier outside the main service"),
        ("verifier: {type: llm-judge}\n", "verifier.type: 'llm-judge' is not supported yet"),
        ("verifier: {reward_range: [1, 0]}\n", "verifier.reward_range: must be two numbers"),
        ("verifier: {hardening: {cleanup_conftests: 'false'}}\n", "must be true or false, not 'false'"),
        ("oracle: {}\nsolution: {}\n", "solution: is another name of oracle"),
        ("schema_version: '2.0'\n", "schema_version: is newer than 1.3"),
        ("schema_version: soon\n", "schema_version: must be a version such as 1.3"),
        ("profile: code-change\n", "profile: a bundle of defaults is not supported yet"),
        ("user: {model: x}\n", "user: a simulated user is not supported yet"),
        ("agent: {a: 1\n", "task.md:2: the frontmatter is not YAML"),
        ("agent: {}\nagent: {}\n", "task.md:3: agent: the key appears twice"),
        ("- a\n- b\n", "task.md:2: the frontmatter is not a mapping"),
        ("benchflow: {teams: {x: 1}}\n", "benchflow.teams: is not supported yet"),
        ("benchflow: {runtime_policy: {backend: modal}}\n", "backend: 'modal' is not supported yet"),
        ("verifier: ../elsewhere\n", "../elsewhere: there is no such folder"),
    ],
)
def test_native_authoring_is_strict(native, frontmatter, message):
    with pytest.raises(TaskError) as caught:
        load_task(native(frontmatter))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("toml", "message"),
    [
        ("[verifier]\nx = [\n", "task.toml:"),
        ("[environment]\n[[environment.nodes]]\nname = 'a'\n", "task.toml:2: environment.nodes"),
        ("[environment]\n\ngpus = 1\n", "task.toml:3: environment.gpus"),
        ("[[steps]]\nname = 'a'\n", "task.toml:1: steps"),
        ("[[environment.mcp_servers]]\nname = 'a'\n", "environment.mcp_servers"),
        ("[[verifier.collect]]\ncommand = 'x'\n", "verifier.collect"),
        ("[verifier.environment]\ndocker_image = 'x'\n", "verifier.environment.docker_image"),
        ("[agent]\ntimeout_sec = '5'\n", "task.toml:2: agent.timeout_sec: must be a number"),
    ],
)
def test_split_import_refuses_what_would_change_the_score(split, toml, message):
    with pytest.raises(TaskError) as caught:
        load_task(split(toml))
    assert message in str(caught.value)


def test_split_import_warns_about_what_it_ignores(split):
    task = load_task(split("[agent]\ntimeout_secs = 3\n[verifier.environment]\ncpus = 2\n"))
    assert task.warnings == (
        "task.toml:4: verifier.environment.cpus: ignored: the verifier gets the task's own limits",
        "task.toml:2: agent.timeout_secs: ignored: unknown key; did you mean 'timeout_sec'?",
    )


def test_every_problem_is_counted(native):
    with pytest.raises(TaskError, match=r"and 1 more: `bench tasks check"):
        load_task(native("agent: {a: 1, timeout_sec: x}\n"))


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"environment/Dockerfile": None}, "environment/Dockerfile: there is no such file"),
        ({"environment/docker-compose.yaml": "services: {}\n"}, "a task of several containers"),
        ({"verifier/Dockerfile": "FROM x\n"}, "verifier/Dockerfile: a verifier image of its own"),
        ({"oracle/solve.sh": None, "oracle/readme": "x"}, "oracle: no solve.sh in it"),
    ],
)
def test_missing_or_unsupported_parts(native, files, message):
    with pytest.raises(TaskError) as caught:
        load_task(native(**files))
    assert message in str(caught.value)


def test_empty_instruction(native, split):
    with pytest.raises(TaskError, match=r"task\.md: the instruction is empty"):
        load_task(native("", "\n \n"))
    with pytest.raises(TaskError, match=r"instruction\.md: the instruction is empty"):
        load_task(split(at="other", **{"instruction.md": " "}))
    with pytest.raises(TaskError, match=r"instruction\.md: cannot be read"):
        load_task(split(at="third", **{"instruction.md": None}))


def test_text_that_is_not_utf8(native):
    root = native()
    (root / "task.md").write_bytes(b"---\nname: a\n---\nok\nbad \xff\n")
    with pytest.raises(TaskError, match=r"task\.md:5: byte 0xff is not UTF-8"):
        load_task(root)


def test_prompt_section_is_the_prompt(native):
    body = "Intro\n\n## prompt\nReal.\n```\n## role: kept\n```\n"
    assert load_task(native("", body)).instruction == "Real.\n```\n## role: kept\n```"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("## prompt\na\n## prompt\nb\n", "task.md:6: the section `## prompt` appears twice"),
        ("x\n## role: solver\n", "task.md:5: the section `## role: solver` is not run yet"),
    ],
)
def test_reserved_sections(native, body, message):
    with pytest.raises(TaskError) as caught:
        load_task(native("name: a\n", body))
    assert message in str(caught.value)


def test_shorthands(native):
    task = load_task(native("name: hello\nimage: ubuntu:24.04\nverifier: checks/\noracle: answer\n", **{
        "verifier/test.sh": None, "oracle/solve.sh": None,
        "checks/test.sh": "#!/bin/sh\n", "answer/solve.sh": "#!/bin/sh\n",
    }))  # fmt: skip
    assert (task.name, task.docker_image) == ("benchflow/hello", "ubuntu:24.04")
    assert (task.verifier.directory.name, task.verifier.target) == ("checks", "/verifier")
    assert task.oracle is not None and task.oracle.directory.name == "answer"


def test_sandbox_is_another_name_of_environment(native):
    assert load_task(native("sandbox: {cpus: 3, network_mode: no-network}\n")).limits.cpus == 3


@pytest.mark.parametrize("user", ["root", 0, "'0'"])
def test_root_agent(native, user):
    assert load_task(native(f"agent: {{user: {user}}}\n")).agent_user is None


def test_declared_script_strategy(native):
    document = """\
        ---
        verifier:
          name: checks
          default_strategy: second
          strategies:
            first: {type: llm-judge, rubric: r.md}
            second: {type: script, command: ./run.sh --fast}
          outputs: {reward_json: /logs/verifier/score.json}
        ---
        """
    task = load_task(native(**{"verifier/verifier.md": document, "verifier/run.sh": "#!/bin/sh\n"}))
    assert task.verifier.command == "cd /verifier && ./run.sh --fast"
    assert (task.verifier.reward_text, task.verifier.reward_json) == (
        "/logs/verifier/reward.txt",
        "/logs/verifier/score.json",
    )


@pytest.mark.parametrize(
    ("verifier", "message"),
    [
        ("strategies: {}", "must declare at least one strategy"),
        ("{default_strategy: b, strategies: {a: {type: script, command: x}}}", "'b' is not declared"),
        ("{strategies: {a: {type: script}}}", "needs a command"),
        ("{strategies: {a: {type: script, command: ./gone.sh}}}", "'gone.sh' is not in the verifier"),
        ("{strategies: {a: {type: llm-judge, rubric: r}}}", "llm-judge strategy is not supported yet"),
        ("{strategies: {a: {type: magic}}}", "must be one of script"),
        (
            "{strategies: {a: {type: script, command: x}}, outputs: {reward_text: /tmp/r}}",
            "must be a file in /logs/verifier",
        ),
    ],
)
def test_strategies_that_cannot_run(native, verifier, message):
    with pytest.raises(TaskError) as caught:
        load_task(native(**{"verifier/verifier.md": f"---\nverifier:\n  {verifier}\n---\n"}))
    assert message in str(caught.value)
    assert "verifier/verifier.md:" in str(caught.value)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("pytest --ctrf /logs/verifier/ctrf.json x", True),
        ('pytest --ctrf="/logs/verifier/ctrf.json" x', True),
        ("pytest --ctrf /tmp/ctrf.json x", False),
        ("# pytest --ctrf /logs/verifier/ctrf.json", False),
        ("echo 1", False),
    ],
)
def test_a_test_report_is_expected_where_it_is_asked_for(native, line, expected):
    assert load_task(native(**{"verifier/test.sh": f"#!/bin/sh\n{line}\n"})).verifier.expects_ctrf is expected


# -- network of each phase (C62) ------------------------------------------------------


@pytest.mark.parametrize(
    ("toml", "agent", "verifier"),
    [
        ("", "open", "open"),
        ("[environment]\nallow_internet = false\n", "none", "none"),
        ("[environment]\nallow_internet = true\n[verifier]\nenvironment_mode = 'separate'\n", "open", "open"),
        ("[agent]\nnetwork_mode = 'no-network'\n", "none", "open"),
        ("[environment]\nnetwork_mode = 'no-network'\n[agent]\nnetwork_mode = 'public'\n", "open", "none"),
        ("[verifier.network]\nmode = 'no-network'\n[environment.network]\nmode = 'public'\n", "open", "none"),
        ("[environment]\nallow_internet = true\n[agent]\nnetwork_mode='allowlist'\n", "allowlist", "open"),
    ],
)
def test_network_of_each_phase(split, toml, agent, verifier):
    task = load_task(split(toml))
    assert (task.network.mode, (task.verifier.network or task.network).mode) == (agent, verifier)


@pytest.mark.parametrize(
    ("toml", "key"),
    [
        ("[environment]\nallow_internet = true\nnetwork_mode = 'no-network'\n", "environment.allow_internet"),
        ("[environment]\nallow_internet = false\nnetwork_mode = 'public'\n", "environment.allow_internet"),
        ("[environment]\nallow_internet = false\n[agent]\nnetwork_mode = 'public'\n", "agent.network_mode"),
        ("[environment]\nnetwork_mode = 'lan'\n", "environment.network_mode"),
        ("[environment]\nallowed_hosts = ['a']\n", "environment.allowed_hosts"),
    ],
)
def test_network_contradictions_are_errors(split, toml, key):
    with pytest.raises(TaskError, match=key):
        load_task(split(toml))


# -- links (C56) ----------------------------------------------------------------------


@pytest.mark.parametrize("target", ["/etc/passwd", "/", "../../outside", "../.."])
def test_links_that_leave_the_package_are_refused(native, target):
    root = native()
    (root / "environment" / "link").symlink_to(target)
    with pytest.raises(TaskError, match=r"environment/link: a link that leaves the task"):
        load_task(root)


def test_links_inside_the_package_are_kept(native):
    root = native()
    (root / "environment" / "link").symlink_to("Dockerfile")
    (root / "environment" / "loop").symlink_to("loop")
    (root / "environment" / "gone").symlink_to("nowhere")
    assert load_task(root).name == "pkg"


def test_no_task_there(tmp_path):
    with pytest.raises(UsageError, match="does not exist"):
        load_task(tmp_path / "nowhere")
    with pytest.raises(UsageError, match="is not a task"):
        load_task(tmp_path)
