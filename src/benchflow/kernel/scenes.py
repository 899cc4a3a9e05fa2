"""Scenes are compiled to steps before a run; nothing of them lives at run time."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from benchflow.contracts.config import Role, Scene


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """``new_session`` is true where the role's conversation starts afresh: at its first
    turn in each scene. Later turns of the same role in the scene share that session."""

    scene: str
    role: Role
    prompt: str
    new_session: bool


def compile_scenes(scenes: Iterable[Scene], instruction: str) -> list[PlannedStep]:
    """Lower scenes to the steps to run, in order. A turn without a prompt gets ``instruction``."""
    steps: list[PlannedStep] = []
    for scene in scenes:
        roles = {role.name: role for role in scene.roles}
        turns = scene.turns
        met: set[str] = set()
        for turn in turns:
            prompt = instruction if turn.prompt is None else turn.prompt
            steps.append(PlannedStep(scene.name, roles[turn.role], prompt, turn.role not in met))
            met.add(turn.role)
    return steps
