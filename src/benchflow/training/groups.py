"""Groups of rollouts that share one baseline, and the advantages in them.

A group is planned: the job stamps ``group_id`` on its members before they start, and that
is the default. ``--group-by`` derives groups from other keys instead. Two formulas:

- ``grpo``: ``(r - mean) / (std + 1e-4)``, std being the sample standard deviation (ddof 1);
- ``loo``: ``r`` minus the mean of the other scored members.

Both look at scored, unmasked members only; the others keep a null advantage, and so does a
group with a single scored member. When all rewards are exactly equal the advantages are 0.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from benchflow.contracts.errors import UsageError
from benchflow.training.rollouts import RolloutRecord, reached_model

EPS = 1e-4
PLANNED = ("group_id",)
KEYS: dict[str, Callable[[RolloutRecord], Any]] = {
    **{key: attrgetter(key) for key in ("group_id", "task", "task_digest", "agent", "model")},
    "policy_version": lambda rollout: _version_range(rollout.policy_version),
    "job": lambda rollout: _job(rollout),
    **{key: attrgetter(key) for key in ("trial", "branch")},
}

Key = tuple[Any, ...]
Rewards = Sequence[float | None]
Advantages = list[float | None]


def _over_scored(formula: Callable[[list[float]], list[float]]) -> Callable[[Rewards], Advantages]:
    """``formula`` for two or more rewards that differ, applied to any."""

    def advantages(rewards: Rewards) -> Advantages:
        scored = [reward for reward in rewards if reward is not None]
        if len(scored) < 2:
            return [None] * len(rewards)
        found = iter([0.0] * len(scored) if min(scored) == max(scored) else formula(scored))
        return [None if reward is None else next(found) for reward in rewards]

    return advantages


@_over_scored
def grpo(scored: list[float]) -> list[float]:
    """Distance from the mean in (almost) standard deviations."""
    mean, std = mean_std(scored)
    return [(reward - mean) / (std + EPS) for reward in scored]


@_over_scored
def leave_one_out(scored: list[float]) -> list[float]:
    """Distance from the mean of the others."""
    total, others = math.fsum(scored), len(scored) - 1
    return [reward - (total - reward) / others for reward in scored]


def mean_std(scored: Sequence[float]) -> tuple[float, float]:
    """Mean and sample standard deviation (ddof 1) of at least two numbers; the deviation of
    equal numbers is exactly 0."""
    if min(scored) == max(scored):
        return scored[0], 0.0
    mean = math.fsum(scored) / len(scored)
    return mean, math.sqrt(math.fsum((r - mean) ** 2 for r in scored) / (len(scored) - 1))


@dataclass(frozen=True, slots=True)
class Formula:
    text: str
    advantages: Callable[[Rewards], Advantages]
    eps: float | None = None


FORMULAS = {
    "grpo": Formula(
        "advantage = (reward - mean) / (std + eps); "
        "mean and sample std (ddof 1) over the scored rollouts of the group",
        grpo,
        EPS,
    ),
    "loo": Formula(
        "advantage = reward - mean of the rewards of the other scored rollouts of the group",
        leave_one_out,
    ),
}


@dataclass(slots=True)
class Member:
    """One rollout in its group; small, because a whole folder of them is kept."""

    path: str
    rollout: str
    score: float | None
    error: str | None
    """Category of the error that ended it, when it was scored all the same."""
    excluded: str | None
    """Why the baseline leaves it out, or why it spoils its group; None for a good member."""
    advantage: float | None = None


@dataclass(slots=True)
class Group:
    by: tuple[str, ...]
    key: Key
    formula: str
    part: int = 1
    members: list[Member] = field(default_factory=list[Member])
    withheld: str | None = None

    @property
    def id(self) -> str:
        """``task=half-life|agent=mini|model=null``; a planned group's id is the plan's own."""
        if self.by == PLANNED:
            name = self.key[0]
        else:
            name = "|".join(f"{by}={_written(value)}" for by, value in zip(self.by, self.key, strict=True))
        return name if self.part == 1 else f"{name}|part={self.part}"

    @property
    def scores(self) -> list[float]:
        return [member.score for member in self.members if member.score is not None]

    @property
    def zero_variance(self) -> bool:
        scores = self.scores
        return len(scores) > 1 and min(scores) == max(scores)

    def close(self) -> Group:
        """Set the members' advantages and, when one of them spoils the group, ``withheld``."""
        advantages = FORMULAS[self.formula].advantages([member.score for member in self.members])
        for member, advantage in zip(self.members, advantages, strict=True):
            member.advantage = advantage
        self.withheld = _reason([m for m in self.members if m.excluded])
        return self

    def block(self) -> dict[str, Any]:
        """The ``group`` block of a row."""
        formula, scores = FORMULAS[self.formula], self.scores
        mean, std = mean_std(scores) if len(scores) > 1 else (scores[0] if scores else None, None)
        return {
            "id": self.id,
            "normalisation": self.formula,
            "formula": formula.text,
            "rollouts": len(self.members),
            "scored": len(scores),
            "mean": mean,
            "std": std,
            "eps": formula.eps,
            "by": list(self.by),
            "key": dict(zip(self.by, self.key, strict=True)),
            "std_ddof": 1,
        }

    def row_block(self, member: Member) -> dict[str, Any]:
        """The block of one member's rows: the group's own, and the member's error."""
        return {**self.block(), "error": member.error} if member.error else self.block()

    def record(self) -> dict[str, Any]:
        """The group's entry in a manifest. Of a withheld group the advantages are what the
        formula gives its scored members; no row carries them."""
        record = {**self.block(), "members": [_member_record(member) for member in self.members]}
        if self.withheld:
            record["withheld"] = self.withheld
        return record


def make_member(rollout: RolloutRecord) -> Member:
    return Member(
        path=rollout.path,
        rollout=rollout.name,
        score=rollout.score,
        error=rollout.error if rollout.score is not None else None,
        excluded=exclusion(rollout),
    )


def exclusion(rollout: RolloutRecord) -> str | None:
    """What is wrong with a rollout as a member of a group."""
    if rollout.problem:
        return rollout.problem
    if rollout.outcome == "cancelled":
        return "unscored member (cancelled)"
    if rollout.masked:
        return f"unscored member ({rollout.result['attribution'].get('reason')})"
    if rollout.reward is None:
        return "unscored member"
    return None if reached_model(rollout) else "never reached the model"


def group_key(rollout: RolloutRecord, by: tuple[str, ...]) -> Key:
    """Values of the keys. A rollout that no plan put into a group is a group of its own."""
    if by == PLANNED and rollout.group_id is None:
        return (f"rollout={rollout.job}/{rollout.name}",)
    return tuple(KEYS[name](rollout) for name in by)


def make_groups(rollouts: Iterable[RolloutRecord], by: tuple[str, ...], formula: str) -> list[Group]:
    """Group everything that was found, in order of appearance, and close the groups."""
    groups: dict[Key, Group] = {}
    for rollout in rollouts:
        key = group_key(rollout, by)
        groups.setdefault(key, Group(by, key, formula)).members.append(make_member(rollout))
    return [group.close() for group in groups.values()]


def parse_by(text: str | Sequence[str] | None) -> tuple[str, ...]:
    """``task,agent,model``, or a list of them, as keys; without it the planned groups."""
    if text is None:
        return PLANNED
    parts = text.split(",") if isinstance(text, str) else text
    by = tuple(part.strip() for part in parts if part.strip())
    unknown = [name for name in by if name not in KEYS]
    if unknown or not by or len(set(by)) < len(by):
        what = f"unknown key {unknown[0]!r}" if unknown else f"{text!r} names no key, or one twice"
        raise UsageError(f"--group-by: {what}", fix=f"keys: {', '.join(KEYS)}")
    return by


def check_formula(name: str) -> str:
    if name not in FORMULAS:
        raise UsageError(f"unknown group advantage {name!r}", fix=f"known: {', '.join(FORMULAS)}")
    return name


def _reason(spoilers: list[Member]) -> str | None:
    if not spoilers:
        return None
    first, more = spoilers[0], len(spoilers) - 1
    return f"{first.excluded}: {first.rollout}" + (f" and {more} more" if more else "")


def _member_record(member: Member) -> dict[str, Any]:
    record = {"rollout": member.rollout, "reward": member.score, "advantage": member.advantage}
    if member.excluded:
        record["excluded"] = member.excluded
    if member.error:
        record["error"] = member.error
    return record


def _version_range(version: dict[str, str | None]) -> str | None:
    first, last = version["first"], version["last"]
    return first if first == last or last is None else f"{first}..{last}"


def _job(rollout: RolloutRecord) -> str:
    """The repeats of one command share a job name; the trial's folder tells them apart."""
    above, name = os.path.split(os.path.abspath(rollout.job_dir))
    trial = os.path.basename(above)
    return f"{trial}/{name}" if trial.startswith("trial-") else name


def _written(value: Any) -> str:
    return "null" if value is None else str(value)
