"""Questions an agent asks its user: answered by a handler, or by a policy that allows."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from acp import schema

from benchflow.contracts.agent import AskUser, AskUserHandler, Record

_PREFERRED = ("allow_always", "allow_once")


async def allow(question: AskUser) -> str | None:
    """The default policy of a run without a user: the widest permission that is offered. It goes
    by the kind of an option, since ids and names change between versions of an agent."""
    for kind in _PREFERRED:
        if kind in question.kinds:
            return question.options[question.kinds.index(kind)]
    return None


class Questions:
    """The client side that the SDK calls."""

    def __init__(self, record: Record, on_failure: Callable[[], None]) -> None:
        self.handler: AskUserHandler = allow
        self.failure: BaseException | None = None
        """What a handler raised; ``on_failure`` has then been called to end the turn."""
        self.answered_at = 0.0
        self._record = record
        self._on_failure = on_failure
        self._open: set[asyncio.Future[str | None]] = set()
        self._refusing = False

    @property
    def asking(self) -> bool:
        return bool(self._open)

    def accept(self) -> None:
        """A turn begins: questions are asked again."""
        self._refusing = False

    def cancel_all(self) -> None:
        """Answer what is open, and all that still comes in this turn, with ``cancelled``."""
        self._refusing = True
        for asked in self._open:
            asked.cancel()

    async def request_permission(
        self,
        options: list[schema.PermissionOption],
        session_id: str,
        tool_call: schema.ToolCallUpdate,
        **_: Any,
    ) -> schema.RequestPermissionResponse:
        names = [option.name for option in options]
        if len(set(names)) < len(names):
            names = [option.option_id for option in options]
        question = AskUser(
            question=tool_call.title or "The agent asks for permission",
            options=tuple(names),
            kinds=tuple(str(option.kind) for option in options),
            tool_call_id=tool_call.tool_call_id,
        )
        choice = await self._ask(question)
        picked = next(
            (o for o, name in zip(options, names, strict=True) if choice in (name, o.option_id)), None
        )
        if picked is None:
            outcome = schema.DeniedOutcome(outcome="cancelled")
        else:
            outcome = schema.AllowedOutcome(outcome="selected", option_id=picked.option_id)
        self._record(
            {
                "direction": "to_agent",
                "kind": "permission",
                "id": tool_call.tool_call_id,
                "update": {"outcome": outcome.model_dump(by_alias=True), "option": choice},
            }
        )
        return schema.RequestPermissionResponse(outcome=outcome)

    async def _ask(self, question: AskUser) -> str | None:
        if self._refusing:
            return None
        asked = asyncio.ensure_future(self.handler(question))
        self._open.add(asked)
        try:
            await asyncio.wait({asked})
        finally:
            self._open.discard(asked)
            asked.cancel()
            self.answered_at = time.monotonic()
        if asked.cancelled():
            return None
        if (failure := asked.exception()) is not None:
            self.failure = failure
            self._on_failure()
            return None
        return asked.result()
