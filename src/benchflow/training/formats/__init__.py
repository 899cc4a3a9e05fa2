"""One file per row format. A format turns one rollout into rows.

``rows(source)`` returns the rows of one rollout as plain dicts, or raises
``calls.Skip``. More formats come from entry points in ``benchflow.exporters``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from benchflow.training.calls import Call
from benchflow.training.rollouts import RolloutRecord
from benchflow.training.segments import Segmented, segment_calls

Row = dict[str, Any]


@dataclass
class Source:
    """One rollout as a format sees it. ``group`` is the group block of its rows, and None
    when no advantages were asked for."""

    rollout: RolloutRecord
    calls: list[Call]
    advantage: float | None = None
    group: dict[str, Any] | None = None

    @cached_property
    def segmented(self) -> Segmented:
        return segment_calls(self.calls, self.rollout.name)

    @property
    def was_segmented(self) -> bool:
        return "segmented" in self.__dict__

    def standing_fields(self) -> Row:
        return {} if self.group is None else {"advantage": self.advantage, "group": self.group}


Rows = Callable[[Source], list[Row]]
