"""What a job is asked to do: one model behind the command line, the YAML file and Python.

Every field carries its own help text and flags (``option``), from which ``cli.options``
makes the command-line options; nothing is spelled out a second time.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import (
    AliasChoices,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from benchflow.contracts.errors import UsageError
from benchflow.kernel.documents import YamlProblem, parse_yaml, reason

FailureKind = Literal["failed", "errored", "verifier_errored", "unscored", "cancelled"]


_USER_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,31}")
MOST_TRIALS = 100_000
"""Every rollout is planned, with its folder, before the first one starts."""


def option(default: Any, help: str, *flags: str, aliases: tuple[str, ...] = (), **meta: Any) -> Any:
    """A field with its help, its flags beyond ``--field-name``, and its names in YAML and
    Python. ``meta``: ``metavar``, ``switch`` (a flag without
    a ``--no-`` form), ``cli=False``, and the bounds ``ge``, ``gt`` and ``le``."""
    factory = {"default_factory": default} if callable(default) else {"default": default}
    bounds = {name: meta.pop(name) for name in ("ge", "gt", "le") if name in meta}
    extra: dict[str, Any] = {"flags": list(flags), **meta}
    return Field(description=help, json_schema_extra=extra, **factory, **bounds, **_alias(aliases))


def _alias(names: tuple[str, ...]) -> dict[str, Any]:
    return {"validation_alias": AliasChoices(*names)} if names else {}


class RetryConfig(BaseModel):
    """Waits between attempts grow by ``wait_multiplier`` from ``min_wait_sec`` up to
    ``max_wait_sec``; each is stretched by up to ``jitter`` of itself, at random."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    max_retries: int = Field(2, ge=0)
    wait_multiplier: float = Field(2.0, ge=1)
    min_wait_sec: float = Field(1.0, ge=0)
    max_wait_sec: float = Field(30.0, ge=0)
    jitter: float = Field(0.25, ge=0)

    def wait(self, attempt: int, chance: float) -> float:
        """Seconds before attempt ``attempt + 1``; ``chance`` is in [0, 1)."""
        grown = self.min_wait_sec * self.wait_multiplier ** min(attempt, 60)
        return min(grown, self.max_wait_sec) * (1 + self.jitter * chance)


class EvaluationConfig(BaseModel):
    """Settings of a job, applied to every task of it."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, populate_by_name=True, protected_namespaces=(), allow_inf_nan=False
    )

    tasks: tuple[str, ...] = option(
        tuple, "Task folders, folders of tasks, or globs.", aliases=("tasks", "tasks_dir"), metavar="TASKS"
    )
    agent: str | None = option(None, "Agent that acts (`bench agent list`).", "-a")
    model: str | None = option(None, "Model as provider/name, e.g. vllm/my-policy.", "-m")
    reasoning_effort: str | None = option(None, "Thinking effort, when the agent has one.")
    prompt: tuple[str, ...] = option(
        tuple,
        "Prompt to send instead of the task's instruction; repeat for several turns.",
        aliases=("prompt", "prompts"),
    )
    policy_url: str | None = option(None, "Base URL of the policy's endpoint.")
    policy_version: str | None = option(None, "Version of the weights it serves now.")
    temperature: float | None = option(None, "Sampling temperature.", ge=0)
    max_output_tokens: int | None = option(None, "Most tokens of one reply.", ge=1)
    sampling: dict[str, Any] = option(
        dict, "Another sampling parameter as KEY=VALUE; repeatable.", metavar="KEY=VALUE"
    )
    max_context: int | None = option(None, "Context window of the policy, in tokens.", ge=1)
    train_mode: bool = option(
        True, "Keep log-probabilities exact: truncating sampling parameters become no-ops."
    )
    usage_tracking: Literal["auto", "required", "off"] = option(
        "auto",
        "required: a rollout without token counts is an error. off: requests stay as they are.",
    )

    sandbox: str = option(
        "docker", "Where rollouts run: docker or local.", aliases=("sandbox", "environment")
    )
    local_base: str | None = option(
        None, "`host` lends this machine's own /usr to the local sandbox as its base."
    )
    base_image_override: tuple[str, ...] = option(
        tuple,
        "Image to build tasks on instead of their own, or NAME=IMAGE for one they name; repeatable.",
        metavar="IMAGE",
    )
    sandbox_user: str | None = option("agent", "User of the agent inside; `root` for root.")
    sandbox_setup_timeout: float = option(120.0, "Seconds to set a sandbox up.", gt=0)
    agent_env: dict[str, str] = option(
        dict,
        "Variable for the agent, KEY=VALUE, or KEY to take the value from this environment; repeatable.",
        metavar="KEY[=VALUE]",
    )

    trials: int = option(1, "Rollouts of each task.", ge=1, le=MOST_TRIALS)
    concurrency: int = option(4, "Rollouts that run at once.", "-j", ge=1)
    build_concurrency: int | None = option(
        None, "Image builds that run at once; --concurrency by default.", ge=1
    )
    jobs_dir: Path = option(Path("jobs"), "Folder to write to.", "-o")
    job_name: str | None = option(None, "Name of the job's folder; the start time by default.")
    new: bool = option(False, "Start a new job even when an unfinished or finished one matches.", switch=True)
    include: tuple[str, ...] = option(tuple, "Run only this task (name or glob); repeatable.")
    exclude: tuple[str, ...] = option(tuple, "Leave this task out (name or glob); repeatable.")
    seed: int = option(0, "Seed of everything scripted.", ge=-(2**63), le=2**63 - 1)

    agent_timeout: float | None = option(
        None, "Seconds the agent may take; the task's own by default, 0 for no limit.", ge=0
    )
    agent_idle_timeout: float | None = option(
        None, "End a turn after this many silent seconds; 0 turns it off.", ge=0
    )
    timeout_clock: Literal["wall", "work"] = option(
        "wall", "work leaves out the time the gateway spent on retries and queues."
    )
    max_cost_usd: float | None = option(None, "Start no more rollouts once this is spent.", ge=0)
    max_tokens: int | None = option(None, "Start no more rollouts once this many tokens are used.", ge=0)
    max_rollouts: int | None = option(None, "Start at most this many rollouts.", ge=1)
    max_seconds: float | None = option(None, "Start no more rollouts after this time.", gt=0)
    max_retries: int | None = option(
        None, "Attempts after the first when infrastructure fails (default 2).", ge=0
    )
    retry: RetryConfig = option(RetryConfig, "Waits between attempts.", cli=False)

    verify: Literal["shared", "isolated"] | None = option(
        None,
        "Where the verifier runs: the agent's sandbox, or a fresh one with its files.",
        aliases=("verify", "verify_mode"),
    )
    hardening: bool = option(True, "Clean up between the agent and the verifier.")
    fail_under: float | None = option(None, "Exit 4 when the mean reward is lower.")
    fail_on: tuple[FailureKind, ...] = option(tuple, "Exit 4 when a rollout ended so; repeatable.")

    dry_run: bool = option(False, "Print the plan and stop.", switch=True)
    quiet: bool = option(False, "Print nothing but errors.", "-q", switch=True)
    json_output: bool = option(
        False,
        "Print the summary as JSON.",
        "--json",
        switch=True,
        aliases=("json_output", "json"),
    )

    @field_validator("tasks", "prompt", "include", "exclude", "fail_on", "base_image_override", mode="before")
    @classmethod
    def _one_or_many(cls, value: Any) -> Any:
        return (str(value),) if isinstance(value, (str, Path)) else value

    @field_validator("tasks", mode="before")
    @classmethod
    def _paths_as_text(cls, value: Any) -> Any:
        return tuple(os.fspath(v) for v in value) if isinstance(value, (list, tuple)) else value

    @field_validator("agent_env", mode="before")
    @classmethod
    def _variables(cls, value: Any) -> Any:
        pairs = (
            parse_pairs(value, "--agent-env", from_env=True) if isinstance(value, (list, Mapping)) else value
        )
        return {key: str(item) for key, item in pairs.items()} if isinstance(pairs, dict) else pairs

    @field_validator("sampling", mode="before")
    @classmethod
    def _parameters(cls, value: Any) -> Any:
        if not isinstance(value, list):
            return value
        return {key: literal(text) for key, text in parse_pairs(value, "--sampling").items()}

    @field_validator("sandbox_user")
    @classmethod
    def _root_is_none(cls, value: str | None) -> str | None:
        if value in (None, "", "root", "null", "none"):
            return None
        if not _USER_NAME.fullmatch(value):
            raise ValueError("a user name is letters, digits, `_`, `-` and `.`, at most 32 of them")
        return value

    @field_validator("base_image_override")
    @classmethod
    def _images(cls, values: tuple[str, ...]) -> tuple[str, ...]:
        for value in values:
            name, equals, image = value.rpartition("=")
            if not image or "=" in name or (equals and not name) or any(char.isspace() for char in value):
                raise ValueError("write IMAGE, or NAME=IMAGE for an image that tasks name")
        return values

    @field_validator("job_name")
    @classmethod
    def _plain_name(cls, value: str | None) -> str | None:
        if value is not None and not _is_folder_name(value):
            raise ValueError("a job name is one folder name of at most 200 bytes that can be printed")
        return value

    @field_validator("tasks", "prompt")
    @classmethod
    def _said(cls, values: tuple[str, ...]) -> tuple[str, ...]:
        if not all(value.strip() for value in values):
            raise ValueError("an empty text names nothing")
        return values

    @field_validator("jobs_dir", mode="before")
    @classmethod
    def _some_folder(cls, value: Any) -> Any:
        if value == "":
            raise ValueError("an empty text names nothing; `.` is the current folder")
        return value

    @model_validator(mode="before")
    @classmethod
    def _two_names(cls, data: Any) -> Any:
        if isinstance(data, Mapping):
            for first, second in (("tasks", "tasks_dir"), ("sandbox", "environment"), ("prompt", "prompts")):
                if first in data and second in data:
                    raise ValueError(f"{first} and {second} are two names of one setting; give one")
        return data

    @model_validator(mode="after")
    def _fold_retries(self) -> EvaluationConfig:
        if self.max_retries is not None:
            object.__setattr__(self, "retry", self.retry.model_copy(update={"max_retries": self.max_retries}))
        return self

    @property
    def all_sampling(self) -> dict[str, Any]:
        """``sampling`` with ``temperature`` and ``max_output_tokens`` folded in."""
        named = {"temperature": self.temperature, "max_tokens": self.max_output_tokens}
        return {**self.sampling, **{key: value for key, value in named.items() if value is not None}}

    def public(self) -> dict[str, Any]:
        """For ``job.json``: JSON values; environment variables by name only."""
        record = self.model_dump(mode="json", exclude={"agent_env", "dry_run", "quiet", "json_output"})
        return {**record, "agent_env": sorted(self.agent_env)}


def _is_folder_name(name: str) -> bool:
    return (
        name not in (".", "..")
        and "/" not in name
        and name.isprintable()
        and bool(name.strip())
        and len(name.encode("utf-8", "surrogateescape")) <= 200
    )


def make_config(values: Mapping[str, Any], names: Mapping[str, str] | None = None) -> EvaluationConfig:
    """Validate. A wrong value is a ``UsageError`` that says where it came from:
    ``names`` maps a field to the words for it (``--flag``, ``file line 3: key``)."""
    try:
        return EvaluationConfig.model_validate(dict(values))
    except ValidationError as error:
        raise _as_usage(error, names or {}) from None


def _as_usage(error: ValidationError, names: Mapping[str, str]) -> UsageError:
    said: list[str] = []
    fix: str | None = None
    for item in error.errors():
        if isinstance(cause := item.get("ctx", {}).get("error"), UsageError):
            said.append(cause.message)
            fix = cause.fix
            continue
        key = str(item["loc"][0]) if item["loc"] else ""
        why = reason(item)
        if item["type"] == "extra_forbidden":
            why, fix = "no such setting", f"known: {', '.join(EvaluationConfig.model_fields)}"
        where = names.get(key, key)
        said.append(f"{where}: {why}" if where else why)
    return UsageError("; ".join(said), fix=fix)


def read_config_file(path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """A YAML file of settings, as values and as words for where each was written."""
    try:
        values, lines = parse_yaml(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"--config {path}: {error.strerror}", fix="check the path") from None
    except UnicodeDecodeError:
        raise UsageError(f"{path}: not UTF-8 text", fix="correct the YAML") from None
    except YamlProblem as error:
        what = f"{error.key}: {error.message}" if error.key else error.message
        raise UsageError(f"{path} line {error.line}: {what}", fix="correct the YAML") from None
    if values is None:
        return {}, {}
    if not isinstance(values, dict):
        raise UsageError(f"{path}: not a mapping of settings", fix="write lines of the form `agent: mini`")
    values = {str(key): value for key, value in values.items()}
    return values, {key: f"{path} line {lines.get((key,), 1)}: {key}" for key in values}


def parse_pairs(pairs: Mapping[str, Any] | list[str], flag: str, *, from_env: bool = False) -> dict[str, Any]:
    """``KEY=VALUE`` items as a dict. With ``from_env`` a bare ``KEY`` takes this process's value."""
    if isinstance(pairs, Mapping):
        return dict(pairs)
    found: dict[str, Any] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not key or (not equals and not from_env):
            raise UsageError(f"{flag} {pair!r} is not KEY=VALUE", fix=f"write {flag} NAME=value")
        if not equals:
            if key not in os.environ:
                raise UsageError(
                    f"{flag} {key}: no such variable here", fix=f"export {key}, or give {key}=VALUE"
                )
            value = os.environ[key]
        found[key] = value
    return found


def literal(text: str) -> Any:
    """A sampling value as YAML would read it: 0.7 is a number, true a boolean."""
    try:
        return parse_yaml(text)[0]
    except YamlProblem:
        return text
