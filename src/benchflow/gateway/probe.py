"""What an endpoint can tell: exact tokens, log-probabilities, or text only."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from benchflow.contracts.errors import PrerequisiteError
from benchflow.gateway import failures, tokens, wire
from benchflow.gateway.client import Client, Unreachable
from benchflow.gateway.providers import SCRIPTED
from benchflow.gateway.upstream import Submission, Upstream, served_models

_QUESTION = [{"role": "user", "content": "Say one word."}]
_SMALLEST_GAP = 1e-3
PATIENCE = 60.0
"""Seconds for one word: a server that is still silent then would let every rollout time out."""


async def probe_endpoint(
    upstream: Upstream, client: Client, patience: float = PATIENCE
) -> Mapping[str, object]:
    """``{"endpoint", "provider", "model", "listed", "level", "logprobs_mode", "policy_version"}``.

    ``level`` is tokens, logprobs or text. ``logprobs_mode`` is ``processed`` when the values follow
    the temperature (what a trainer needs), ``raw`` when they do not, ``unknown`` when the endpoint
    does not show it. ``listed`` tells whether the endpoint names the model among its own; None: it
    lists nothing. Raises ``PrerequisiteError`` when the endpoint refuses, is silent for ``patience``
    seconds, or answers with anything but a completion.
    """
    target = upstream.target
    facts: dict[str, object] = {
        "endpoint": target.base_url or "in-process",
        "provider": target.provider,
        "model": upstream.model,
        "listed": None,
        "level": "text",
        "logprobs_mode": "unknown",
        "policy_version": None,
    }
    if target.provider == SCRIPTED:
        return {**facts, "level": "tokens", "logprobs_mode": "processed"}
    served = await served_models(client, target)
    facts["listed"] = None if served is None else upstream.model in served
    if not target.policy:
        return facts
    reply, headers = await _ask(upstream, 1.0, patience)
    capture = tokens.read(target.provider, reply)
    facts["policy_version"] = headers.get("x-policy-version") or reply.get("policy_version")
    if "logprobs" not in capture["unavailable"]:
        facts["level"] = "tokens" if tokens.exact(capture) else "logprobs"
        warmer, _ = await _ask(upstream, 2.0, patience)
        facts["logprobs_mode"] = _mode(_gap(reply), _gap(warmer))
    return facts


async def _ask(
    upstream: Upstream, temperature: float, patience: float
) -> tuple[dict[str, Any], Mapping[str, str]]:
    body: dict[str, Any] = {
        "model": upstream.model,
        "messages": _QUESTION,
        "max_tokens": 1,
        "temperature": temperature,
        "seed": 0,
    }
    tokens.ask(body, train_mode=True)
    body["top_logprobs"] = 2
    where = upstream.target.base_url
    try:
        async with (
            asyncio.timeout(patience),
            upstream.send(Submission(wire.dumps(body), "probe", 0)) as answer,
        ):
            raw = await answer.read()
    except TimeoutError:
        raise PrerequisiteError(
            f"the model endpoint {where} takes calls but answered none within {patience:g} s",
            fix="wait until the model is loaded, or look at the server's log",
        ) from None
    except Unreachable as error:
        raise PrerequisiteError(
            f"the model endpoint {where} does not answer: {error}",
            fix="start the model server, or check --policy-url",
        ) from error
    if answer.status != 200:
        message = failures.error_of(raw)[1] or f"status {answer.status}"
        raise PrerequisiteError(
            f"the model endpoint {where} refuses {upstream.model!r} with {answer.status}: {message}",
            fix="check the model name and the key",
        )
    try:
        reply = wire.loads(raw)
    except wire.BadJson:
        reply = None
    if not isinstance(reply, dict) or not reply.get("choices"):
        raise PrerequisiteError(f"{where} does not answer like a model server", fix="check --policy-url")
    return reply, answer.headers


def _gap(reply: Mapping[str, Any]) -> float | None:
    """Distance of the two likeliest first tokens, in nats."""
    try:
        top = reply["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
        first, second = sorted((float(entry["logprob"]) for entry in top), reverse=True)[:2]
    except (KeyError, IndexError, TypeError, ValueError):
        return None
    return first - second


def _mode(cold: float | None, warm: float | None) -> str:
    if cold is None or warm is None or cold < _SMALLEST_GAP:
        return "unknown"
    ratio = warm / cold
    if 0.4 <= ratio <= 0.6:
        return "processed"
    return "raw" if 0.9 <= ratio <= 1.1 else "unknown"
