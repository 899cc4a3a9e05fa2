"""``bench doctor``: what this machine can run, and what to do about the rest.

Every check is one that a run makes too (``jobs.preflight`` and the planes' own); doctor asks
them all, each in bounded time, and goes on where a run would stop.
"""

from __future__ import annotations

import asyncio
import os
import platform
import pwd
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from benchflow.agents import catalog
from benchflow.contracts.errors import BenchflowError, PrerequisiteError, UsageError
from benchflow.contracts.gateway import Gateway, ModelSpec
from benchflow.contracts.records import Record
from benchflow.contracts.sandbox import SandboxCapabilities, SandboxProvider
from benchflow.gateway import providers
from benchflow.jobs import preflight
from benchflow.kernel import registry
from benchflow.kernel.env import looks_secret
from benchflow.kernel.ownership import state_dir
from benchflow.kernel.planes import private_runtime_dir
from benchflow.kernel.storage import Redactor

SANDBOX_PATIENCE, ENDPOINT_PATIENCE = 5.0, 20.0
"""Seconds for a daemon, and for an endpoint, to say anything."""

_FAULTS = (BenchflowError, OSError, ImportError)
"""What a check that fails may raise; ``ImportError`` comes from a plug-in."""

_DELEGATE = "run as root, or where control groups are delegated (systemd-run --user --scope -p Delegate=yes)"
_LACKING = {
    "multiple_users": "add ranges for this user to /etc/subuid and /etc/subgid and install newuidmap",
    "memory_limit": _DELEGATE,
    "cpu_limit": _DELEGATE,
    "pids_limit": _DELEGATE,
}
"""What a run can go without, as its result then says, and how to get it."""

_RETURNS = {
    "tokens": "returns exact token ids and log-probabilities",
    "logprobs": "returns log-probabilities, but no token ids",
    "text": "returns text only",
}

Topic = Literal["runtime", "sandbox", "agent", "credentials", "disk", "leftovers", "endpoint"]


class Check(Record):
    """One line. ``fix`` is set when ``status`` is not ok; ``facts`` are for programs."""

    topic: Topic
    name: str
    status: Literal["ok", "warn", "fail"]
    message: str
    fix: str | None = None
    facts: dict[str, Any] = {}


class DoctorReport(Record):
    """All checks. The exit code is 3 when something that was asked for, the disk, or every
    sandbox fails; one sandbox that nobody asked for may."""

    schema_version: Literal[1] = 1
    exit_code: Literal[0, 3]
    checks: list[Check]

    def lines(self) -> Iterator[str]:
        names = [f"{check.topic} {check.name}" for check in self.checks]
        width = max(map(len, names))
        for name, check in zip(names, self.checks, strict=True):
            yield f"{check.status:4}  {name.ljust(width)}  {check.message}"
            if check.fix:
                yield f"      fix: {check.fix}"


@dataclass(frozen=True, slots=True)
class Question:
    """What must work. When no sandbox is named, any one must."""

    sandbox: str | None = None
    agent: str | None = None
    model: str | None = None
    policy_url: str | None = None
    jobs_dir: Path = Path("jobs")


async def examine(question: Question) -> DoctorReport:
    """Make every check. Raises ``UsageError`` for a sandbox, an agent or a provider that does
    not exist."""
    names = [question.sandbox] if question.sandbox else registry.names("sandboxes")
    asked = bool(question.agent)
    agents = [
        _agent(name, asked) for name in ([question.agent] if question.agent else catalog.declarations())
    ]
    parts = (_sandbox(name, question.agent) for name in names)
    *sandboxes, endpoint = await asyncio.gather(*parts, _endpoint(question))
    checks = [_runtime(), *(check for part in sandboxes for check in part)]
    checks += [check for check in agents if asked or check.facts.get("needed", True)]
    checks += [_credentials(), *_disks(question.jobs_dir), *endpoint]
    usable = any(part[0].status != "fail" for part in sandboxes)
    failed = any(check.status == "fail" for check in checks if check.topic != "sandbox")
    report = DoctorReport(exit_code=3 if failed or not usable else 0, checks=checks)
    return _without_secrets(report, question.policy_url)


def _failed(topic: Topic, name: str, error: BaseException, status: Literal["warn", "fail"] = "fail") -> Check:
    message = error.message if isinstance(error, BenchflowError) else str(error) or type(error).__name__
    fix = error.fix if isinstance(error, BenchflowError) else None
    return Check(topic=topic, name=name, status=status, message=message, fix=fix or "repair it and ask again")


def _runtime() -> Check:
    uid = os.geteuid()
    try:
        user = pwd.getpwuid(uid).pw_name
    except KeyError:
        user = "no name"
    facts = {
        "python": platform.python_version(),
        "benchflow": version("benchflow"),
        "kernel": f"{platform.system()} {platform.release()}",
        "machine": platform.machine(),
        "uid": uid,
        "user": user,
    }
    message = "Python {python}, benchflow {benchflow}, {kernel} {machine}, user {user} ({uid})"
    return Check(topic="runtime", name="", status="ok", message=message.format(**facts), facts=facts)


# -- sandboxes ---------------------------------------------------------------------------


async def _sandbox(name: str, agent: str | None) -> list[Check]:
    """Whether it can start, what it can do, the disk it fills, and what dead runs left in it."""
    try:
        provider: SandboxProvider = registry.resolve("sandboxes", name)()
    except UsageError:  # no such sandbox: the asker's mistake
        raise
    except _FAULTS as error:
        return [_failed("sandbox", name, error)]
    try:
        return await _look_into(provider, name, agent)
    except _FAULTS as error:
        return [_failed("sandbox", name, error)]
    finally:
        await provider.close()


async def _look_into(provider: SandboxProvider, name: str, agent: str | None) -> list[Check]:
    await preflight.sandbox_ready(provider, SANDBOX_PATIENCE)
    async with asyncio.timeout(SANDBOX_PATIENCE):
        if agent:
            await preflight.agent_fits(agent, provider)
        facts = await provider.facts()
        left = len(await provider.reap(dry_run=True))
    checks = _abilities(name, facts, provider.capabilities())
    data_root = facts.get("data_root")
    if data_root and Path(data_root) != state_dir():
        checks.append(_disk(name, Path(data_root)))
    message, fix = f"{left or 'nothing'} left by dead runs", "bench sandbox cleanup" if left else None
    status = "warn" if left else "ok"
    leftovers = Check(
        topic="leftovers", name=name, status=status, message=message, fix=fix, facts={"count": left}
    )
    return [*checks, leftovers]


def _abilities(name: str, facts: Mapping[str, str], can: SandboxCapabilities) -> list[Check]:
    flags = {key: value for key, value in asdict(can).items() if key != "why"}
    told = ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in facts.items())
    able = ", ".join(key.replace("_", " ") for key, value in flags.items() if value)
    known = {"facts": dict(facts), "capabilities": flags, "why": dict(can.why)}
    checks = [
        Check(topic="sandbox", name=name, status="ok", message=told, facts=known),
        Check(topic="sandbox", name=f"{name} can", status="ok", message=able),
    ]
    for flag in (key for key, value in flags.items() if not value):
        name_of, fix = f"{name} no {flag.replace('_', ' ')}", _LACKING.get(flag)
        why, status = can.why.get(flag, "not supported"), "warn" if fix else "ok"
        checks.append(Check(topic="sandbox", name=name_of, status=status, message=why, fix=fix))
    return checks


def _agent(name: str, asked: bool) -> Check:
    """Whether what the agent needs of this host is installed, and whole. One that nobody asked for
    is only a warning when it is not."""
    try:
        status = catalog.bundle_status(name)
        preflight.agent_whole(status)
    except UsageError:  # no such agent: the asker's mistake
        raise
    except _FAULTS as error:
        return _failed("agent", name, error, "fail" if asked else "warn")
    known = {**asdict(status), "folder": str(status.folder) if status.folder else None}
    level, fix, message = "ok", None, f"{status.version or 'no version'}, nothing to install"
    if status.installed:
        proof = status.proof.get("what") if status.proof else "not proved"
        message = f"{status.version} installed, {(status.size_bytes or 0) / 2**20:.0f} MB, {proof}"
    elif status.needed:
        message = f"{status.version} is not installed; its first run installs it"
        if asked:
            level, fix = "warn", f"bench agent install {name}"
    return Check(topic="agent", name=name, status=level, message=message, fix=fix, facts=known)


# -- this machine ------------------------------------------------------------------------


def _credentials() -> Check:
    """Which keys are set, by name. A key that cannot work as it is set is a warning."""
    known = {
        variable: provider
        for name, provider in providers.PROVIDERS.items()
        for variable in provider.key_vars or (f"{name.upper()}_API_KEY",)
    }
    present = sorted(
        {name for name in os.environ if name.endswith("_API_KEY")} | known.keys() & os.environ.keys()
    )
    problems: list[tuple[str, str]] = []
    for name in present:
        value, base = os.environ[name], f"{name.removesuffix('_API_KEY')}_BASE_URL"
        provider = known.get(name)
        if not value or value != value.strip():
            problems.append((f"{name} is {'padded with blanks' if value else 'empty'}", f"export {name}=…"))
        elif provider and not (provider.base_url or provider.base_vars or os.environ.get(base)):
            problems.append((f"{name} is set, but {base} is not", f"export {base}=…"))
    message = f"{', '.join(present)} set" if present else "no provider key is set"
    facts = {"set": present, "known": sorted(known)}
    if not problems:
        return Check(topic="credentials", name="", status="ok", message=message, facts=facts)
    message = "; ".join(problem for problem, _ in problems)
    fix = "; ".join(fix for _, fix in problems)
    return Check(topic="credentials", name="", status="warn", message=message, fix=fix, facts=facts)


def _disks(jobs_dir: Path) -> list[Check]:
    checks = []
    for name, place in (("state", state_dir), ("jobs", lambda: jobs_dir), ("tmp", tempfile.gettempdir)):
        try:
            checks.append(_disk(name, Path(place())))
        except _FAULTS as error:  # no home directory, no usable folder for temporary files
            checks.append(_failed("disk", name, error))
    return checks


def _disk(name: str, folder: Path) -> Check:
    try:
        if name in ("state", "jobs", "tmp"):
            preflight.check_writable(folder, name)
        scarce = preflight.room(folder)
        free, inodes = preflight.free_space(preflight.existing(folder))
    except _FAULTS as error:
        return _failed("disk", name, error)
    facts = {"folder": str(folder), "free_bytes": free, "free_inodes": inodes}
    if scarce:
        return Check(topic="disk", name=name, status="warn", message=scarce, fix="free space", facts=facts)
    room = "not counted" if free is None else f"{free / 2**30:.1f} GB"
    message = f"{room} free for {folder}" + ("" if inodes is None else f", {inodes} inodes")
    return Check(topic="disk", name=name, status="ok", message=message, facts=facts)


# -- the policy's endpoint ---------------------------------------------------------------


async def _endpoint(question: Question) -> list[Check]:
    """What the endpoint returns, when one is named here or in the environment. One that nobody
    asked for is only a warning when it does not answer."""
    url = question.policy_url or os.environ.get("BENCHFLOW_PROVIDER_BASE_URL")
    if not question.model and not url:
        return []
    asked = bool(question.model or question.policy_url)
    name = question.model or "policy"
    try:
        async with asyncio.timeout(ENDPOINT_PATIENCE):
            model = question.model or await _only_model(question.policy_url)
            return [_returns(await _probe(ModelSpec(model=model, policy_url=question.policy_url)), model)]
    except TimeoutError:
        error: Exception = PrerequisiteError(
            f"the endpoint{f' at {url}' if url else ''} gave no answer within {ENDPOINT_PATIENCE:g} s",
            fix="look at the server's log",
        )
    except UsageError as mistake:
        if asked:
            raise
        error = mistake
    except _FAULTS as fault:
        error = fault
    return [_failed("endpoint", name, error, "fail" if asked else "warn")]


async def _only_model(url: str | None) -> str:
    """The model of a policy server that was named without one, when it serves exactly one."""
    from benchflow.gateway.client import Client
    from benchflow.gateway.upstream import served_models

    target = providers.resolve(ModelSpec(model="vllm/any", policy_url=url))
    async with Client(ENDPOINT_PATIENCE) as client:
        served = await served_models(client, target)
    if served and len(served) == 1:
        return f"vllm/{served[0]}"
    raise PrerequisiteError(
        f"{target.base_url} answers and serves {', '.join(served) if served else 'what it does not tell'}",
        fix="add -m vllm/NAME to see what it returns",
    )


async def _probe(spec: ModelSpec) -> Mapping[str, object]:
    folder = private_runtime_dir()
    gateway: Gateway = registry.resolve("gateways", "default")(folder / "gateway.sock", redact=Redactor())
    try:
        await gateway.start()
        return await gateway.probe(spec)
    finally:
        await gateway.stop()
        shutil.rmtree(folder, ignore_errors=True)


def _returns(facts: Mapping[str, object], model: str) -> Check:
    level, mode = str(facts["level"]), facts["logprobs_mode"]
    message = f"{facts['endpoint']} {_RETURNS[level]}"
    fix = None
    if facts.get("listed") is False:
        message, fix = f"{message}; it does not list {facts['model']!r}", "check the model's name"
    elif level != "text":
        message += f" ({mode})"
        if mode == "raw":
            fix = "for training serve vLLM with --logprobs-mode processed_logprobs"
        elif level == "logprobs":
            fix = "for exact tokens serve the policy with a vLLM that knows return_token_ids"
    elif model.startswith("vllm/"):
        fix = "for exact tokens serve the policy with vLLM and log-probabilities"
    status = "warn" if fix else "ok"
    return Check(topic="endpoint", name=model, status=status, message=message, fix=fix, facts=dict(facts))


# -- secrets -----------------------------------------------------------------------------


def _without_secrets(report: DoctorReport, policy_url: str | None) -> DoctorReport:
    """Messages quote what servers and addresses say; no value of a credential may be in them."""
    values = [value for name, value in os.environ.items() if looks_secret(name, "")]
    for url in (policy_url, *(value for name, value in os.environ.items() if re.search(r"URL$|HOST$", name))):
        with suppress(ValueError):
            values.append(urlsplit(url or "").password or "")
    redact = Redactor(values)
    return DoctorReport.model_validate_json(redact(report.model_dump_json().encode()))
