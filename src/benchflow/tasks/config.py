"""What the configuration keys of a task mean, the same for both layouts.

A key that would change what is run or scored and that is not honoured is a problem;
one that changes nothing of that is a warning. ``settings`` never raises for content.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import partial

from benchflow.contracts.sandbox import Limits
from benchflow.contracts.task import OraclePlan, Task, VerifierPlan
from benchflow.tasks.network import Phases, network_phases
from benchflow.tasks.problems import ConfigSource, Findings
from benchflow.tasks.section import Section

NEWEST_SCHEMA = (1, 3)
_LATER = "is not supported yet"


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything a task's configuration decides. The three parts lack what only the files of
    the package tell; the paths are those of folders that the configuration names."""

    name: str | None
    task: partial[Task]
    verifier: partial[VerifierPlan]
    verifier_path: str | None
    oracle: partial[OraclePlan]
    oracle_path: str | None
    docker_image: str | None


def settings(source: ConfigSource, findings: Findings) -> Settings:
    root = Section(source, findings)
    _schema(root)
    environment = root.table(_spelling(root, "environment", "sandbox"))
    agent = root.table("agent")
    verifier = _package_table(root, "verifier")
    oracle = _package_table(root, _spelling(root, "oracle", "solution"))
    phases = network_phases(environment, agent, verifier)
    backend, local_base, paths = _benchflow(root.table("benchflow"))
    found = Settings(
        name=_name(root),
        task=partial(
            Task,
            metadata=root.table("metadata").data,
            agent_timeout_sec=agent.number("timeout_sec"),
            agent_user=_agent_user(agent),
            network=phases.agent,
            limits=_limits(environment),
            build_timeout_sec=environment.number("build_timeout_sec") or 600.0,
            env=environment.env(),
            workdir=_workdir(environment),
            artifacts=_artifacts(root),
            backend=backend,
            local_base=local_base,
        ),
        verifier=_verifier(verifier, phases),
        verifier_path=verifier.text("path") or paths.get("verifier"),
        oracle=partial(OraclePlan, timeout_sec=oracle.number("timeout_sec"), env=oracle.env()),
        oracle_path=oracle.text("path") or paths.get("oracle"),
        docker_image=_docker_image(root, environment),
    )
    verifier.close()
    oracle.close()
    _close_agent(agent)
    _close_environment(environment)
    _close_root(root)
    return found


def _schema(root: Section) -> None:
    keys = [key for key in ("schema_version", "version") if root.value(key) is not None]
    for key in keys[:1]:
        match = re.fullmatch(r"(\d+)(?:\.(\d+))?(?:\.\d+)?", str(root.value(key)))
        if match is None or isinstance(root.value(key), bool):
            root.problem(key, f"must be a version such as 1.3, not {root.value(key)!r}")
        elif int(match[1]) > NEWEST_SCHEMA[0]:
            root.problem(key, f"is newer than 1.3, the newest this benchflow reads: {match[0]}")
        elif (int(match[1]), int(match[2] or 0)) > NEWEST_SCHEMA:
            root.warn(key, f"{match[0]} is newer than 1.3; read as 1.3")


def _name(root: Section) -> str | None:
    task = root.table("task")
    name, short = task.text("name"), root.text("name")
    task.accept("description", "authors", "keywords", "version", "id")
    task.close()
    if name and short:
        root.problem("name", "task.name is given too; keep one of them")
    if short and "/" not in short:
        short = f"benchflow/{short}"
    return name or short


def _spelling(root: Section, name: str, alias: str) -> str:
    """The one of two names of a section that is used."""
    if root.value(name) is not None and root.value(alias) is not None:
        root.problem(alias, f"is another name of {name}, which is given too; keep {name}")
    return alias if root.value(name) is None else name


def _package_table(root: Section, key: str) -> Section:
    """A section that authors may shorten to the path of its folder."""
    if isinstance(root.value(key), str):
        return Section(root.source, root.findings, (key,), {"path": root.value(key)})
    return root.table(key)


def _agent_user(agent: Section) -> str | None:
    user = _user(agent, default="agent")
    return None if user == "root" else user


def _user(section: Section, default: str | None) -> str | None:
    value = section.value("user")
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return "root" if value == 0 else str(value)
    if value is None or (isinstance(value, str) and re.fullmatch(r"[\w][\w.-]*", value)):
        return default if value is None else "root" if value == "0" else value
    section.problem("user", f"must be a user name or a numeric uid, not {value!r}")
    return default


def _close_agent(agent: Section) -> None:
    agent.accept("setup_network")
    agent.ignore("reasoning_effort", "the run's own setting decides")
    agent.close()


def _verifier(verifier: Section, phases: Phases) -> partial[VerifierPlan]:
    kind = verifier.text("type")
    if kind not in (None, "test-script", "script"):
        verifier.problem("type", f"{kind!r} {_LATER}; test-script is")
    if verifier.text("service") not in (None, "main"):
        verifier.problem("service", f"a verifier outside the main service {_LATER}")
    mode = verifier.text("environment_mode")
    if mode not in (None, "separate", "shared"):
        verifier.problem("environment_mode", f"must be separate or shared, not {mode!r}")
    verifier.refuse("collect", f"collecting with commands before a separate verifier {_LATER}")
    verifier.refuse("restart_environment", f"restarting the environment for the verifier {_LATER}")
    _own_environment(verifier.table("environment"))
    hardening = verifier.table("hardening")
    cleanup, kill = hardening.flag("cleanup_conftests"), hardening.flag("kill_processes")
    hardening.close(strict=False)
    user = _user(verifier, default=None)
    return partial(
        VerifierPlan,
        timeout_sec=verifier.number("timeout_sec") or 600.0,
        env=verifier.env(),
        user=None if user == "root" else user,
        isolated=mode == "separate",
        cleanup_conftests=cleanup is not False,
        kill_processes=kill is not False,
        pytest_plugins=verifier.names("pytest_plugins"),
        reward_range=_reward_range(verifier),
        network=phases.verifier if phases.verifier != phases.agent else None,
    )


def _own_environment(environment: Section) -> None:
    for key in ("docker_image", "image", "env", "workdir"):
        environment.refuse(key, f"a verifier image of its own {_LATER}")
    for key in ("cpus", "memory_mb", "storage_mb", "memory", "storage", "build_timeout_sec"):
        environment.ignore(key, "the verifier gets the task's own limits")
    environment.refuse("gpus", "GPUs are not supported yet")
    environment.close()


def _reward_range(verifier: Section) -> tuple[float, float]:
    value = verifier.value("reward_range")
    if value is None:
        return (0.0, 1.0)
    numbers = value if isinstance(value, list) else []
    good = [n for n in numbers if isinstance(n, (int, float)) and not isinstance(n, bool) and abs(n) < 1e15]
    if len(numbers) != 2 or len(good) != 2 or not good[0] < good[1]:
        verifier.problem("reward_range", f"must be two numbers, lowest then highest, not {value!r}")
        return (0.0, 1.0)
    return float(good[0]), float(good[1])


def _limits(environment: Section) -> Limits:
    return Limits(
        cpus=environment.number("cpus") or 1,
        memory_mb=environment.megabytes("memory_mb", "memory") or 2048,
        storage_mb=environment.megabytes("storage_mb", "storage") or 10240,
    )


def _docker_image(root: Section, environment: Section) -> str | None:
    given = [
        (section, key)
        for section, key in ((root, "image"), (environment, "docker_image"), (environment, "image"))
        if section.text(key) is not None
    ]
    for section, key in given[1:]:
        section.problem(key, "the image is given twice; keep environment.docker_image")
    return given[0][0].text(given[0][1]) if given else None


def _workdir(environment: Section) -> str | None:
    workdir = environment.text("workdir")
    parts = (workdir or "").split("/")
    if workdir is not None and (not workdir.startswith("/") or not workdir.strip("/") or ".." in parts):
        environment.problem("workdir", f"must be an absolute folder below /, not {workdir!r}")
        return None
    return workdir


def _close_environment(environment: Section) -> None:
    system = environment.text("os")
    if system not in (None, "linux"):
        environment.problem("os", f"{system!r} {_LATER}; linux is")
    environment.refuse("gpus", "GPUs are not supported yet")
    environment.refuse("tpu", "TPUs are not supported yet")
    environment.refuse("type", f"an environment type {_LATER}")
    environment.refuse("nodes", f"an environment of several machines {_LATER}")
    environment.refuse("base_image", f"a machine image {_LATER}; use docker_image or a Dockerfile")
    environment.refuse("mcp_servers", f"giving the agent MCP servers {_LATER}")
    environment.refuse("healthcheck", f"waiting for a healthcheck {_LATER}")
    environment.ignore("gpu_types", "no GPU is asked for")
    environment.ignore("vm_backend", "containers and namespaces only")
    environment.ignore("skills_dir", "task skills are not mounted yet")
    environment.close()


def _artifacts(root: Section) -> tuple[str, ...]:
    value = root.value("artifacts")
    items = value if isinstance(value, list) else [value] if value is not None else []
    paths = [item.get("source") if isinstance(item, dict) else item for item in items]
    if not all(isinstance(path, str) and path.strip() for path in paths):
        root.problem("artifacts", "must be a list of paths")
        return ()
    return tuple(str(path) for path in paths)


def _benchflow(section: Section) -> tuple[str | None, str | None, dict[str, str]]:
    """``benchflow.runtime_policy`` and the folders that the string shorthands expand to."""
    policy = section.table("runtime_policy")
    backend, local_base = policy.text("backend"), policy.text("local_base")
    if backend not in (None, "local", "docker"):
        policy.problem("backend", f"{backend!r} {_LATER}; known: local, docker")
    if local_base not in (None, "host"):
        policy.problem("local_base", f"must be host, not {local_base!r}")
    policy.close(strict=True)
    paths: dict[str, str] = {}
    for key in ("verifier", "oracle"):
        table = section.table(key)
        path = table.text("path")
        if path:
            paths[key] = path
        table.close(strict=True)
    section.accept("document_version", "compatibility", "compat", "provenance", "assets", "evidence")
    for key in ("agent_policy", "teams", "nudges", "prompt", "transfer", "private_mounts"):
        section.refuse(key, _LATER)
    section.close(strict=True)
    return backend, local_base, paths


def _close_root(root: Section) -> None:
    root.accept("source")
    root.refuse("steps", f"a task of several scored steps {_LATER}")
    root.refuse("agents", f"declaring roles {_LATER}; the run names the agent")
    root.refuse("scenes", f"declaring scenes {_LATER}")
    root.refuse("user", f"a simulated user {_LATER}")
    for key in ("profile", "profiles", "preset"):
        root.refuse(key, f"a bundle of defaults {_LATER}; write the keys out")
    root.ignore("multi_step_reward_strategy", "the task has one step")
    root.ignore("reward", "the verifier's reward file decides")
    root.close()
