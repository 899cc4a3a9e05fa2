"""The scripted agent on the host's side: brings the program and its script into the sandbox."""

from __future__ import annotations

import json
import tempfile
import uuid
from pathlib import Path

from benchflow.agents.acp.agent import AcpAgent
from benchflow.agents.scripted import script
from benchflow.contracts.agent import SessionContext
from benchflow.contracts.errors import AgentInstallError, UsageError
from benchflow.contracts.sandbox import Sandbox

HOME = "/opt/benchflow/scripted"
PROGRAM = f"{HOME}/agent.py"
VARIABLE = "BENCHFLOW_SCRIPT"


class ScriptedAgent(AcpAgent):
    """An ACP agent that plays ``--agent-env BENCHFLOW_SCRIPT=actions.yaml``, a file on the host."""

    async def install(self, sandbox: Sandbox) -> None:
        found = await sandbox.exec("command -v python3")
        if not found.ok:
            raise AgentInstallError(
                f"agent {self.name} needs python3 in the image", fix="add python3 to it, or run another agent"
            )
        await sandbox.upload(Path(__file__).with_name("program.py"), PROGRAM, owner="root")

    async def command(self, sandbox: Sandbox, context: SessionContext) -> list[str]:
        path = context.env.get(VARIABLE)
        if not path:
            raise UsageError(
                f"agent {self.name} needs a file of actions", fix=f"pass --agent-env {VARIABLE}=actions.yaml"
            )
        actions = script.load(Path(path))
        actions["seed"] = f"{actions['seed']}:{context.seed}:{context.trial}"
        remote = f"{HOME}/{uuid.uuid4().hex}.json"
        with tempfile.TemporaryDirectory(prefix="benchflow-") as folder:
            local = Path(folder, "script.json")
            local.write_text(json.dumps(actions), "utf-8")
            local.chmod(0o644)
            await sandbox.upload(local, remote, owner="root")
        # Isolated: nothing in the workspace or in PYTHON* variables can change the program.
        return ["python3", "-I", "-u", PROGRAM, remote]
