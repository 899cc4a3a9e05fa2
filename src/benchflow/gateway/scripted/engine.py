"""What the scripted model answers to one request."""

from __future__ import annotations

import math
import time
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from benchflow.gateway import failures, wire
from benchflow.gateway.purpose import text_of
from benchflow.gateway.scripted import tokens
from benchflow.gateway.scripted.policy import Choice, Policy, Turn
from benchflow.gateway.scripted.tools import NoTool, calls


@dataclass(frozen=True, slots=True)
class Reply:
    """``body`` is JSON to be; ``disconnect`` means no answer at all. ``delay`` is in seconds."""

    status: int
    body: dict[str, Any]
    delay: float = 0.0
    retry_after: float | None = None
    disconnect: bool = False


@dataclass(frozen=True, slots=True)
class Draw:
    """The alternative that was taken, the probability it had, and those of its rivals."""

    turn: int | None
    index: int
    choice: Choice
    rivals: tuple[tuple[Choice, float], ...]

    @property
    def probability(self) -> float:
        return next(p for choice, p in self.rivals if choice is self.choice)


def rollout_seed(seed: int, task: str, trial: int) -> int:
    """One number for (job seed, task, trial), small enough for any engine's ``seed``."""
    digest = blake2b(f"{seed}\0{task}\0{trial}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") >> 1


def answer(policy: Policy, body: Mapping[str, Any], *, seed: int, attempt: int = 1) -> Reply:
    """``body`` is a chat-completions request in vLLM's form; ``attempt`` counts retries from 1."""
    messages = body["messages"]
    if body.get("n") not in (None, 1):
        return _refuse("the scripted model gives one choice; n must be 1")
    said = [m for m in messages if isinstance(m, Mapping) and m.get("role") == "assistant"]
    position, turn = _turn(policy, messages, len(said))
    if not body.get("tools") and any(choice.tools for choice in turn.choices):
        position, turn = None, policy.otherwise
    key = _key(seed, said)
    failing = _failing(turn, key, attempt)
    if failing is not None and failing.fail is not None:
        fail = failing.fail
        error = wire.error_body(fail.message, "scripted_failure")
        return Reply(fail.status, error, failing.delay_ms / 1000, fail.retry_after, fail.disconnect)
    draw = _draw(position, turn, key, body.get("temperature"))
    prompt = tokens.prompt_ids(messages, body.get("tools"))
    if policy.context is not None and len(prompt) >= policy.context:
        return _overflow(policy.context, len(prompt))
    try:
        return Reply(200, _completion(policy, body, draw, prompt, key), draw.choice.delay_ms / 1000)
    except NoTool as error:
        return _refuse(str(error))


def _turn(policy: Policy, messages: Sequence[Any], said: int) -> tuple[int | None, Turn]:
    last = messages[-1] if messages and isinstance(messages[-1], Mapping) else {}
    heard = text_of(last.get("content")) if last.get("role") in ("user", "tool") else ""
    for position, turn in enumerate(policy.turns):
        if turn.when is not None and turn.when.search(heard):
            return position, turn
    numbered = [(position, turn) for position, turn in enumerate(policy.turns) if turn.when is None]
    return numbered[said] if said < len(numbered) else (None, policy.otherwise)


def _key(seed: int, said: Sequence[Mapping[str, Any]]) -> bytes:
    """Depends on the seed and on the assistant's own words only."""
    digest = blake2b(f"{seed}\0{len(said)}".encode(), digest_size=16)
    for message in said:
        digest.update(array("H", tokens.reply_ids(message)).tobytes() + b"\0")
    return digest.digest()


def _uniform(key: bytes, what: str) -> float:
    digest = blake2b(key + what.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64


def _take(weights: Sequence[float], at: float) -> int:
    """Index of the weight in which the point ``at`` (0 to 1) of their sum falls."""
    left = at * sum(weights)
    for index, weight in enumerate(weights):
        left -= weight
        if left < 0:
            return index
    return max(index for index, weight in enumerate(weights) if weight > 0)


def _failing(turn: Turn, key: bytes, attempt: int) -> Choice | None:
    taken = turn.choices[_take([choice.weight for choice in turn.choices], _uniform(key, "fail"))]
    if taken.fail is None:
        return None
    only_failures = all(choice.fail is not None or choice.weight == 0 for choice in turn.choices)
    return taken if attempt <= taken.fail.times or only_failures else None


def _draw(position: int | None, turn: Turn, key: bytes, temperature: object) -> Draw:
    sharp = 1 / temperature if isinstance(temperature, (int, float)) and temperature > 0 else 1.0
    sound = [(index, choice) for index, choice in enumerate(turn.choices) if choice.fail is None]
    heaviest = max(choice.weight for _, choice in sound) or 1.0
    weights = [(choice.weight / heaviest) ** sharp for _, choice in sound]
    index, choice = sound[_take(weights, _uniform(key, "choice"))]
    total = sum(weights)
    rivals = tuple((rival, w / total) for (_, rival), w in zip(sound, weights, strict=True))
    return Draw(position, index, choice, rivals)


def _completion(
    policy: Policy, body: Mapping[str, Any], draw: Draw, prompt: list[int], key: bytes
) -> dict[str, Any]:
    choice, identity = draw.choice, key.hex()[:16]
    message: dict[str, Any] = {"role": "assistant", "content": choice.say}
    if choice.think is not None:
        message["reasoning_content"] = choice.think
    if choice.tools:
        message["tool_calls"] = calls(
            choice.tools, body.get("tools"), choice.say or "scripted step", identity
        )
    elif choice.say is None:
        message["content"] = ""
    finish = choice.finish or ("tool_calls" if choice.tools else "stop")
    ids = tokens.reply_ids(message)
    limit = body.get("max_completion_tokens") or body.get("max_tokens")
    if isinstance(limit, int) and len(ids) + 1 > limit:
        message, ids, finish = _cut(message, limit)
    if finish != "length":
        ids.append(tokens.END)
    part: dict[str, Any] = {"index": 0, "message": message, "logprobs": None, "finish_reason": finish}
    reply: dict[str, Any] = {
        "id": f"chatcmpl-{identity}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": body.get("model") or policy.name,
        "choices": [part],
        "usage": _usage(choice, len(prompt), len(ids)),
        "scripted": {
            "turn": draw.turn,
            "choice": draw.index,
            "label": choice.label,
            "probability": draw.probability,
        },
    }
    if body.get("logprobs"):
        part["logprobs"] = {"content": _logprobs(ids, draw, body)}
    if body.get("return_token_ids"):
        reply["prompt_token_ids"], part["token_ids"] = prompt, ids
    if policy.version is not None:
        reply["policy_version"] = policy.version
    return reply


def _cut(message: dict[str, Any], limit: int) -> tuple[dict[str, Any], list[int], str]:
    """The reply stopped after ``limit`` tokens, at a character's end; an unfinished tool call is lost."""
    short = {"role": "assistant", "content": ""}
    thought = tokens.reply_ids({"reasoning_content": message.get("reasoning_content")})
    room = limit - len(thought)
    if thought and room >= 0:
        short["reasoning_content"] = message["reasoning_content"]
    text = text_of(message.get("content")).encode("utf-8", "surrogatepass")
    short["content"] = text[: max(0, room)].decode("utf-8", "ignore")
    return short, tokens.reply_ids(short), "length"


def _usage(choice: Choice, prompt: int, completion: int) -> dict[str, int]:
    usage = {"prompt_tokens": prompt, "completion_tokens": completion, **choice.usage}
    usage["total_tokens"] = usage["prompt_tokens"] + usage["completion_tokens"]
    return usage


def _logprobs(ids: list[int], draw: Draw, body: Mapping[str, Any]) -> list[dict[str, Any]]:
    names = tokens.NUMBERED if body.get("return_tokens_as_token_ids") else tokens.TEXTS
    content = [{"token": names[i], "logprob": 0.0, "bytes": None, "top_logprobs": []} for i in ids]
    if content:
        content[0]["logprob"] = math.log(draw.probability)
        # Alternatives may begin with the same token; each is listed with its own probability.
        ranked = sorted((p for _, p in draw.rivals if p > 0), reverse=True)
        content[0]["top_logprobs"] = [
            {"token": names[ids[0]], "logprob": math.log(p), "bytes": None}
            for p in ranked[: body.get("top_logprobs") or 0]
        ]
    return content


def _refuse(message: str) -> Reply:
    return Reply(400, wire.error_body(message, "BadRequestError", "scripted_model"))


def _overflow(limit: int, prompt: int) -> Reply:
    message = (
        f"This model's maximum context length is {limit} tokens. "
        f"However, your request has {prompt} input tokens."
    )
    return Reply(400, wire.error_body(message, "BadRequestError", failures.CONTEXT_CODE))
