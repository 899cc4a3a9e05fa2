"""A laboratory: small tasks in real local sandboxes, an agent's actions, then the verifier."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from importlib.metadata import files
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from benchflow.contracts.errors import PrerequisiteError
from benchflow.contracts.reward import VerifyRequest, VerifyResult
from benchflow.contracts.sandbox import ImageSource, SandboxSpec
from benchflow.contracts.task import Task
from benchflow.rewards.script import ScriptReward
from benchflow.sandboxes.local.provider import LocalProvider
from benchflow.tasks.load import load_task

WORKSPACE = "/app"
FRONTMATTER = """\
agent: {timeout_sec: 60}
environment: {network_mode: no-network, memory_mb: 512, storage_mb: 64}
benchflow: {runtime_policy: {backend: local, local_base: host}}
"""


@dataclass
class Scored:
    result: VerifyResult
    logs: Path

    @property
    def reward(self) -> float | None:
        return self.result.reward

    def file(self, name: str) -> bytes:
        return (self.logs / name).read_bytes()


@dataclass
class Lab:
    provider: LocalProvider
    folder: Path
    reward: ScriptReward = field(default_factory=ScriptReward)

    async def run(
        self,
        task: Path | Task,
        *,
        agent: str | None = None,
        root: str | None = None,
        solve: bool = False,
        workspace: str = WORKSPACE,
        wrap: Callable[[Any], Any] = lambda sandbox: sandbox,
        **options: Any,
    ) -> Scored:
        """Run ``agent`` as the agent's user and ``root`` as root, or the task's own solution,
        then score."""
        task = task if isinstance(task, Task) else load_task(task)
        image = await self.provider.prepare(
            ImageSource(task.name, task.environment_dir, task.dockerfile, task.docker_image, task.local_base)
        )
        spec = SandboxSpec(
            name=f"lab-{uuid.uuid4().hex[:12]}",
            limits=task.limits,
            network=task.network,
            env=task.env,
            workdir=task.workdir,
        )
        sandbox = await self.provider.create(image, spec)
        try:
            baseline = await self.reward.baseline(task, sandbox, workspace)
            for user, script in (("agent", agent), (None, root)):
                if script is not None:
                    done = await sandbox.exec(dedent(script), user=user, cwd=workspace, timeout=60)
                    assert done.ok, done.err
            if solve:
                assert task.oracle is not None
                await sandbox.upload(task.oracle.directory, task.oracle.target)
                done = await sandbox.exec(task.oracle.command, cwd=WORKSPACE, timeout=60)
                assert done.ok, done.err
            request = VerifyRequest(
                task=task,
                node="n0",
                path=("n0",),
                subtree=("n0",),
                sandbox=wrap(sandbox),
                provider=self.provider,
                image=image,
                logs=self.folder / f"{spec.name}-verifier",
                workspace=workspace,
                agent_user=options.pop("agent_user", "agent"),
                baseline=baseline,
                **options,
            )
            return Scored(await self.reward.score(request), request.logs)
        finally:
            await sandbox.teardown()


@pytest.fixture(scope="session")
def sandbox_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images are built once for all tests."""
    return tmp_path_factory.mktemp("home")


@pytest.fixture
async def lab(sandbox_home: Path, tmp_path: Path) -> AsyncIterator[Lab]:
    provider = LocalProvider(sandbox_home)
    try:
        await provider.preflight()
    except PrerequisiteError as error:
        pytest.skip(f"no local sandbox here: {error}")
    yield Lab(provider, tmp_path)
    await provider.close()


def write(root: Path, texts: dict[str, str]) -> Path:
    for name, text in texts.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(dedent(text).lstrip("\n"))
    return root


@pytest.fixture
def make_task(tmp_path: Path) -> Callable[..., Path]:
    """``make_task(test_sh, frontmatter=…, **{file: text})`` writes a native package."""

    def make(test_sh: str, *, frontmatter: str = "", **texts: str) -> Path:
        return write(
            tmp_path / "task",
            {
                "task.md": f"---\n{FRONTMATTER}{dedent(frontmatter)}---\nDo it.\n",
                "environment/Dockerfile": "FROM debian:12-slim\nWORKDIR /app\n",
                "verifier/test.sh": test_sh,
            }
            | texts,
        )

    return make


@pytest.fixture(scope="session")
def runner_context(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A build context with pytest in ``opt/``, and a plugin with the option ``--ctrf``."""
    context = tmp_path_factory.mktemp("context")
    site = context / "opt" / "site"
    site.mkdir(parents=True)
    for name in ("pytest", "pluggy", "iniconfig", "packaging", "pygments"):
        for file in files(name) or ():
            source, target = Path(str(file.locate())), site / file
            inside = ".." not in file.parts and "__pycache__" not in file.parts
            if (
                inside
                and file.suffix != ".exe"
                and (file.parts[:2] != ("pygments", "lexers") or _needed(file.name))
            ):
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(source, target)
    write(
        context,
        {
            "opt/site/minictrf.py": """
                import json

                def pytest_addoption(parser):
                    parser.addoption("--ctrf")

                def pytest_sessionfinish(session):
                    path = session.config.getoption("--ctrf")
                    if path:
                        with open(path, "w") as handle:
                            json.dump({"results": {"summary": {"tests": session.testscollected}}}, handle)
                """,
            "opt/site/minictrf-1.0.dist-info/METADATA": "Name: minictrf\nVersion: 1.0\n",
            "opt/site/minictrf-1.0.dist-info/entry_points.txt": "[pytest11]\nminictrf = minictrf\n",
            "opt/bin/pytest": """
                #!/bin/sh
                PYTHONPATH=/opt/site${PYTHONPATH:+:$PYTHONPATH} exec python3 -m pytest "$@"
                """,
        },
    )
    (context / "opt" / "bin" / "pytest").chmod(0o755)
    return context


def _needed(lexer: str) -> bool:
    """Of hundreds of lexers pytest needs those for its own output."""
    return lexer in ("__init__.py", "_mapping.py", "python.py", "diff.py", "special.py")
