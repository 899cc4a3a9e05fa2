"""``bench doctor``, as a user types it: one line per check, a fix for each that is not ok."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing

import pytest

from benchflow.agents import bundle, declaration
from benchflow.cli.main import run
from benchflow.jobs import doctor
from benchflow.jobs.doctor import DoctorReport, Question, examine

POLICY = "turns: [{choices: [{weight: 4, say: a}, {weight: 1, say: b}]}]"
NO_DAEMON = {"DOCKER_HOST": "unix:///nowhere/docker.sock"}

Doctor = Callable[..., DoctorReport]


@pytest.fixture
def ask(capsys, monkeypatch, tmp_path) -> Doctor:
    """``ask(…, code=0)`` runs ``bench doctor --json`` in this process, which is quicker than one of
    its own; no endpoint or key of this machine is seen."""
    monkeypatch.chdir(tmp_path)
    for name in list(os.environ):
        if name.endswith(("_API_KEY", "_BASE_URL")):
            monkeypatch.delenv(name)

    def call(*arguments: object, code: int = 0, env: dict[str, str] | None = None) -> DoctorReport:
        with monkeypatch.context() as patch:
            for name, value in (env or {}).items():
                patch.setenv(name, value)
            found = run(["doctor", "--json", *map(str, arguments)])
        told = capsys.readouterr()
        assert (found, told.err) == (code, ""), told.out
        report = DoctorReport.model_validate_json(told.out)
        assert report.exit_code == code
        assert all(check.fix for check in report.checks if check.status != "ok")
        return report

    return call


@pytest.fixture
def policy(tmp_path) -> Iterator[str]:
    """Base URL of a scripted policy named ``policy``, served by a process of its own."""
    (tmp_path / "policy.yaml").write_text(POLICY)
    command = [sys.executable, "-m", "benchflow.cli.main", "model", "serve", "policy.yaml", "--port", "0"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        yield server.stdout.readline().split(" at ")[1].partition(";")[0]
        server.terminate()


def one(report: DoctorReport, topic: str, name: str = ""):
    (found,) = [check for check in report.checks if (check.topic, check.name) == (topic, name)]
    return found


# -- what it prints ----------------------------------------------------------------------


def test_each_check_is_one_line_with_its_fix_below(bench):
    done = bench("doctor", "--sandbox", "local", "-m", "vllm/m", "--policy-url", "http://127.0.0.1:9/v1")
    assert (done.returncode, done.stderr) == (3, "")
    lines = done.stdout.splitlines()
    assert lines[0].startswith("ok    runtime") and "Python 3." in lines[0]
    (at,) = [index for index, line in enumerate(lines) if line.startswith("fail")]
    assert "does not answer: connection refused" in lines[at]
    assert lines[at + 1] == "      fix: start the model server, or check --policy-url"
    assert all(line[:6].strip() in ("ok", "warn", "fail", "") for line in lines)


def test_a_usable_sandbox_tells_what_it_can_and_why_it_cannot_do_the_rest(ask):
    report = ask("--sandbox", "local")
    facts = one(report, "sandbox", "local").facts
    assert facts["capabilities"]["fork"] is True and "bubblewrap" in facts["facts"]
    lacks = {key for key, can in facts["capabilities"].items() if not can}
    told = {check.name for check in report.checks if check.topic == "sandbox"}
    assert told == {"local", "local can", *(f"local no {key.replace('_', ' ')}" for key in lacks)}
    assert {check.topic for check in report.checks} == {
        *("runtime", "sandbox", "leftovers", "agent", "credentials", "disk")
    }


# -- sandboxes ---------------------------------------------------------------------------


@pytest.fixture
def engine(tmp_path) -> Iterator[Callable[[bytes | None], dict[str, str]]]:
    """``engine(version)`` listens as a docker engine that answers every request with this JSON,
    or with ``None`` takes connections and says nothing; returns the variable that names it."""
    server = socket.socket(socket.AF_UNIX)
    server.bind(str(tmp_path / "docker.sock"))

    def serve(version: bytes | None) -> dict[str, str]:
        server.listen()

        def answer() -> None:
            with contextlib.suppress(OSError):
                while version is not None:
                    caller, _ = server.accept()
                    caller.recv(65536)
                    caller.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(version) + version)
                    caller.close()

        threading.Thread(target=answer, daemon=True).start()
        return {"DOCKER_HOST": f"unix://{tmp_path}/docker.sock"}

    yield serve
    with contextlib.suppress(OSError):
        server.shutdown(socket.SHUT_RDWR)
    server.close()


def stops_a_run(bench, examples, tmp_path, env: dict[str, str], message: str) -> None:
    """A run on docker ends with the same line, exit 3, and nothing made, nor run elsewhere."""
    done = bench("run", examples / "hello", "-a", "oracle", "--sandbox", "docker", "-o", "jobs", env=env)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (3, "", 1), done.stderr
    assert done.stderr.startswith(f"error: {message}")
    assert not (tmp_path / "jobs").exists()


def test_no_daemon(ask, bench, examples, tmp_path):
    check = one(ask("--sandbox", "docker", env=NO_DAEMON, code=3), "sandbox", "docker")
    assert check.message == "no docker engine: there is no /nowhere/docker.sock"
    assert "systemctl start docker" in (check.fix or "")
    stops_a_run(bench, examples, tmp_path, NO_DAEMON, check.message)
    assert one(ask(env=NO_DAEMON), "sandbox", "docker").status == "fail", "local is enough unless asked"


def test_a_socket_nobody_listens_on(ask, engine, tmp_path):
    env = {"DOCKER_HOST": f"unix://{tmp_path}/docker.sock"}
    check = one(ask("--sandbox", "docker", env=env, code=3), "sandbox", "docker")
    assert check.message == f"no docker engine: nothing answers at {tmp_path}/docker.sock"


def test_an_old_engine(ask, bench, engine, examples, tmp_path):
    env = engine(b'{"Version": "1.12.6", "ApiVersion": "1.24"}')
    check = one(ask("--sandbox", "docker", env=env, code=3), "sandbox", "docker")
    assert "is too old: 1.12.6 speaks API 1.24" in check.message
    stops_a_run(bench, examples, tmp_path, env, check.message)


def test_something_else_than_an_engine(ask, engine):
    check = one(ask("--sandbox", "docker", env=engine(b'{"hello": "there"}'), code=3), "sandbox", "docker")
    assert "is no docker engine" in check.message and check.fix == "check DOCKER_HOST"


async def test_an_engine_that_hangs_is_given_up(engine, monkeypatch):
    monkeypatch.setenv("DOCKER_HOST", engine(None)["DOCKER_HOST"])
    monkeypatch.setattr(doctor, "SANDBOX_PATIENCE", 0.2)
    report = await examine(Question(sandbox="docker"))
    assert report.exit_code == 3
    assert "did not say within 0.2 s" in one(report, "sandbox", "docker").message


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user needs root")
async def test_no_permission_on_the_socket(engine, monkeypatch, tmp_path):
    env = engine(b"{}")
    monkeypatch.setenv("DOCKER_HOST", env["DOCKER_HOST"])
    for folder in (tmp_path, *tmp_path.parents[:2]):
        folder.chmod(0o755)
    (tmp_path / "docker.sock").chmod(0o600)
    await examine(Question(sandbox="docker"))  # what it imports may not be that user's to read
    os.seteuid(65534)
    try:
        report = await examine(Question(sandbox="docker"))
    finally:
        os.seteuid(0)
    check = one(report, "sandbox", "docker")
    assert check.message == f"no permission on the docker socket {tmp_path}/docker.sock"
    assert "usermod -aG docker" in (check.fix or "")


def test_a_docker_that_works_tells_what_it_is(ask, bench, require):
    done = bench("doctor", "--sandbox", "docker")
    require(done.returncode == 0, done.stdout)
    facts = one(ask("--sandbox", "docker"), "sandbox", "docker").facts["facts"]
    assert facts.keys() >= {"engine", "api", "storage_driver", "machine"}


@pytest.mark.parametrize(("option", "name"), [("--sandbox", "frob"), ("-a", "frob"), ("-m", "frob/x")])
def test_a_name_that_does_not_exist_is_one_line_and_exit_2(bench, option, name):
    done = bench("doctor", option, name, "--json")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith("error: unknown ")


async def test_a_sandbox_that_hangs_is_given_up(monkeypatch):
    monkeypatch.setattr(doctor, "SANDBOX_PATIENCE", 0.05)
    monkeypatch.setattr("benchflow.sandboxes.local.provider.LocalProvider.preflight", asyncio.Event().wait)
    report = await examine(Question(sandbox="local"))
    assert report.exit_code == 3
    assert "did not say within" in one(report, "sandbox", "local").message


# -- agents ------------------------------------------------------------------------------


@pytest.fixture
def installed(tmp_path) -> dict[str, str]:
    """A bundle of the agent ``thing``, which a declaration in ``thing.toml`` describes."""
    (tmp_path / "thing.toml").write_text(
        'name = "thing"\nkind = "acp"\nversion = "1.0"\ndescription = "A thing."\n'
        '[install]\nnpm = "thing"\nnode = "24.0.0"\n[start]\ncommand = ["{bundle}/thing"]\n'
    )
    declared = declaration.read(tmp_path / "thing.toml")
    folder = tmp_path / "bundles" / "thing-1.0-abc"
    folder.mkdir(parents=True)
    (folder / "thing").write_bytes(b"12345")
    facts = {"name": "thing", "version": "1.0", "recipe": bundle.recipe(declared), "size_bytes": 5}
    (folder / bundle.MARKER).write_text(json.dumps(facts))
    return {"BENCHFLOW_BUNDLES": str(tmp_path / "bundles")}


def test_an_installed_agent_tells_version_size_and_proof(ask, installed):
    check = one(ask("-a", "thing.toml", "--sandbox", "local", env=installed), "agent", "thing.toml")
    assert (check.status, check.facts["size_bytes"]) == ("ok", 5)
    assert check.message == "1.0 installed, 0 MB, not proved"


def test_an_agent_that_is_not_installed_is_a_warning(ask, installed, tmp_path):
    env = {"BENCHFLOW_BUNDLES": str(tmp_path / "none")}
    check = one(ask("-a", "thing.toml", "--sandbox", "local", env=env), "agent", "thing.toml")
    assert (check.status, check.fix) == ("warn", "bench agent install thing.toml")


async def test_an_agent_of_another_processor_does_not_fit_a_sandbox(installed, monkeypatch, tmp_path):
    async def facts(_: object) -> dict[str, str]:
        return {"machine": "vax"}

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("benchflow.sandboxes.local.provider.LocalProvider.facts", facts)
    report = await examine(Question("local", agent="thing.toml"))
    assert one(report, "sandbox", "local").message.endswith("and the sandbox 'local' runs vax")
    assert (await examine(Question("local", agent="mini"))).exit_code == 0, "mini runs in the engine"


def test_a_damaged_agent_fails_and_stops_a_run(ask, bench, examples, installed, tmp_path):
    (tmp_path / "bundles" / "thing-1.0-abc" / "thing").write_bytes(b"123")
    check = one(ask("-a", "thing.toml", "--sandbox", "local", env=installed, code=3), "agent", "thing.toml")
    assert check.status == "fail" and "is damaged" in check.message
    model = f"scripted/{examples.parent / 'policies' / 'half-life.yaml'}"
    options = ("-a", "thing.toml", "-m", model, "--sandbox", "local", "-o", "jobs")
    done = bench("run", examples / "hello", *options, env=installed)
    assert (done.returncode, done.stderr.count("\n")) == (3, 1), done.stderr
    assert done.stderr.startswith(f"error: {check.message}") and not (tmp_path / "jobs").exists()


# -- credentials -------------------------------------------------------------------------


def test_keys_are_told_by_name_and_never_by_value(ask):
    secret = "sk-" + "Zq7" * 12
    env = {"OPENAI_API_KEY": secret, "ELSEWHERE_API_KEY": secret[::-1]}
    report = ask("--sandbox", "local", env=env)
    check = one(report, "credentials")
    assert check.message == "ELSEWHERE_API_KEY, OPENAI_API_KEY set"
    told = report.model_dump_json() + "\n".join(report.lines())
    assert secret not in told and secret[::-1] not in told


@pytest.mark.parametrize(
    ("env", "said", "fix"),
    [
        ({"OPENAI_API_KEY": ""}, "OPENAI_API_KEY is empty", "export OPENAI_API_KEY=…"),
        ({"OPENAI_API_KEY": "abc\n"}, "OPENAI_API_KEY is padded with blanks", "export OPENAI_API_KEY=…"),
        ({"GLM_API_KEY": "abc"}, "GLM_API_KEY is set, but GLM_BASE_URL is not", "export GLM_BASE_URL=…"),
    ],
)
def test_a_key_that_cannot_work_is_a_warning(ask, env, said, fix):
    check = one(ask("--sandbox", "local", env=env), "credentials")
    assert (check.status, check.message, check.fix) == ("warn", said, fix)


def test_a_missing_key_fails_only_when_its_model_is_asked_for(ask):
    check = one(ask("-m", "openai/gpt-5", "--sandbox", "local", code=3), "endpoint", "openai/gpt-5")
    assert (check.status, check.fix) == ("fail", "export OPENAI_API_KEY=…")


def test_a_password_in_an_address_is_not_printed(ask):
    url = "http://me:hunter2hunter2@127.0.0.1:9/v1"
    report = ask("-m", "vllm/m", "--policy-url", url, "--sandbox", "local", code=3)
    assert "hunter2" not in report.model_dump_json()


# -- the policy's endpoint ---------------------------------------------------------------


def test_an_endpoint_tells_what_it_can_return(ask, policy):
    report = ask("-m", "vllm/policy", "--policy-url", policy, "--sandbox", "local")
    check = one(report, "endpoint", "vllm/policy")
    assert (check.status, check.facts["level"], check.facts["listed"]) == ("ok", "tokens", True)
    assert "exact token ids" in check.message and "processed" in check.message


def test_an_endpoint_of_the_environment_is_asked_for_its_only_model(ask, policy):
    report = ask("--sandbox", "local", env={"BENCHFLOW_PROVIDER_BASE_URL": policy})
    assert one(report, "endpoint", "vllm/policy").facts["level"] == "tokens"


def test_an_endpoint_nobody_asked_for_may_be_down(ask):
    env = {"BENCHFLOW_PROVIDER_BASE_URL": "http://127.0.0.1:9"}
    assert one(ask("--sandbox", "local", env=env), "endpoint", "policy").status == "warn"
    ask("--sandbox", "local", "-m", "vllm/m", env=env, code=3)


def test_a_scripted_model_is_read_here(ask, examples):
    model = f"scripted/{examples.parent / 'policies' / 'half-life.yaml'}"
    assert one(ask("-m", model, "--sandbox", "local"), "endpoint", model).status == "ok"


async def test_an_endpoint_that_never_answers_is_given_up(monkeypatch):
    monkeypatch.setattr(doctor, "ENDPOINT_PATIENCE", 0.2)
    with closing(socket.create_server(("127.0.0.1", 0))) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/v1"
        report = await examine(Question("local", model="vllm/m", policy_url=url))
    assert report.exit_code == 3
    assert "gave no answer within 0.2 s" in one(report, "endpoint", "vllm/m").message


# -- disks and leftovers -----------------------------------------------------------------


def test_a_jobs_folder_that_cannot_be_used_fails(ask, tmp_path):
    (tmp_path / "file").touch()
    check = one(ask("-o", tmp_path / "file" / "jobs", "--sandbox", "local", code=3), "disk", "jobs")
    assert check.status == "fail" and "is not a folder" in check.message


def test_a_state_folder_that_cannot_be_made_is_a_line_too(ask, tmp_path):
    (tmp_path / "file").touch()
    report = ask("--sandbox", "local", code=3, env={"BENCHFLOW_HOME": str(tmp_path / "file" / "home")})
    assert one(report, "disk", "state").status == "fail"


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small tmpfs needs root")
def test_a_disk_that_is_full_stops_a_run_and_fails_here(ask, bench, examples, tmp_path):
    small = tmp_path / "small"
    small.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=128k", "none", small], check=False).returncode:
        pytest.skip("this host does not let root mount a tmpfs")
    try:
        check = one(ask("-o", small / "jobs", "--sandbox", "local", code=3), "disk", "jobs")
        assert check.message == f"the disk of {small} is full"
        done = bench("run", examples / "hello", "-a", "oracle", "--sandbox", "local", "-o", small / "jobs")
        assert (done.returncode, done.stderr.count("\n")) == (3, 1)
        assert done.stderr.startswith(f"error: {check.message}") and list(small.iterdir()) == []
    finally:
        subprocess.run(["umount", "-l", small], check=True)
