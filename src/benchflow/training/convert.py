"""Finished rollouts to rows of a trainer's file.

Plain rows (no advantages) leave out rollouts that ended with an error. With advantages a
scored rollout that ended with an error stays in its group, its rows say so in
``group.error``, and a group with a spoiled member is withheld whole. Every filter comes
after the baselines. Memory does not grow with the calls: one rollout is read at a time,
and of all of them only a small member record is kept.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, BinaryIO

from benchflow.contracts.errors import UsageError
from benchflow.kernel import registry
from benchflow.kernel.storage import dumps, replacing, write_json
from benchflow.training.calls import Skip, has_tool_calls
from benchflow.training.discover import Found, check_path, find_rollouts
from benchflow.training.formats import Row, Rows, Source
from benchflow.training.groups import Group, Member, check_formula, make_groups, parse_by
from benchflow.training.records import MANIFEST_VERSION, ROW_VERSION, SKIPS
from benchflow.training.rollouts import RolloutRecord, read_rollout


@dataclass(frozen=True, slots=True)
class Options:
    """``advantage`` is ``grpo``, ``loo`` or None for plain rows; ``by`` the group keys."""

    format: str = "chat"
    advantage: str | None = None
    by: tuple[str, ...] = ()
    min_reward: float | None = None
    drop_zero_variance: bool = False


@dataclass(slots=True)
class Report:
    """What a conversion did. ``lines`` is what the command prints."""

    out: str
    options: Options
    rollouts_seen: int = 0
    calls_seen: int = 0
    rows_written: int = 0
    rows_with_tool_calls: int = 0
    skipped: Counter[str] = field(default_factory=Counter[str])
    groups: list[Group] = field(default_factory=list[Group])
    drift: Counter[str] = field(default_factory=Counter[str])

    def lines(self) -> list[str]:
        lines = [f"Converted {self.rows_written} row(s) from {self.rollouts_seen} rollout(s) -> {self.out}"]
        if self.options.advantage:
            unscored = sum(len(group.members) - len(group.scores) for group in self.groups)
            lines.append(
                f"Groups ({self.options.advantage}, by {','.join(self.options.by)}): {len(self.groups)}; "
                f"{unscored} unscored rollout(s) left out of every baseline."
            )
        return lines

    def notes(self) -> list[str]:
        """What a reader should know beyond the two lines: what was left out, and why."""
        notes = [f"withheld {group.id}: {group.withheld}" for group in self.groups if group.withheld]
        if len(notes) > 20:
            notes = [*notes[:20], f"… and {len(notes) - 20} more groups withheld; --manifest lists them"]
        flat = [group for group in self.groups if group.zero_variance and not group.withheld]
        if self.options.drop_zero_variance and flat:
            notes.append(f"dropped {len(flat)} group(s) without variance")
        left_out = {name: count for name, count in self.skipped.items() if count}
        if left_out:
            notes.append("skipped: " + ", ".join(f"{name} {left_out[name]}" for name in sorted(left_out)))
        return notes

    def manifest(self) -> dict[str, Any]:
        return {
            "schema_version": MANIFEST_VERSION,
            "format": self.options.format,
            "rollouts_seen": self.rollouts_seen,
            "calls_seen": self.calls_seen,
            "rows_written": self.rows_written,
            "rows_with_tool_calls": self.rows_with_tool_calls,
            **{f"skipped_{name}": self.skipped[name] for name in SKIPS},
            "zero_variance_groups": sum(group.zero_variance for group in self.groups),
            "groups": [group.record() for group in self.groups],
            "drift": dict(self.drift) or None,
            "versions": {"benchflow": version("benchflow"), "row": ROW_VERSION},
        }


def convert(
    path: str | Path, out: str | Path, options: Options, manifest: str | Path | None = None
) -> Report:
    """Write the rows of everything under ``path`` to ``out``, which appears whole or not at all.
    Raises ``UsageError`` for a path without rollouts, an unknown format, formula or key."""
    rows, root = registry.resolve("exporters", options.format), check_path(path)
    report = Report(str(out), options)
    found = list(find_rollouts(root))
    if not found:
        raise UsageError(f"no rollout under {root}", fix="give a job, a jobs folder or a rollout folder")
    rows_file = _target(out)
    manifest_file = None if manifest is None else _target(manifest)
    if manifest_file is not None and manifest_file.resolve() == rows_file.resolve():
        raise UsageError(f"the rows and the manifest are both {out}", fix="give --manifest another file")
    with replacing(rows_file) as file:
        if options.advantage is None:
            _write_plain(found, rows, report, file)
        else:
            _write_grouped(found, rows, report, file)
    if manifest_file is not None:
        write_json(manifest_file, report.manifest())
    return report


def make_options(
    *,
    format: str = "chat",
    advantage: str | None = None,
    group_by: str | None = None,
    min_reward: float | None = None,
    drop_zero_variance: bool = False,
) -> Options:
    """Options from what a user typed; ``UsageError`` for combinations that mean nothing."""
    if min_reward is not None and not math.isfinite(min_reward):
        raise UsageError(f"--min-reward {min_reward} is not a reward", fix="give a number such as 0.5")
    if advantage is None:
        for given, flag in ((group_by, "--group-by"), (drop_zero_variance, "--drop-zero-variance")):
            if given:
                raise UsageError(f"{flag} needs advantages", fix="add --group-advantage grpo (or loo)")
        return Options(format, min_reward=min_reward)
    return Options(format, check_formula(advantage), parse_by(group_by), min_reward, drop_zero_variance)


def _target(path: str | Path) -> Path:
    target = Path(path)
    if target.is_dir():
        raise UsageError(f"{target} is a folder", fix="name a file")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot write {target}: {error.strerror}", fix="name a file elsewhere") from error
    return target


def _write_plain(found: list[Found], rows: Rows, report: Report, file: BinaryIO) -> None:
    for item in found:
        rollout = read_rollout(item)
        report.rollouts_seen += 1
        reason = _left_out(rollout, report.options)
        if reason:
            report.skipped[reason] += 1
        else:
            _write_rows(Source(rollout), rows, report, file)


def _write_grouped(found: list[Found], rows: Rows, report: Report, file: BinaryIO) -> None:
    options = report.options
    assert options.advantage is not None
    report.groups = make_groups(map(read_rollout, found), options.by, options.advantage)
    members = [(member, group) for group in report.groups for member in group.members]
    report.rollouts_seen = len(members)
    jobs = {item.path: item.job_dir for item in found}
    for member, group in sorted(members, key=lambda pair: pair[0].path):
        reason = _left_out_of_group(member, group, options)
        if reason:
            report.skipped[reason] += 1
            continue
        rollout = read_rollout(Found(member.path, jobs[member.path]))
        _write_rows(Source(rollout, member.advantage, group.row_block(member)), rows, report, file)


def _left_out(rollout: RolloutRecord, options: Options) -> str | None:
    if rollout.problem:
        return "no_result"
    if rollout.masked:
        return "masked"
    if rollout.error or rollout.outcome == "cancelled":
        return "terminal_error"
    return "reward" if _below(rollout.score, options) else None


def _left_out_of_group(member: Member, group: Group, options: Options) -> str | None:
    if group.withheld:
        return "withheld"
    if options.drop_zero_variance and group.zero_variance:
        return "zero_variance"
    return "reward" if _below(member.score, options) else None


def _below(reward: float | None, options: Options) -> bool:
    return reward is None or (options.min_reward is not None and reward < options.min_reward)


def _write_rows(source: Source, rows: Rows, report: Report, file: BinaryIO) -> None:
    report.calls_seen += len(source.calls)
    try:
        made = rows(source)
    except Skip as skip:
        report.skipped[skip.reason] += 1
        return
    finally:
        if source.was_segmented:
            report.drift.update(source.segmented.drift)
    for row in made:
        file.write(dumps(row) + b"\n")
        report.rows_written += 1
        report.rows_with_tool_calls += _row_has_tool_calls(row)


def _row_has_tool_calls(row: Row) -> bool:
    return has_tool_calls(row.get("messages") or row.get("completion") or ())
