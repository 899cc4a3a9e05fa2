"""Shapes of what this plane writes: rows, group blocks, manifests, stream records.

Schemas in ``docs/schemas/`` come from here, and ``validate`` checks rows against them. The
writers build plain dicts, which is much faster; golden files keep both in step.
"""

from __future__ import annotations

import json
from typing import Any, Literal

from pydantic import ConfigDict, Field, create_model, model_validator

from benchflow.contracts.records import AttributionRecord, PolicyVersion, Record

ROW_VERSION = 1
STREAM_VERSION = 1
MANIFEST_VERSION = 1
"""A reader refuses a newer one."""


class GroupBlock(Record):
    """How a row's advantage was made. ``mean`` and ``std`` are over the scored rollouts."""

    id: str
    normalisation: str
    formula: str
    rollouts: int
    scored: int
    mean: float | None
    std: float | None
    eps: float | None
    by: list[str] = []
    key: dict[str, Any] = {}
    std_ddof: int = 1
    error: str | None = None
    withheld: str | None = None


class Scored(Record):
    """What a reader of any row may ask: the reward, and the place in a group."""

    schema_version: int = ROW_VERSION
    reward: float | None = Field(allow_inf_nan=False)
    advantage: float | None = Field(default=None, allow_inf_nan=False)
    group: GroupBlock | None = None


class Named(Scored):
    """Whose row it is."""

    task: str
    rollout: str
    trial: int = 1
    agent: str | None = None
    model: str | None = None


class Open(Record):
    model_config = ConfigDict(extra="allow")


class Message(Open):
    """One message in OpenAI's chat form. Fields of other roles pass through."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[Any] | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None


class FunctionCall(Open):
    name: str = Field(min_length=1)
    arguments: str | dict[str, Any]


class ToolCall(Open):
    id: str | None = None
    type: str = "function"
    function: FunctionCall


class RowSource(Record):
    rollout_path: str
    call_index: int | None = None


class TokenUsage(Record):
    input_tokens: int | None = None
    output_tokens: int | None = None
    cache_read_tokens: int | None = None
    cache_creation_tokens: int | None = None
    total_tokens: int | None = None


class ChatRow(Named):
    """A row of ``--format chat``."""

    messages: list[Message] = Field(min_length=1)
    tools: list[dict[str, Any]] = []
    token_usage: TokenUsage = TokenUsage()
    source: RowSource

    @model_validator(mode="after")
    def _conversation(self) -> ChatRow:
        check_conversation(self.messages)
        return self


class VerifiersRow(Scored):
    """A row of ``--format verifiers`` and the line of ``trainer/verifiers.jsonl``."""

    example_id: int
    prompt: list[Message]
    completion: list[Message] = Field(min_length=1)
    metrics: dict[str, float] = {}
    is_completed: bool
    is_truncated: bool
    info: dict[str, Any] = {}

    @model_validator(mode="after")
    def _conversation(self) -> VerifiersRow:
        check_conversation([*self.prompt, *self.completion])
        return self


class SegmentRecord(Record):
    """A run of tokens that is one training sequence; see ``training.segments``."""

    kind: Literal["tokens", "text"] = "tokens"
    thread: int = 0
    start_reason: Literal["start", "rerender", "compaction", "after_dropped_call", "branch"] = "start"
    calls: list[int] = []
    prompt_ids: list[int] | None = None
    completion_ids: list[int] | None = None
    action_mask: list[Literal[0, 1]] | None = None
    logprobs: list[float] | None = None
    call_spans: list[tuple[int, int]] = []
    policy_versions: list[str | None] = []
    token_policy_versions: list[str | None] | None = None
    node_ids: list[str] = []
    rollout_id: str = ""
    loss_normaliser: int = 0
    merge: str = "exact"

    @model_validator(mode="after")
    def _aligned(self) -> SegmentRecord:
        if self.kind == "text":
            return self
        if self.prompt_ids is None or self.completion_ids is None or self.action_mask is None:
            raise ValueError("a segment of tokens needs prompt_ids, completion_ids and action_mask")
        length = len(self.completion_ids)
        for name in ("action_mask", "logprobs", "token_policy_versions"):
            values = getattr(self, name)
            if values is not None and len(values) != length:
                raise ValueError(f"{name} has {len(values)} entries for {length} completion_ids")
        return self


class TokenRow(Named, SegmentRecord):
    """A row of ``--format tokens``: one segment and the reward of its rollout."""


class GroupMember(Record):
    rollout: str
    reward: float | None
    advantage: float | None
    excluded: str | None = None
    error: str | None = None


class ManifestGroup(GroupBlock):
    members: list[GroupMember]


SKIPS = (
    *("no_result", "no_trajectory", "reward", "provider_error", "no_assistant", "terminal_error"),
    *("masked", "invalid", "no_tokens", "withheld", "zero_variance"),
)
"""Reasons a rollout yields no row, each a ``skipped_…`` counter of the manifest."""


class _Manifest(Record):
    schema_version: int = MANIFEST_VERSION
    format: str
    rollouts_seen: int
    calls_seen: int
    rows_written: int
    rows_with_tool_calls: int
    zero_variance_groups: int = 0
    groups: list[ManifestGroup] = []
    drift: dict[str, int] | None = None
    versions: dict[str, Any] = {}


_COUNTERS: dict[str, Any] = {f"skipped_{name}": (int, 0) for name in SKIPS}
Manifest = create_model("Manifest", __base__=_Manifest, __doc__="What ``--manifest`` writes.", **_COUNTERS)


class TokenCaptureStatus(Record):
    """``training_grade`` when every call of the agent has its ids and log-probabilities;
    ``unavailable`` counts, by field and reason, the calls that lack it."""

    status: Literal["complete", "partial", "none"]
    training_grade: bool
    calls: int
    complete_calls: int
    unavailable: dict[str, dict[str, int]] = {}
    reason: str | None = None


class StreamRecord(Named):
    """One line of ``bench train stream``."""

    schema_version: int = STREAM_VERSION
    job: str
    rollout_path: str
    group_id: str | None = None
    scored: bool
    outcome: str
    error: str | None = None
    finished_at: str
    policy_version: PolicyVersion
    attribution: AttributionRecord
    token_capture: TokenCaptureStatus
    segments: list[SegmentRecord] | None = None
    group_complete: bool = False
    replaces: str | None = None
    retried: int = 0


def check_conversation(messages: list[Message]) -> None:
    """Raise ``ValueError`` for what no trainer can use: no answer, arguments that are no JSON,
    a tool result that answers no call."""
    if not any(message.role == "assistant" for message in messages):
        raise ValueError("no assistant message")
    called: set[str] = set()
    for index, message in enumerate(messages):
        for call in message.tool_calls or ():
            called.add(call.id or "")
            if isinstance(call.function.arguments, str):
                _check_arguments(call.function, index)
        if message.role == "tool" and message.tool_call_id not in called:
            raise ValueError(f"messages[{index}]: a tool result for {message.tool_call_id!r}, never called")


def _check_arguments(function: FunctionCall, index: int) -> None:
    assert isinstance(function.arguments, str)
    try:
        json.loads(function.arguments or "{}")
    except ValueError:
        raise ValueError(f"messages[{index}]: arguments of {function.name!r} are not JSON") from None
