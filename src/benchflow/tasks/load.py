"""Reading one task package into a ``Task``."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from benchflow.contracts.errors import TaskError
from benchflow.contracts.task import OraclePlan, Task
from benchflow.tasks.config import Settings, settings
from benchflow.tasks.digest import task_digest
from benchflow.tasks.document import base_prompt, read_document
from benchflow.tasks.package import Package, check_links, open_package
from benchflow.tasks.problems import ConfigSource, FileProblem, Findings, Problem, read_text
from benchflow.tasks.split import read_toml
from benchflow.tasks.strategy import expects_ctrf, strategy

Level = Literal["schema", "structural"]


def load_task(path: Path | str) -> Task:
    """Read the task at ``path``, native or split.

    Raises ``UsageError`` when there is no task, and ``TaskError`` naming file, line and
    key of the first problem when there is one that cannot be run.
    """
    task, findings = inspect_task(open_package(path))
    if task is None:
        first, *rest = findings.problems
        more = f" (and {len(rest)} more: `bench tasks check {path}` lists them)" if rest else ""
        raise TaskError(f"task {Path(path).name!r}: {first}{more}")
    return task


def inspect_task(package: Package) -> tuple[Task | None, Findings]:
    """Everything wrong with a package, and the task when nothing is."""
    findings = Findings()
    source, instruction = _definition(package, findings)
    if source is None:
        return None, findings
    found = settings(source, findings)
    _check_environment(package, found, findings)
    check_links(package, findings)
    verifier = package.verifier(found.verifier_path)
    if verifier is None:
        name = found.verifier_path or ("verifier" if package.layout == "task.md" else "tests")
        findings.problems.append(Problem("there is no such folder; it holds the verifier", name))
    plan = strategy(package, verifier, findings) if verifier else None
    oracle = _oracle(package, found, findings)
    if findings.problems or verifier is None or plan is None:
        return None, findings
    task = found.task(
        name=found.name or package.root.name,
        path=package.root,
        layout=package.layout,
        digest=task_digest(package.root),
        instruction=instruction,
        verifier=found.verifier(
            directory=verifier.path,
            target=verifier.target,
            command=plan.command,
            reward_text=plan.reward_text,
            reward_json=plan.reward_json,
            expects_ctrf=expects_ctrf(verifier),
        ),
        oracle=oracle,
        environment_dir=package.environment(),
        dockerfile=package.dockerfile(),
        docker_image=found.docker_image,
        warnings=tuple(str(warning) for warning in findings.warnings),
    )
    return task, findings


def check_schema(package: Package) -> Findings:
    """Problems of the definition and the prompt alone."""
    findings = Findings()
    source, _ = _definition(package, findings)
    if source is not None:
        settings(source, findings)
    return findings


def _definition(package: Package, findings: Findings) -> tuple[ConfigSource | None, str]:
    """The configuration and the instruction, each read even when the other is broken."""
    source, instruction, prompt_file = None, "", package.definition
    try:
        if package.layout == "task.md":
            source, body = read_document(package.root / "task.md", "task.md")
            first = (package.root / "task.md").read_bytes().count(b"\n") - body.count("\n") + 1
            instruction = base_prompt(body, "task.md", first_line=first)
        else:
            source = read_toml(package.root / "task.toml", "task.toml")
            prompt_file = "instruction.md"
            instruction = read_text(package.root / "instruction.md", "instruction.md")
    except FileProblem as error:
        findings.problems.append(error.problem)
        return source, ""
    if not instruction.strip():
        findings.problems.append(Problem("the instruction is empty", prompt_file))
    return source, instruction


def _check_environment(package: Package, found: Settings, findings: Findings) -> None:
    compose = package.compose()
    if compose is not None:
        message = "a task of several containers is not supported yet"
        findings.problems.append(Problem(message, package.file(compose)))
    if package.dockerfile() is None and found.docker_image is None:
        findings.problems.append(
            Problem("there is no such file, and no environment.docker_image", "environment/Dockerfile")
        )
    verifier = package.verifier(found.verifier_path)
    if verifier and (verifier.path / "Dockerfile").is_file():
        file = package.file(verifier.path / "Dockerfile")
        findings.problems.append(Problem("a verifier image of its own is not supported yet", file))


def _oracle(package: Package, found: Settings, findings: Findings) -> OraclePlan | None:
    folder = package.oracle(found.oracle_path)
    if folder is None:
        if found.oracle_path:
            findings.problems.append(Problem("there is no such folder in the task", found.oracle_path))
        return None
    if not (folder.path / "solve.sh").is_file():
        findings.problems.append(Problem("no solve.sh in it", package.file(folder.path)))
        return None
    command = f"{folder.target}/solve.sh"
    return found.oracle(folder.path, folder.target, command)
