"""The reward-file contract: from the bytes a verifier left to a number, or a named error.

``reward.json`` comes first: a bare number, or an object with a numeric ``reward`` whose
other numeric keys are items. ``reward.txt`` holds one number. Both must agree. Anything
else is a ``RewardFileError``, never a silent 0.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

from benchflow.contracts.errors import RewardFileError

TEXT_LIMIT = 64 * 1024
JSON_LIMIT = 1024 * 1024
_NUMBER = re.compile(rb"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?")
_SHOWN = 160
_KEPT = 2000


@dataclass(frozen=True, slots=True)
class RewardFile:
    """One reward file as it was found. ``kind`` is file, absent, link, folder or special;
    ``data`` holds at most a little more than the limit, so that oversize is seen."""

    name: str
    kind: str = "absent"
    data: bytes = b""

    @property
    def present(self) -> bool:
        return self.kind != "absent"


@dataclass(frozen=True, slots=True)
class Reading:
    reward: float
    items: Mapping[str, float] = field(default_factory=dict[str, float])


def read_reward(text: RewardFile, rich: RewardFile, bounds: tuple[float, float] = (0.0, 1.0)) -> Reading:
    """The reward of ``reward.json`` and ``reward.txt``. Raises ``RewardFileError``."""
    if not text.present and not rich.present:
        raise RewardFileError(
            f"the verifier wrote no reward file: neither {rich.name} nor {text.name}",
            fix="write one number to the reward file before the verifier ends",
        )
    value, items = _parse_json(rich) if rich.present else (None, {})
    scalar = _parse_text(text) if text.present else None
    if value is None and scalar is None:
        _fail(rich, 'has no numeric "reward", and there is no reward.txt')
    for source, number in ((rich, value), (text, scalar)):
        if number is not None and not bounds[0] <= number <= bounds[1]:
            _fail(source, f"holds {number!r}, outside {bounds[0]:g} to {bounds[1]:g}")
    if value is not None and scalar is not None and not math.isclose(value, scalar, rel_tol=1e-9):
        _fail(text, f"says {scalar!r} and {rich.name} says {value!r}; they must agree")
    reward = value if value is not None else scalar
    assert reward is not None
    return Reading(reward, items)


def _parse_text(file: RewardFile) -> float:
    _require_file(file, TEXT_LIMIT)
    data = file.data.strip(b" \t\r\n\f\v")
    if not data:
        _fail(file, "is empty")
    if not _NUMBER.fullmatch(data):
        _fail(file, "holds no single number")
    number = float(data)
    if not math.isfinite(number):
        _fail(file, "holds a number that is too large")
    return number


def _parse_json(file: RewardFile) -> tuple[float | None, dict[str, float]]:
    _require_file(file, JSON_LIMIT)
    if not file.data.strip():
        _fail(file, "is empty")
    try:
        value: Any = json.loads(
            file.data.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_refuse_constant
        )
    except (ValueError, RecursionError) as error:
        _fail(file, f"is not JSON: {error}")
    if _is_number(value):
        return float(value), {}
    if not isinstance(value, dict):
        _fail(file, f"must hold a number or an object, not {type(value).__name__}")
    if "reward" in value and not _is_number(value["reward"]):
        _fail(file, 'has a "reward" that is not a finite number')
    items = {key: float(item) for key, item in value.items() if key != "reward" and _is_number(item)}
    return (float(value["reward"]) if "reward" in value else None), items


def _is_number(value: object) -> bool:
    """A finite JSON number; ``1e400``, which reads as infinity, is none."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e300


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key appears twice")
    return found


def _refuse_constant(word: str) -> NoReturn:
    raise ValueError(f"{word} is not a JSON number")


def _require_file(file: RewardFile, limit: int) -> None:
    if file.kind != "file":
        _fail(file, f"is a {file.kind}, not a regular file")
    if len(file.data) > limit:
        _fail(file, f"is larger than {limit} bytes")


def _fail(file: RewardFile, why: str) -> NoReturn:
    shown = file.data[:_SHOWN].decode("utf-8", "backslashreplace")
    more = "…" if len(file.data) > _SHOWN else ""
    raw = f"; it holds {shown!r}{more}" if file.data else ""
    detail = file.data[:_KEPT].decode("utf-8", "backslashreplace")
    raise RewardFileError(f"{file.name} {why}{raw}", detail=detail or None)
