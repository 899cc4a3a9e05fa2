"""From calls to segments: runs of tokens that can be trained as one sequence.

Calls form a graph. A call extends another when its prompt begins with the other's whole
sequence (prompt and sampled tokens), id for id. Following that from root to leaf gives the
segments; where two calls extend the same one, the first goes on in its segment and the
second starts its own, with everything they share in its prompt, so that no sampled token
is trained twice. This is the merge rule ``exact``: ids are the engine's and are never made
again here, hence a conversation whose earlier answers come back tokenised differently
starts a new segment instead of being patched.

Calls without ids are chained by their messages and give segments of kind ``text``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from benchflow.training.calls import Call, is_agents, metadata, request_body, succeeded

MERGE = "exact"
_COMPACTING = frozenset({"compaction", "summary"})


@dataclass(frozen=True, slots=True)
class Sampled:
    """What one call says about its tokens. ``logprobs`` is None when they are missing or
    do not match the ids one to one."""

    index: int
    node_id: str
    policy_version: str | None
    messages: list[Any]
    prompt: list[int] | None
    completion: list[int]
    logprobs: list[float] | None
    token_versions: list[str] | None

    @property
    def complete(self) -> bool:
        return self.prompt is not None and self.logprobs is not None


@dataclass(slots=True)
class Segment:
    """All per-token lists are as long as ``completion_ids``. ``action_mask`` is 1 on sampled
    tokens; ``logprobs`` is 0.0 elsewhere, and None as a whole when one call has none.
    ``call_spans`` are ``[start, end)`` of each call's sampled tokens in ``completion_ids``;
    ``policy_versions`` has one entry per call, ``token_policy_versions`` one per token."""

    kind: str
    thread: int
    start_reason: str
    calls: list[int] = field(default_factory=list[int])
    prompt_ids: list[int] | None = None
    completion_ids: list[int] | None = None
    action_mask: list[int] | None = None
    logprobs: list[float] | None = None
    call_spans: list[list[int]] = field(default_factory=list[list[int]])
    policy_versions: list[str | None] = field(default_factory=list[str | None])
    token_policy_versions: list[str | None] | None = None
    node_ids: list[str] = field(default_factory=list[str])
    rollout_id: str = ""
    loss_normaliser: int = 0
    """Sampled tokens of the whole rollout: a loss summed over its segments and divided by
    this weighs every rollout alike, however many segments it has."""
    merge: str = MERGE

    @property
    def n_sampled(self) -> int:
        return sum(self.action_mask or ())

    def record(self) -> dict[str, Any]:
        return {item.name: getattr(self, item.name) for item in fields(self)}

    def add(self, call: Sampled, environment: Sequence[int]) -> None:
        """Append what the environment said since the last call, then the call's own tokens."""
        self.calls.append(call.index)
        self.policy_versions.append(call.policy_version)
        if call.node_id not in self.node_ids:
            self.node_ids.append(call.node_id)
        if self.completion_ids is None or self.action_mask is None:
            return
        self.completion_ids += environment
        self.action_mask += [0] * len(environment)
        start = len(self.completion_ids)
        self.completion_ids += call.completion
        self.action_mask += [1] * len(call.completion)
        self.call_spans.append([start, len(self.completion_ids)])
        self._add_logprobs(call, len(environment))
        self._add_versions(call, len(environment))

    def _add_logprobs(self, call: Sampled, n_environment: int) -> None:
        if self.logprobs is None or call.logprobs is None:
            self.logprobs = None
        else:
            self.logprobs += [0.0] * n_environment
            self.logprobs += call.logprobs

    def _add_versions(self, call: Sampled, n_environment: int) -> None:
        if self.token_policy_versions is None and call.token_versions is None:
            return
        assert self.completion_ids is not None
        known = self.token_policy_versions or []
        before = len(self.completion_ids) - len(call.completion) - n_environment
        known += [None] * (before - len(known) + n_environment)
        known += call.token_versions or [call.policy_version] * len(call.completion)
        self.token_policy_versions = known


@dataclass(slots=True)
class Segmented:
    """``drift`` counts calls that extended a conversation id for id (``clean``), that did after
    a realignment (``realigned``, never under ``exact``), that went on with a conversation in a
    new segment (``forked``), and sampled tokens of calls that no segment holds
    (``tokens_lost``)."""

    segments: list[Segment]
    drift: Counter[str]
    calls: int
    complete_calls: int
    unavailable: dict[str, dict[str, int]]
    """Missing token fields: by field and reason, in how many calls."""

    def capture_status(self) -> dict[str, Any]:
        """Are the tokens good enough to train on? See ``records.TokenCaptureStatus``."""
        complete = self.calls > 0 and self.complete_calls == self.calls
        status = "complete" if complete else "partial" if self.complete_calls else "none"
        said: dict[str, Any] = {
            "status": status,
            "training_grade": complete,
            "calls": self.calls,
            "complete_calls": self.complete_calls,
            "unavailable": self.unavailable,
        }
        if not self.calls:
            said["reason"] = "no answered model calls"
        elif not complete:
            missing = ", ".join(self.unavailable)
            said["reason"] = f"{self.calls - self.complete_calls} of {self.calls} calls lack {missing}"
        return said


def segment_calls(calls: Iterable[Call], rollout_id: str = "") -> Segmented:
    """Build the segments of one rollout. Only the agent's own answered calls count; a call
    that was sent again is kept once."""
    builder = _Builder()
    unavailable: dict[str, dict[str, int]] = {}
    sampled: list[Sampled | str] = []
    for call in calls:
        if not is_agents(call):
            if metadata(call).get("purpose") in _COMPACTING:
                sampled.append("compaction")
        elif not succeeded(call):
            sampled.append("after_dropped_call")
        else:
            sampled.append(read_sampled(call, unavailable))
    kept = [item for item in sampled if isinstance(item, Sampled)]
    dropped = _sent_again(kept)
    for item in sampled:
        if isinstance(item, str):
            builder.note(item)
        elif item.index not in dropped:
            builder.add(item)
    total = sum(segment.n_sampled for segment in builder.segments)
    for segment in builder.segments:
        segment.rollout_id = rollout_id
        segment.loss_normaliser = total
    builder.drift["tokens_lost"] += sum(len(call.completion) for call in kept if call.index in dropped)
    return Segmented(
        builder.segments,
        builder.drift,
        len(kept),
        sum(call.complete for call in kept),
        unavailable,
    )


def read_sampled(call: Call, unavailable: dict[str, dict[str, int]]) -> Sampled:
    """Read a call's token capture; what is missing is counted in ``unavailable``."""
    details = metadata(call)
    capture = details.get("token_capture") or {}
    completion = next((c for c in capture.get("completions") or () if c.get("index", 0) == 0), {})
    prompt, ids = capture.get("prompt_token_ids"), completion.get("token_ids")
    logprobs = completion.get("logprobs")
    if logprobs is not None and (ids is None or len(logprobs) != len(ids)):
        logprobs = None
    versions = completion.get("policy_versions")
    if versions is not None and (ids is None or len(versions) != len(ids)):
        versions = None
    for name, value in (("prompt_token_ids", prompt), ("completion_token_ids", ids), ("logprobs", logprobs)):
        if value is None:
            why = (capture.get("unavailable") or {}).get(name) or {}
            reasons = unavailable.setdefault(name, {})
            reason = why.get("reason") or ("not_returned" if capture else "not_captured")
            reasons[reason] = reasons.get(reason, 0) + 1
    has_ids = prompt is not None and ids is not None
    return Sampled(
        index=call.get("index", 0),
        node_id=call.get("node_id", ""),
        policy_version=details.get("policy_version"),
        messages=request_body(call).get("messages") or [],
        prompt=prompt if has_ids else None,
        completion=(ids or []) if has_ids else [],
        logprobs=logprobs if has_ids else None,
        token_versions=versions,
    )


def _sent_again(calls: list[Sampled]) -> set[int]:
    """Indices of calls that a later call of the same node repeats, prompt for prompt. Of such
    calls the one that the conversation went on from is kept, else the last."""
    asked: dict[tuple[str, tuple[int, ...]], list[Sampled]] = {}
    for call in calls:
        if call.prompt is not None:
            asked.setdefault((call.node_id, tuple(call.prompt)), []).append(call)
    dropped: set[int] = set()
    for same in asked.values():
        if len(same) > 1:
            keep = next((call for call in reversed(same) if _went_on(call, calls)), same[-1])
            dropped |= {call.index for call in same if call is not keep}
    return dropped


def _went_on(call: Sampled, calls: list[Sampled]) -> bool:
    assert call.prompt is not None
    whole = call.prompt + call.completion
    return any(
        other.prompt is not None and len(other.prompt) > len(whole) and other.prompt[: len(whole)] == whole
        for other in calls
    )


@dataclass(slots=True)
class _End:
    """The state after one call: where in which segment it lies."""

    call: Sampled
    segment: Segment
    whole: list[int]
    extended: bool = False


class _Builder:
    """Adds calls in order; looks for what each one extends among all before it."""

    def __init__(self) -> None:
        self.segments: list[Segment] = []
        self.drift: Counter[str] = Counter(clean=0, realigned=0, forked=0, tokens_lost=0)
        self._ends: list[_End] = []
        self._pending: str | None = None

    def note(self, reason: str) -> None:
        """Something happened that explains why the next call may start a new segment."""
        self._pending = reason

    def add(self, call: Sampled) -> None:
        end = self._longest(call)
        if end is not None and not end.extended:
            end.extended = True
            environment = (call.prompt or [])[len(end.whole) :]
            self.drift["clean"] += 1
            self._place(call, end.segment, environment)
        else:
            self._start(call, end)
        self._pending = None

    def _longest(self, call: Sampled) -> _End | None:
        """The end with the longest sequence that the call's prompt begins with."""

        def size(end: _End) -> int:
            return len(end.whole) if call.prompt is not None else len(end.call.messages)

        newest_first = sorted(reversed(self._ends), key=size, reverse=True)
        return next((end for end in newest_first if _extends(call, end)), None)

    def _start(self, call: Sampled, extended: _End | None) -> None:
        related = extended or next((e for e in reversed(self._ends) if _same_start(e.call, call)), None)
        if extended is not None:
            reason = "branch"
        elif self._pending is not None and self._ends:
            reason = self._pending
        else:
            reason = "start" if related is None else "rerender"
        if related is not None or reason == "compaction":
            self.drift["forked"] += 1
        thread = related.segment.thread if related else self._thread_after(reason)
        has_ids = call.prompt is not None
        segment = Segment(
            kind="tokens" if has_ids else "text",
            thread=thread,
            start_reason=reason,
            prompt_ids=list(call.prompt or ()) if has_ids else None,
            completion_ids=[] if has_ids else None,
            action_mask=[] if has_ids else None,
            logprobs=[] if has_ids else None,
        )
        self.segments.append(segment)
        self._place(call, segment, ())

    def _thread_after(self, reason: str) -> int:
        """A compacted conversation goes on in its thread; anything else opens one."""
        if reason == "compaction" and self.segments:
            return self.segments[-1].thread
        return 1 + max((segment.thread for segment in self.segments), default=-1)

    def _place(self, call: Sampled, segment: Segment, environment: Sequence[int]) -> None:
        segment.add(call, environment)
        self._ends.append(_End(call, segment, [*(call.prompt or ()), *call.completion]))


def _extends(call: Sampled, end: _End) -> bool:
    if call.prompt is not None and end.call.prompt is not None:
        size, whole = len(end.whole), end.whole
        if len(call.prompt) < size or (size and call.prompt[size - 1] != whole[-1]):
            return False  # most mismatches, without copying a long prompt
        return call.prompt[:size] == whole
    if call.prompt is None and end.call.prompt is None:
        before = end.call.messages
        return len(call.messages) > len(before) and call.messages[: len(before)] == before
    return False


def _same_start(earlier: Sampled, later: Sampled) -> bool:
    """Both conversations open with the same messages up to the first answer."""
    opening = _opening(earlier.messages)
    return bool(opening) and opening == _opening(later.messages)


def _opening(messages: list[Any]) -> list[Any]:
    opening: list[Any] = []
    for message in messages:
        if isinstance(message, dict) and message.get("role") == "assistant":
            break
        opening.append(message)
    return opening
