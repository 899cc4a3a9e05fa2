"""The agent that does nothing: the floor every task is measured against."""

from __future__ import annotations

from benchflow.agents import events
from benchflow.agents.declaration import DeclaredAgent
from benchflow.contracts.agent import AskUserHandler, SessionContext, SessionState, StopReason, Usage
from benchflow.contracts.sandbox import Sandbox


class NopAgent(DeclaredAgent):
    """Ends every turn at once and touches nothing."""

    async def connect(
        self, sandbox: Sandbox, context: SessionContext, *, resume: SessionState | None = None
    ) -> NopSession:
        return NopSession(context)


class NopSession:
    """A conversation without a word."""

    session_id = "nop"
    usage = Usage()
    n_tool_calls = 0

    def __init__(self, context: SessionContext) -> None:
        self._context = context

    async def prompt(self, text: str) -> StopReason:
        self._context.record(events.user_message(text))
        self._context.record(events.turn_end(StopReason.END_TURN))
        return StopReason.END_TURN

    async def cancel(self) -> None:
        return

    def on_ask_user(self, handler: AskUserHandler) -> None:
        return

    async def fork_state(self) -> SessionState:
        return SessionState("fork")

    async def close(self) -> None:
        return
