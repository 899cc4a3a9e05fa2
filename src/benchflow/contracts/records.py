"""Shapes of the files of a rollout. Schemas in ``docs/schemas/`` are generated from here.

Unknown is ``null``, never 0. Readers ignore fields they do not know and refuse a newer
``schema_version``. Times are UTC in ISO 8601 with a zone; durations are seconds from a
monotonic clock.
"""

from __future__ import annotations

from typing import Any, Literal, cast

from pydantic import BaseModel, ConfigDict, Field, field_validator

from benchflow.contracts.errors import UsageError

RESULT_VERSION = 1
CALL_VERSION = 1
TOKEN_CAPTURE_VERSION = 1

Outcome = Literal["passed", "failed", "errored", "unscored", "cancelled"]


class Record(BaseModel):
    model_config = ConfigDict(extra="ignore", protected_namespaces=())


class PolicyVersion(Record):
    first: str | None = None
    last: str | None = None


class AttributionRecord(Record):
    verdict: Literal["score", "mask"]
    reason: str


class AgentResult(Record):
    n_tool_calls: int | None = None
    n_prompts: int = 0
    n_input_tokens: int | None = None
    n_output_tokens: int | None = None
    n_cache_read_tokens: int | None = None
    n_cache_creation_tokens: int | None = None
    total_tokens: int | None = None
    cost_usd: float | None = None
    usage_source: str = "none"
    usage_details: dict[str, Any] | None = None


class FinalMetrics(Record):
    total_prompt_tokens: int | None = None
    total_completion_tokens: int | None = None
    total_cached_tokens: int | None = None
    total_cost_usd: float | None = None
    total_steps: int | None = None


class SandboxFacts(Record):
    provider: str
    base: str | None = None
    image_digest: str | None = None
    limits: dict[str, Any] | None = None
    network: dict[str, Any] | None = None
    users: dict[str, Any] | None = None


class Timing(Record):
    """Seconds by phase; ``total`` is their sum plus ``other``. ``model_wait`` lies inside
    ``agent_execution`` and is not added again."""

    image: float = 0.0
    sandbox_start: float = 0.0
    provision: float = 0.0
    agent_setup: float = 0.0
    agent_execution: float = 0.0
    model_wait: float | None = None
    verifier: float = 0.0
    teardown: float = 0.0
    other: float = 0.0
    total: float = 0.0


class Result(Record):
    """``result.json``, written last and atomically: a folder without it is unfinished."""

    schema_version: int = RESULT_VERSION
    task_name: str
    task_digest: str
    rollout_name: str
    trial: int = 1
    group_id: str | None = None
    job: str = ""
    agent: str
    agent_name: str | None = None
    agent_version: str | None = None
    model: str | None = None
    policy_version: PolicyVersion = PolicyVersion()
    rewards: dict[str, float] | None = None
    outcome: Outcome
    attribution: AttributionRecord
    n_tool_calls: int | None = None
    n_skill_invocations: int | None = None
    n_prompts: int = 0
    agent_result: AgentResult = AgentResult()
    final_metrics: FinalMetrics = FinalMetrics()
    error: str | None = None
    error_category: str | None = None
    verifier_error: str | None = None
    verifier_error_category: str | None = None
    partial_trajectory: bool = False
    trajectory_source: str | None = None
    stop_reason: str | None = None
    verify_mode: str | None = None
    hardening: bool = True
    sandbox: SandboxFacts
    started_at: str
    finished_at: str
    timing: Timing = Timing()
    token_capture: str = "none"
    scenes: list[dict[str, Any]] = []
    loop: dict[str, Any] | None = None
    source: dict[str, Any] | None = None
    dataset_name: str | None = None
    dataset_version: str | None = None
    branches: list[dict[str, Any]] | None = None
    identity: str | None = None
    retries: int = 0
    rollout_path: str | None = Field(default=None, exclude=True)
    """Where the rollout's folder is; set on reading, never written."""

    @field_validator("rewards", mode="before")
    @classmethod
    def _numbers_only(cls, value: Any) -> Any:
        """Other writers put ``{"reward": null}`` for no reward, and notes beside the numbers."""
        if not isinstance(value, dict):
            return value
        items = cast(dict[str, Any], value).items()
        found = {key: n for key, n in items if isinstance(n, (int, float)) and not isinstance(n, bool)}
        return found if "reward" in found else None

    @property
    def reward(self) -> float | None:
        return (self.rewards or {}).get("reward")


RolloutResult = Result
"""Its name in the public API."""


class TokenCompletion(Record):
    index: int
    token_ids: list[int] | None = None
    tokens: list[str] | None = None
    logprobs: list[float] | None = None
    top_logprobs: list[Any] | None = None
    policy_versions: list[str] | None = None


class TokenCapture(Record):
    """``unavailable`` names each missing field: ``{field: {reason, detail}}``."""

    schema_version: int = TOKEN_CAPTURE_VERSION
    provider: str
    requested: bool
    prompt_token_ids: list[int] | None = None
    completions: list[TokenCompletion] = []
    unavailable: dict[str, dict[str, str]] = {}


class CallRequest(Record):
    ts: str
    method: str
    path: str
    headers: dict[str, str]
    body: Any


class CallResponse(Record):
    ts: str
    status_code: int | None
    headers: dict[str, str]
    body: Any


class CallMetadata(Record):
    request_model: str | None = None
    upstream_model: str | None = None
    dialect: str
    upstream_dialect: str
    purpose: str = "agent"
    session_id: str | None = None
    attempt: int = 1
    retry_of: int | None = None
    policy_version: str | None = None
    usage: dict[str, Any] | None = None
    cost_usd: float | None = None
    cost_reason: str | None = None
    finish_reason: str | None = None
    error: str | None = None
    sampling: dict[str, Any] = {}
    token_capture: TokenCapture | None = None


class Call(Record):
    """One line of ``trajectory/llm_trajectory.jsonl``."""

    schema_version: int = CALL_VERSION
    index: int
    rollout: str
    node_id: str
    request: CallRequest
    response: CallResponse | None
    duration_ms: float
    metadata: CallMetadata


class SessionEvent(Record):
    """One line of ``trajectory/acp_trajectory.jsonl``: the agent's own account.

    ``update`` is the raw event. For a tool call the last line with its ``id`` carries
    what is known of input, output and exit code.
    """

    ts: str
    seq: int
    direction: Literal["to_agent", "from_agent", "engine"]
    node_id: str
    kind: str
    update: Any = None
    id: str | None = None
    title: str | None = None
    tool_kind: str | None = None
    input: Any = None
    output: Any = None
    exit_code: int | None = None
    status: str | None = None
    parent_tool_call_id: str | None = None


class RewardLine(Record):
    """One line of ``rewards.jsonl``."""

    ts: str
    type: Literal["process", "terminal"]
    source: str
    value: float | None
    tag: str
    step_index: int | None = None
    space: str = "output"
    granularity: str = "terminal"
    meta: dict[str, Any] = {}


class Interval(Record):
    low: float
    high: float
    level: float
    method: str


class Summary(Record):
    """``summary.json``. The six counts add up to ``total``."""

    schema_version: int = 1
    job_name: str
    agent: str
    model: str | None = None
    sandbox: str
    concurrency: int
    total: int
    passed: int = 0
    failed: int = 0
    errored: int = 0
    verifier_errored: int = 0
    unscored: int = 0
    cancelled: int = 0
    score: float | None = None
    mean_reward: float | None = None
    interval: Interval | None = None
    pass_at_k: dict[str, float | None] = {}
    pass_hat_k: dict[str, float | None] = {}
    error_categories: dict[str, int] = {}
    mask_rate: dict[str, float] = {}
    elapsed_sec: float = 0.0
    total_input_tokens: int | None = None
    total_output_tokens: int | None = None
    total_cost_usd: float | None = None
    usage_coverage: float | None = None
    avg_reward: float | None = None
    avg_tool_calls: float | None = None
    avg_duration_sec: float | None = None
    final: bool = False
    dataset_name: str | None = None
    dataset_version: str | None = None


def check_version(record: dict[str, Any], newest: int, what: str) -> None:
    """Refuse a record written by a newer benchflow."""
    version = record.get("schema_version", 1)
    if not isinstance(version, int) or version > newest:
        raise UsageError(
            f"{what} has schema_version {version!r}; this benchflow reads up to {newest}",
            fix="upgrade benchflow",
        )
