"""Our small tool-loop agent. It runs in the engine; only its commands run in the sandbox.

It needs nothing inside the image and starts in no time. Its whole state is the list of
messages, so a session forks and resumes exactly.
"""

from __future__ import annotations

import asyncio
import copy
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from benchflow.agents import bash_tool, events
from benchflow.agents.chat import ChatClient, TurnEnded
from benchflow.agents.declaration import DeclaredAgent
from benchflow.contracts.agent import AskUserHandler, SessionContext, SessionState, StopReason, Usage
from benchflow.contracts.errors import UsageError
from benchflow.contracts.sandbox import Sandbox

Message = dict[str, Any]

_OURS = frozenset({"model", "messages", "tools", "tool_choice", "stream", "stream_options", "n"})
"""Request fields that sampling parameters may not replace."""

SYSTEM = """\
You are working alone on a task in a Linux sandbox. Your tool is `bash`; it starts in {workspace}.
Work in small steps: look first, change things, then check the result the way the task will be judged.
Nobody can answer questions. When the work is done, reply without a tool call.
"""


@dataclass(frozen=True, slots=True)
class Settings:
    """``[options]`` of the declaration; ``--agent-env MINI_MAX_STEPS=50`` and so on override them."""

    max_steps: int = 100
    """Model calls of one turn."""
    command_timeout: float = 120.0
    """Seconds; also the most that the model can ask for."""
    output_limit: int = 16_000
    """Characters of a command's output that the model sees."""

    @classmethod
    def read(cls, options: Mapping[str, Any], env: Mapping[str, str]) -> Settings:
        values: dict[str, Any] = dict(options)
        for name, kind in (("max_steps", int), ("command_timeout", float), ("output_limit", int)):
            variable = f"MINI_{name.upper()}"
            if variable not in env:
                continue
            try:
                values[name] = kind(env[variable])
            except ValueError as error:
                raise UsageError(
                    f"{variable}={env[variable]!r} is not a number", fix=f"--agent-env {variable}=100"
                ) from error
            if values[name] <= 0:
                raise UsageError(f"{variable}={env[variable]} is not positive")
        return cls(**values)


class MiniAgent(DeclaredAgent):
    """Makes ``mini`` sessions."""

    async def connect(
        self, sandbox: Sandbox, context: SessionContext, *, resume: SessionState | None = None
    ) -> MiniSession:
        """Start a conversation, or continue exactly from ``resume``."""
        if context.route is None:
            raise UsageError(f"agent {self.name} needs a model", fix="pass -m provider/name")
        settings = Settings.read(self.declaration.options, context.env)
        messages = _saved(resume) if resume else [_system(context.workspace)]
        return MiniSession(sandbox, context, settings, messages)


class MiniSession:
    """A conversation: the model is called until it replies without a tool call."""

    def __init__(
        self, sandbox: Sandbox, context: SessionContext, settings: Settings, messages: list[Message]
    ) -> None:
        assert context.route is not None
        self.session_id = uuid.uuid4().hex
        self.n_tool_calls = 0
        self.usage = Usage()
        self._sandbox = sandbox
        self._context = context
        self._settings = settings
        self._model = context.route.model
        self._client = ChatClient(context.route)
        self._messages = messages
        self._turn: asyncio.Task[StopReason] | None = None
        self._stopped = False

    async def prompt(self, text: str) -> StopReason:
        """One turn. Cancelling it kills the command that is running."""
        self._context.record(events.user_message(text))
        self._answer_open_calls()
        self._messages.append({"role": "user", "content": text})
        self._stopped = False
        self._turn = asyncio.create_task(self._loop())
        try:
            reason = await self._turn
        except asyncio.CancelledError:
            if not (self._stopped and self._turn.cancelled()):
                raise
            reason = StopReason.CANCELLED
        finally:
            self._turn = None
        self._context.record(events.turn_end(reason))
        return reason

    async def cancel(self) -> None:
        """End the running turn with ``cancelled``."""
        if self._turn is not None:
            self._stopped = True
            self._turn.cancel()
            await asyncio.wait([self._turn])

    def on_ask_user(self, handler: AskUserHandler) -> None:
        return  # mini never asks

    async def fork_state(self) -> SessionState:
        return SessionState("fork", {"messages": copy.deepcopy(self._messages)})

    async def close(self) -> None:
        await self.cancel()
        await self._client.close()

    async def _loop(self) -> StopReason:
        for _ in range(self._settings.max_steps):
            try:
                reply = await self._client.complete(self._body())
            except TurnEnded as ended:
                self._context.record(events.error(ended.message, reason=ended.reason))
                return ended.reason
            choice = reply["choices"][0]
            self._count(reply.get("usage"))
            calls = self._take(choice["message"])
            if choice.get("finish_reason") == "length":
                return StopReason.MAX_TOKENS
            if not calls:
                refused = choice.get("finish_reason") == "content_filter"
                return StopReason.REFUSAL if refused else StopReason.END_TURN
            for call in calls:
                self._messages.append(_tool_message(call, await self._call(call)))
        return StopReason.MAX_TURN_REQUESTS

    def _body(self) -> dict[str, Any]:
        body: dict[str, Any] = {"model": self._model, "messages": self._messages, "tools": [bash_tool.SCHEMA]}
        if self._context.reasoning_effort:
            body["reasoning_effort"] = self._context.reasoning_effort
        return body | {key: value for key, value in self._context.sampling.items() if key not in _OURS}

    def _take(self, message: Message) -> list[Message]:
        """Keep the model's message, record what it says, and return its tool calls."""
        message = {key: value for key, value in message.items() if value not in (None, [])}
        message.setdefault("content", None if "tool_calls" in message else "")
        calls = [call for call in message.get("tool_calls") or () if isinstance(call, dict)]
        for index, call in enumerate(calls):
            call.setdefault("id", f"call-{len(self._messages)}-{index}")
        self._messages.append(message)
        thought = message.get("reasoning_content") or message.get("reasoning")
        if isinstance(thought, str) and thought:
            self._context.record(events.agent_thought(thought))
        content = message.get("content")
        if isinstance(content, str) and content:
            self._context.record(events.agent_message(content))
        return calls

    async def _call(self, call: Message) -> str:
        """Run one tool call and return what the model is told. A call that makes no sense is
        answered with what is wrong, so that the model can correct itself."""
        self.n_tool_calls += 1
        function = call.get("function") or {}
        name, arguments = function.get("name"), function.get("arguments")
        try:
            if name != "bash":
                raise bash_tool.BadArguments(f"there is no tool {name!r}; the only tool is bash")
            command = bash_tool.Command.parse(arguments, self._settings.command_timeout)
        except bash_tool.BadArguments as error:
            event = events.tool_call(call["id"], title=str(name), tool_kind="other", input=arguments)
            self._context.record(event)
            answer = f"[error: {error}]"
            self._context.record(events.tool_result(event, output=answer, exit_code=None, status="failed"))
            return answer
        return await self._run(call["id"], command)

    async def _run(self, call_id: str, command: bash_tool.Command) -> str:
        event = events.tool_call(call_id, title=command.line.strip()[:200], input={"command": command.line})
        self._context.record(event)
        try:
            result = await bash_tool.run(self._sandbox, self._context, command)
        except asyncio.CancelledError:
            self._context.record(events.tool_result(event, output=None, exit_code=None, status="cancelled"))
            raise
        answer = bash_tool.describe(result, command, self._settings.output_limit)
        self._context.record(
            events.tool_result(
                event,
                output=answer,
                exit_code=None if result.timed_out else result.exit_code,
                status="completed" if result.ok else "failed",
            )
        )
        return answer

    def _count(self, usage: object) -> None:
        """Add one reply's usage; a reply that tells none makes the totals unknown for good."""
        told = usage if isinstance(usage, Mapping) else {}
        first = self.usage.source == "none"
        self.usage = Usage(
            input_tokens=_add(0 if first else self.usage.input_tokens, told.get("prompt_tokens")),
            output_tokens=_add(0 if first else self.usage.output_tokens, told.get("completion_tokens")),
            source="agent",
        )

    def _answer_open_calls(self) -> None:
        """A turn cut short leaves tool calls without an answer, which no endpoint accepts."""
        open_calls: dict[str, Message] = {}
        for message in self._messages:
            open_calls |= {call["id"]: call for call in message.get("tool_calls", ())}
            open_calls.pop(message.get("tool_call_id", ""), None)
        for call in open_calls.values():
            self._messages.append(_tool_message(call, "[not run: the turn had ended]"))


def _system(workspace: str) -> Message:
    return {"role": "system", "content": SYSTEM.format(workspace=workspace)}


def _saved(state: SessionState) -> list[Message]:
    messages = state.data.get("messages")
    if not isinstance(messages, list):
        raise UsageError("this session state was not saved by mini", fix="start a fresh session")
    return copy.deepcopy(messages)


def _tool_message(call: Message, content: str) -> Message:
    return {"role": "tool", "tool_call_id": call["id"], "content": content}


def _add(total: int | None, more: object) -> int | None:
    return total + more if total is not None and isinstance(more, int) else None
