"""One file per row format. A format turns one rollout into rows.

``rows(source)`` returns the rows of one rollout as plain dicts, or raises
``calls.Skip``. More formats come from entry points in ``benchflow.exporters``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from benchflow.gateway.calls import load_calls
from benchflow.training.calls import Call
from benchflow.training.records import ROW_VERSION
from benchflow.training.rollouts import RolloutRecord
from benchflow.training.segments import Segmented, segment_calls

Row = dict[str, Any]


@dataclass
class Source:
    """One rollout as a format sees it. ``group`` is the group block of its rows, and None
    when no advantages were asked for."""

    rollout: RolloutRecord
    advantage: float | None = None
    group: dict[str, Any] | None = None

    @cached_property
    def calls(self) -> list[Call]:
        return list(load_calls(self.rollout.calls_path))

    @cached_property
    def segmented(self) -> Segmented:
        return segment_calls(self.calls, self.rollout.name)

    @property
    def was_segmented(self) -> bool:
        return "segmented" in self.__dict__

    def standing(self) -> Row:
        """The reward, and in a group the advantage: ``records.Scored``."""
        standing: Row = {"schema_version": ROW_VERSION, "reward": self.rollout.score}
        return standing if self.group is None else self.in_group(standing)

    def in_group(self, row: Row) -> Row:
        return {**row, "advantage": self.advantage, "group": self.group}

    def named(self) -> Row:
        """Whose row it is: ``records.Named``."""
        rollout = self.rollout
        return {
            **self.standing(),
            "task": rollout.task,
            "rollout": rollout.name,
            "trial": rollout.trial,
            "agent": rollout.agent,
            "model": rollout.model,
        }


Rows = Callable[[Source], list[Row]]
