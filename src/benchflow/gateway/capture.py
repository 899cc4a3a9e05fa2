"""Writing ``trajectory/llm_trajectory.jsonl``: one appended line per call, linear in what is new."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from typing import Any

from benchflow.gateway import wire
from benchflow.kernel.storage import LineWriter, Redactor, read_lines

_SMALL = 256
"""Bytes of a body value below which a reference would not be shorter."""
_ID_BYTES = array("q").itemsize


class PrefixIndex:
    """Finds the longest earlier sequence that a new one starts with. Keeps 16-byte digests,
    not the sequences."""

    def __init__(self) -> None:
        self._marks: dict[int, dict[bytes, int]] = {}

    def longest(self, piece: Callable[[int, int], bytes], length: int) -> tuple[int, int] | None:
        """``(owner, n)`` of the longest remembered sequence of n items that is a prefix of this
        one. ``piece(a, b)`` gives the bytes of items a to b."""
        found: tuple[int, int] | None = None
        digest, at = blake2b(digest_size=16), 0
        for n in sorted(self._marks):
            if n > length:
                break
            digest.update(piece(at, n))
            at = n
            owner = self._marks[n].get(digest.digest())
            if owner is not None:
                found = (owner, n)
        return found

    def remember(self, data: bytes, n: int, owner: int) -> None:
        """``data`` are the bytes of all n items."""
        if n:
            key = blake2b(data, digest_size=16).digest()
            self._marks.setdefault(n, {})[key] = owner


class CallLog:
    """The calls of one rollout. Routes of one rollout share it, so indexes are unique in the file.

    ``append`` raises ``HostPressureError`` on a full disk.
    """

    def __init__(self, path: Path, redact: Redactor) -> None:
        self.path = path
        self._writer = LineWriter(path, redact)
        self._messages = PrefixIndex()
        self._prompts = PrefixIndex()
        self._same: dict[bytes, int] = {}
        self._sizes: dict[int, int] = {}
        self.count = sum(1 for _ in read_lines(path)) if path.exists() else 0
        self.users = 0

    def close(self) -> None:
        self._writer.close()

    def context_of(self, messages: list[Any]) -> int | None:
        """Tokens that the longest earlier call on the same prefix used: a lower bound for this one."""
        found = self._prefix([wire.dumps(message) for message in messages])
        return self._sizes.get(found[0]) if found else None

    def extends(self, messages: list[Any]) -> bool:
        """Does this conversation continue one that was seen?"""
        return self._prefix([wire.dumps(message) for message in messages]) is not None

    def _prefix(self, texts: list[bytes]) -> tuple[int, int] | None:
        return self._messages.longest(lambda a, b: b"\n".join([*texts[a:b], b""]), len(texts))

    def append(self, record: dict[str, Any], *, total_tokens: int | None = None) -> int:
        """Write ``record`` (a whole call without ``index``) and return its index."""
        index, self.count = self.count, self.count + 1
        record["index"] = index
        request = record["request"]
        if isinstance(request["body"], dict):
            request["body"], references = self._shorten_body(request["body"], index)
            if references:
                request["prefix_of"] = references
        capture = record["metadata"].get("token_capture")
        if capture and capture["prompt_token_ids"]:
            record["metadata"]["token_capture"] = self._shorten_prompt(capture, index)
        if total_tokens is not None:
            self._sizes[index] = total_tokens
        self._writer.append(record)
        return index

    def _shorten_body(self, body: dict[str, Any], index: int) -> tuple[dict[str, Any], dict[str, Any]]:
        short, references = dict(body), {}
        for key, value in body.items():
            if key == "messages" and isinstance(value, list):
                texts = [wire.dumps(message) for message in value]
                found = self._prefix(texts)
                if found:
                    references[key] = {"call": found[0], "n": found[1]}
                    short[key] = value[found[1] :]
                self._messages.remember(b"\n".join([*texts, b""]), len(texts), index)
            elif isinstance(value, (list, dict)):
                text = wire.dumps(value)
                if len(text) < _SMALL:
                    continue
                digest = blake2b(key.encode() + b"\0" + text, digest_size=16).digest()
                owner = self._same.setdefault(digest, index)
                if owner != index:
                    references[key] = {"call": owner}
                    del short[key]
        return short, references

    def _shorten_prompt(self, capture: dict[str, Any], index: int) -> dict[str, Any]:
        prompt: list[int] = capture["prompt_token_ids"]
        data = array("q", prompt).tobytes()
        found = self._prompts.longest(lambda a, b: data[a * _ID_BYTES : b * _ID_BYTES], len(prompt))
        self._prompts.remember(data, len(prompt), index)
        completion = capture["completions"][0]["token_ids"] if capture["completions"] else None
        if completion:
            whole = data + array("q", completion).tobytes()
            self._prompts.remember(whole, len(prompt) + len(completion), index)
        if not found:
            return capture
        return {
            **capture,
            "prefix_of": {"call": found[0], "n": found[1]},
            "prompt_token_ids": prompt[found[1] :],
        }
