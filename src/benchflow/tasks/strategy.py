"""How a verifier is started: its ``test.sh``, or the strategy that ``verifier.md`` selects."""

from __future__ import annotations

import posixpath
import re
import shlex
from dataclasses import dataclass

from benchflow.tasks.document import read_document
from benchflow.tasks.package import Folder, Package
from benchflow.tasks.problems import FileProblem, Findings, Problem
from benchflow.tasks.section import Section

LOGS = "/logs/verifier"
_CTRF = re.compile(rb"--ctrf[= \t]+[\"']?/logs/verifier/")
_KINDS = ("script", "llm-judge", "reward-kit", "agent-judge", "ors-episode")


@dataclass(frozen=True, slots=True)
class Strategy:
    """``command`` is run by a shell whose folder is the workspace."""

    command: str
    reward_text: str = f"{LOGS}/reward.txt"
    reward_json: str = f"{LOGS}/reward.json"


def strategy(package: Package, verifier: Folder, findings: Findings) -> Strategy | None:
    """A plain ``test.sh`` runs in the workspace; a declared script runs in the verifier's folder."""
    document = verifier.path / "verifier.md"
    if document.is_file():
        try:
            return _declared(package, verifier, findings)
        except FileProblem as error:
            findings.problems.append(error.problem)
            return None
    if not (verifier.path / "test.sh").is_file():
        where = package.file(verifier.path)
        findings.problems.append(Problem("no test.sh, which starts the verifier", f"{where}/test.sh"))
        return None
    return Strategy(f"{verifier.target}/test.sh")


def expects_ctrf(verifier: Folder) -> bool:
    """True when ``test.sh`` asks its test runner for a CTRF report among the results."""
    try:
        text = (verifier.path / "test.sh").read_bytes()
    except OSError:
        return False
    return any(_CTRF.search(line.partition(b"#")[0]) for line in text.splitlines())


def _declared(package: Package, verifier: Folder, findings: Findings) -> Strategy | None:
    source, _ = read_document(verifier.path / "verifier.md", package.file(verifier.path / "verifier.md"))
    root = Section(source, findings)
    root.accept("document_version")
    table = root.table("verifier")
    table.accept("name", "rubric")
    default = table.text("default_strategy")
    strategies = table.table("strategies")
    name = default or next(iter(strategies.data), None)
    if name is None:
        table.problem("strategies", "must declare at least one strategy")
        return None
    if name not in strategies.data:
        known = ", ".join(strategies.data)
        table.problem("default_strategy", f"{name!r} is not declared; declared: {known}")
        return None
    command = _script(strategies.table(name), verifier)
    found = _outputs(table.table("outputs"))
    table.close()
    root.close()
    return Strategy(f"cd {shlex.quote(verifier.target)} && {command}", *found) if command else None


def _script(section: Section, verifier: Folder) -> str | None:
    kind = section.text("type")
    if kind not in _KINDS:
        section.problem("type", f"must be one of {', '.join(_KINDS)}, not {kind!r}")
        return None
    if kind != "script":
        section.problem("type", f"a {kind} strategy is not supported yet; script is")
        return None
    command = section.text("command")
    if command is None:
        section.problem("command", "a script strategy needs a command")
        return None
    for word in re.findall(r"(?:^|\s)\./([\w./-]+)", command):
        if not (verifier.path / word).is_file():
            section.problem("command", f"{word!r} is not in the verifier's folder")
    section.close()
    return command


def _outputs(outputs: Section) -> tuple[str, str]:
    paths: list[str] = []
    for key, default in (("reward_text", "reward.txt"), ("reward_json", "reward.json")):
        path = outputs.text(key) or f"{LOGS}/{default}"
        if posixpath.dirname(posixpath.normpath(path)) != LOGS:
            outputs.problem(key, f"must be a file in {LOGS}, which is emptied before the verifier runs")
        paths.append(path)
    outputs.accept("details_json")
    outputs.refuse("aggregate_policy", "aggregating metrics is not supported yet; write a numeric reward")
    outputs.close()
    return paths[0], paths[1]
