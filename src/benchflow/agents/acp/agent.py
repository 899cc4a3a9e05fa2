"""An agent whose process speaks the Agent Client Protocol in the sandbox."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchflow.agents import bundle
from benchflow.agents.declaration import DeclaredAgent
from benchflow.contracts.agent import SessionContext, SessionState
from benchflow.contracts.errors import AgentInstallError, PrerequisiteError, UsageError
from benchflow.contracts.sandbox import Mount, Sandbox

if TYPE_CHECKING:
    from benchflow.agents.acp.session import AcpSession


class AcpAgent(DeclaredAgent):
    """Starts the declared command and opens a session with it."""

    async def prepare(self) -> tuple[Mount, ...]:
        """The bundle's mount; nothing for an agent that is not installed on the host."""
        if self.declaration.install is None:
            return ()
        try:
            return ((await bundle.ensure(self.declaration)).mount,)
        except PrerequisiteError as error:
            raise AgentInstallError(error.message, fix=error.fix) from error

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
        """The argv inside; an installed agent's goes through its bundle's own loader."""
        if self.declaration.install is None:
            return self.declaration.prepared(self.declaration.start)
        installed = await bundle.ensure(self.declaration)
        if installed.mount not in sandbox.spec.mounts:
            raise AgentInstallError(
                f"the sandbox was created without the bundle of agent {self.name}",
                fix="create it with SandboxSpec(mounts=await agent.prepare())",
            )
        return installed.argv(self.declaration, installed.mount.target)
