"""Structural checks of task packages, as ``bench tasks check`` prints them."""

from __future__ import annotations

from dataclasses import asdict, dataclass
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
        networks = [f"{who} {_shown(policy)}" for who, policy in self._networks().items()]
        facts = f"  network: {', '.join(networks)}" if networks else ""
        found = [f"  problem: {item}" for item in self.problems]
        found += [f"  warning: {item}" for item in self.warnings]
        return [f"{verdict}  {self.path}{facts}", *found]

    def record(self) -> dict[str, object]:
        record: dict[str, object] = {"path": str(self.path), "ok": self.ok}
        if self.task:
            record |= {"name": self.task.name, "layout": self.task.layout, "digest": self.task.digest}
            record["network"] = {who: policy.mode for who, policy in self._networks().items()}
        found = {"problems": self.problems, "warnings": self.warnings}
        return record | {name: [asdict(item) for item in items] for name, items in found.items()}

    def _networks(self) -> dict[str, NetworkPolicy]:
        if self.task is None:
            return {}
        network = self.task.network
        return {"agent": network, "verifier": self.task.verifier.network or network}


def check_task(path: Path | str, level: Level = "structural") -> Checked:
    """Check one package. ``schema`` reads the definition and the prompt only; ``structural``
    also the environment, the verifier and the oracle. Raises ``UsageError`` for no task."""
    package = open_package(path)
    if level == "schema":
        task, findings = None, check_schema(package)
    else:
        task, findings = inspect_task(package)
    return Checked(Path(path), tuple(findings.problems), tuple(findings.warnings), task)


def _shown(policy: NetworkPolicy) -> str:
    return f"allowlist of {len(policy.allowed_hosts)}" if policy.mode == "allowlist" else policy.mode
