"""Exact tokens: ask the engine for its ids, read them from where engines put them, verify, strip.

The ids are the engine's own; nothing is tokenised here. What is missing or contradicts itself is
listed in ``unavailable`` and never guessed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchflow.contracts.records import TOKEN_CAPTURE_VERSION

PINNED: dict[str, float] = {
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
}
"""Truncating parameters as no-ops. Sent always: an engine may take other defaults from a model's
generation_config."""

SAMPLING = (
    *("temperature", "max_tokens", "max_completion_tokens", "n", "seed", "stop", "logit_bias"),
    *("reasoning_effort", *PINNED),
)
_CHOICE_FIELDS = ("token_ids", "response_token_ids", "prompt_token_ids", "raw_output", "policy_versions")
_BODY_FIELDS = ("prompt_token_ids", "prompt_logprobs", "sglext")
_PREFIX = "token_id:"
Unavailable = dict[str, dict[str, str]]
_INT: set[type] = {int}
_NUMBER: set[type] = {int, float}


def sampling_of(body: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters of a request that change what is sampled."""
    return {key: body[key] for key in SAMPLING if body.get(key) is not None}


def ask(body: dict[str, Any], *, train_mode: bool) -> None:
    """Turn ``body`` into the request for exact tokens, in place. Always non-streaming: engines
    lose ids when they stream through a tool parser."""
    if not body.get("logprobs"):
        body["return_tokens_as_token_ids"] = True
    body["logprobs"] = True
    body["return_token_ids"] = True
    body["stream"] = False
    body.pop("stream_options", None)
    if train_mode:
        body.update(PINNED)


def not_requested(provider: str) -> dict[str, Any]:
    """The capture of a call that is passed through untouched."""
    return _missing(provider, False, "not_requested", "pass-through upstream")


def failed(provider: str, requested: bool, detail: str) -> dict[str, Any]:
    return _missing(provider, requested, "request_failed", detail)


def read(provider: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """The ``token_capture`` of a whole reply (see ``contracts.records.TokenCapture``)."""
    unavailable: Unavailable = {}
    choices = [choice for choice in body.get("choices") or () if isinstance(choice, dict)]
    prompt = _prompt_ids(body, choices)
    if prompt is None:
        unavailable["prompt_token_ids"] = _reason("not_returned", "no prompt ids in the reply")
    if not choices:
        unavailable["completion_token_ids"] = _reason("not_returned", "the reply has no choices")
    completions = [
        _completion(body, choice, position, unavailable) for position, choice in enumerate(choices)
    ]
    return _capture(provider, True, prompt, completions, unavailable)


def strip(body: dict[str, Any], *, keep_logprobs: bool) -> dict[str, Any]:
    """The reply as an agent may see it: no ids; log-probabilities only when it asked for them."""
    plain = {key: value for key, value in body.items() if key not in _BODY_FIELDS}
    choices = []
    for choice in body.get("choices") or ():
        choice = {key: value for key, value in choice.items() if key not in _CHOICE_FIELDS}
        if not keep_logprobs:
            choice.pop("logprobs", None)
        choices.append(choice)
    plain["choices"] = choices
    return plain


def exact(capture: Mapping[str, Any]) -> bool:
    return bool(capture["requested"]) and not capture["unavailable"]


def _missing(provider: str, requested: bool, reason: str, detail: str) -> dict[str, Any]:
    fields = ("prompt_token_ids", "completion_token_ids", "logprobs")
    unavailable = {field: _reason(reason, detail) for field in fields}
    return _capture(provider, requested, None, [], unavailable)


def _capture(
    provider: str, requested: bool, prompt: list[int] | None, completions: list[Any], unavailable: Unavailable
) -> dict[str, Any]:
    return {
        "schema_version": TOKEN_CAPTURE_VERSION,
        "provider": provider,
        "requested": requested,
        "prompt_token_ids": prompt,
        "completions": completions,
        "unavailable": unavailable,
    }


def _reason(reason: str, detail: str) -> dict[str, str]:
    return {"reason": reason, "detail": detail}


def _ids(value: object) -> list[int] | None:
    return value if isinstance(value, list) and _types(value) <= _INT else None


def _types(values: list[Any]) -> set[type]:
    return set(map(type, values))


def _prompt_ids(body: Mapping[str, Any], choices: list[dict[str, Any]]) -> list[int] | None:
    candidates = [body.get("prompt_token_ids"), _sub(body, "sglext", "input_ids")]
    candidates += [choice.get("prompt_token_ids") for choice in choices]
    candidates += [_sub(choice, "raw_output", "prompt_token_ids") for choice in choices]
    return next((ids for ids in map(_ids, candidates) if ids), None)


def _completion(
    body: Mapping[str, Any], choice: dict[str, Any], position: int, unavailable: Unavailable
) -> dict[str, Any]:
    content = [entry for entry in _sub(choice, "logprobs", "content") or () if isinstance(entry, dict)]
    named = _named_ids(content)
    ids = _completion_ids(body, choice, position)
    if ids is None:
        ids = named
    elif named is not None and named != ids:
        detail = f"choice {position}: the ids in the logprobs differ from token_ids"
        unavailable["completion_token_ids"] = _reason("mismatch", detail)
        ids = None
    if ids is None:
        unavailable.setdefault("completion_token_ids", _reason("not_returned", f"choice {position}"))
    logprobs = _logprobs(content, ids, position, unavailable)
    completion: dict[str, Any] = {
        "index": choice.get("index", position),
        "token_ids": ids,
        "logprobs": logprobs,
    }
    if content and named is None:
        completion["tokens"] = [str(entry.get("token", "")) for entry in content]
    if any(entry.get("top_logprobs") for entry in content):
        completion["top_logprobs"] = [entry.get("top_logprobs") for entry in content]
    versions = choice.get("policy_versions")
    if isinstance(versions, list) and ids is not None and len(versions) == len(ids):
        completion["policy_versions"] = [str(version) for version in versions]
    return completion


def _completion_ids(body: Mapping[str, Any], choice: dict[str, Any], position: int) -> list[int] | None:
    outputs = _sub(body, "sglext", "output_ids")
    candidates = (
        choice.get("token_ids"),
        choice.get("response_token_ids"),
        outputs[position] if isinstance(outputs, list) and position < len(outputs) else None,
        _sub(choice, "raw_output", "completion_token_ids"),
    )
    return next((ids for ids in map(_ids, candidates) if ids is not None), None)


def _named_ids(content: list[dict[str, Any]]) -> list[int] | None:
    """Ids told by the logprobs themselves: every entry, or none."""
    if not content:
        return None
    ids = _ids([entry.get("token_id") for entry in content])
    if ids is not None:
        return ids
    names: list[Any] = [entry.get("token") for entry in content]
    if _types(names) != {str} or not all(name.startswith(_PREFIX) for name in names):
        return None
    try:
        return [int(name[len(_PREFIX) :]) for name in names]
    except ValueError:
        return None


def _logprobs(
    content: list[dict[str, Any]], ids: list[int] | None, position: int, unavailable: Unavailable
) -> list[float] | None:
    values: list[Any] = [entry.get("logprob") for entry in content]
    if not values and ids != []:
        unavailable["logprobs"] = _reason("not_returned", f"choice {position}")
        return None
    if not _types(values) <= _NUMBER:
        unavailable["logprobs"] = _reason("mismatch", f"choice {position}: a logprob is not a number")
        return None
    if ids is not None and len(values) != len(ids):
        detail = f"choice {position}: {len(values)} logprobs for {len(ids)} ids"
        unavailable["logprobs"] = _reason("mismatch", detail)
        return None
    return [float(value) for value in values]


def _sub(value: Mapping[str, Any], key: str, inner: str) -> Any:
    part = value.get(key)
    return part.get(inner) if isinstance(part, Mapping) else None
