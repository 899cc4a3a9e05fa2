"""Reading ``trajectory/llm_trajectory.jsonl``: every call whole, in file order.

A line stores only what is new. ``request.prefix_of`` says what the writer left out of the body:

    {"messages": {"call": i, "n": k}}    the first k messages are those of call i
    {"tools": {"call": i}}               this key of the body equals that of call i

and ``metadata.token_capture.prefix_of = {"call": i, "n": k}`` that the prompt starts with the
first k ids of call i's prompt followed by its first completion. ``load_calls`` puts them back.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchflow.contracts.records import CALL_VERSION, check_version
from benchflow.kernel.storage import read_lines


def load_calls(path: Path) -> Iterator[dict[str, Any]]:
    """Yield each call of the file as a dict in the shape of ``contracts.records.Call``.

    A missing file holds no calls; a last line cut by a crash is passed over. Values are shared
    between calls, so treat them as read-only. When the line a prefix points to is lost, the call
    keeps what it has, ``request.prefix_lost`` is true and its prompt ids are unavailable.
    """
    if not path.exists():
        return
    seen: dict[int, dict[str, Any]] = {}
    for line in read_lines(path):
        if not isinstance(line, dict) or "index" not in line:
            continue
        check_version(line, CALL_VERSION, str(path))
        _restore_body(line, seen)
        _restore_prompt(line, seen)
        seen[line["index"]] = line
        yield line


def _restore_body(line: dict[str, Any], seen: dict[int, dict[str, Any]]) -> None:
    request = line["request"]
    body = request["body"]
    for key, reference in request.pop("prefix_of", {}).items():
        source = seen.get(reference["call"])
        whole = source["request"]["body"].get(key) if source else None
        if whole is None or (source and source["request"].get("prefix_lost")):
            request["prefix_lost"] = True
        elif "n" in reference:
            body[key] = whole[: reference["n"]] + body[key]
        else:
            body[key] = whole


def _restore_prompt(line: dict[str, Any], seen: dict[int, dict[str, Any]]) -> None:
    capture = line["metadata"].get("token_capture") or {}
    reference = capture.pop("prefix_of", None)
    if reference is None:
        return
    source = seen.get(reference["call"])
    earlier = source["metadata"]["token_capture"] if source else {}
    prompt = earlier.get("prompt_token_ids")
    if prompt is None:
        capture["prompt_token_ids"] = None
        capture.setdefault("unavailable", {})["prompt_token_ids"] = {
            "reason": "record_lost",
            "detail": f"call {reference['call']}, which holds the start of this prompt, is not in the file",
        }
        return
    n: int = reference["n"]
    head = prompt[:n]
    if n > len(prompt):
        head = prompt + earlier["completions"][0]["token_ids"][: n - len(prompt)]
    capture["prompt_token_ids"] = head + capture["prompt_token_ids"]
