"""Structural checks of task packages, as ``bench tasks check`` prints them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from benchflow.contracts.sandbox import NetworkPolicy
from benchflow.contracts.task import Task
from benchflow.tasks.load import Level, check_schema, inspect_task
from benchflow.tasks.package import open_package
from benchflow.tasks.problems import Problem


@dataclass(frozen=True, slots=True)
class Checked:
    """The verdict on one package. ``task`` is None at schema level and for a broken one."""

    path: Path
    problems: tuple[Problem, ...]
    warnings: tuple[Problem, ...]
    task: Task | None

    @property
    def ok(self) -> bool:
        return not self.problems

    def lines(self) -> list[str]:
        """What a person reads: the verdict, then each finding with file, line and key."""
        verdict = "ok" if self.ok else "broken"
        facts = f"  {network_facts(self.task)}" if self.task else ""
        found = [f"  problem: {item}" for item in self.problems]
        found += [f"  warning: {item}" for item in self.warnings]
        return [f"{verdict}  {self.path}{facts}", *found]

    def record(self) -> dict[str, object]:
        def rows(items: tuple[Problem, ...]) -> list[dict[str, object]]:
            return [{"file": i.file, "line": i.line, "key": i.key, "message": i.message} for i in items]

        record: dict[str, object] = {"path": str(self.path), "ok": self.ok}
        if self.task:
            record |= {"name": self.task.name, "layout": self.task.layout, "digest": self.task.digest}
            record["network"] = {
                "agent": self.task.network.mode,
                "verifier": (self.task.verifier.network or self.task.network).mode,
            }
        return record | {"problems": rows(self.problems), "warnings": rows(self.warnings)}


def check_task(path: Path | str, level: Level = "structural") -> Checked:
    """Check one package. ``schema`` reads the definition and the prompt only; ``structural``
    also the environment, the verifier and the oracle. Raises ``UsageError`` for no task."""
    package = open_package(path)
    if level == "schema":
        task, findings = None, check_schema(package)
    else:
        task, findings = inspect_task(package)
    return Checked(Path(path), tuple(findings.problems), tuple(findings.warnings), task)


def network_facts(task: Task) -> str:
    verifier = task.verifier.network or task.network
    return f"network: agent {_network(task.network)}, verifier {_network(verifier)}"


def _network(policy: NetworkPolicy) -> str:
    return f"allowlist of {len(policy.allowed_hosts)}" if policy.mode == "allowlist" else policy.mode
