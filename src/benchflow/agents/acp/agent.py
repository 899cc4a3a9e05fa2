"""An agent whose process speaks the Agent Client Protocol in the sandbox."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchflow.agents.declaration import DeclaredAgent
from benchflow.contracts.agent import SessionContext, SessionState
from benchflow.contracts.errors import UsageError
from benchflow.contracts.sandbox import Sandbox

if TYPE_CHECKING:
    from benchflow.agents.acp.session import AcpSession


class AcpAgent(DeclaredAgent):
    """Starts the declared command and opens a session with it."""

    async def connect(
        self, sandbox: Sandbox, context: SessionContext, *, resume: SessionState | None = None
    ) -> AcpSession:
        """Spawn the agent as the session's user in the workspace. It sees the declared variables
        and the user's, and nothing of the engine's own environment."""
        # The SDK takes most of a second to import, so only a run that needs it pays.
        from benchflow.agents.acp.session import AcpSession

        if context.route is None and self.declaration.needs_model:
            raise UsageError(f"agent {self.name} needs a model", fix="pass -m provider/name")
        process = await sandbox.spawn(
            await self.command(sandbox, context),
            user=context.user,
            cwd=context.workspace,
            env=self.declaration.environment(context),
        )
        session = AcpSession(process, context, self.declaration)
        try:
            await session.open(resume)
        except BaseException:
            await session.close()
            raise
        self.version = self.version or session.agent_version
        return session

    async def command(self, sandbox: Sandbox, context: SessionContext) -> list[str]:
        return list(self.declaration.start)
