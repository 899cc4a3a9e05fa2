"""A live conversation with an agent process over the Agent Client Protocol.

We are the client. Frames are recorded in the order of arrival by the transport's hook; the
SDK only correlates requests with replies. Every wait here is bounded: the handshake, silence
(``idle_timeout``), a cancel the agent ignores (``cancel_grace``), a kill.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any

import acp
from acp import schema
from acp.client import ClientSideConnection
from pydantic import ValidationError

from benchflow.agents import events
from benchflow.agents.acp.frames import Frame, FrameTransport, is_update
from benchflow.agents.acp.permissions import Questions
from benchflow.agents.acp.updates import UpdateLog, add_usage
from benchflow.agents.declaration import Declaration
from benchflow.agents.logs import RawLog
from benchflow.contracts.agent import AskUserHandler, SessionContext, SessionState, StopReason, Usage
from benchflow.contracts.errors import (
    AgentCrashError,
    AgentError,
    AgentHandshakeError,
    AgentIdleTimeoutError,
    AgentProtocolError,
)
from benchflow.contracts.sandbox import Process

EXIT_WAIT = 1.0
"""Seconds for a process that closed its stdout, or was told to end, to exit by itself."""
KILL_WAIT = 30.0
"""Seconds after which a kill is given up; the sandbox's teardown is the backstop."""
DRAIN_QUIET = 0.05
DRAIN_MAX = 1.0
"""After the end of a turn, late frames are waited for until the agent is quiet for the first,
and at most for the second."""


class AcpSession:
    """Made by ``AcpAgent.connect``; ``open`` does the handshake."""

    def __init__(self, process: Process, context: SessionContext, declaration: Declaration) -> None:
        self.session_id = ""
        self.agent_version: str | None = None
        self._process = process
        self._context = context
        self._declaration = declaration
        self._log = UpdateLog()
        self._stdout = RawLog(context.logs / "stdout.txt", context.redact)
        self._stderr = RawLog(context.logs / "stderr.txt", context.redact)
        self._transport = FrameTransport(process, self._stdout, self._on_frame)
        self._questions = Questions(context.record, self._handler_failed)
        self._conn = ClientSideConnection(self._questions, self._transport)  # pyright: ignore[reportArgumentType]
        self._stderr_pump = asyncio.create_task(self._drain_stderr())
        self._recording = True
        self._can_load = False
        self._reply: asyncio.Task[schema.PromptResponse] | None = None
        self._stopping = False
        self._stopper: asyncio.Task[None] | None = None
        self._dead = False
        self._closed = False

    @property
    def usage(self) -> Usage:
        return self._log.usage

    @property
    def n_tool_calls(self) -> int:
        return len(self._log.calls)

    # ── handshake ────────────────────────────────────────────────────────────────────────

    async def open(self, resume: SessionState | None) -> None:
        """Initialise and start, or load, the session. Raises ``AgentHandshakeError``; the
        process is gone then."""
        limit = self._declaration.handshake_timeout
        try:
            async with asyncio.timeout(limit):
                await self._handshake(resume)
        except TimeoutError as error:
            raise await self._handshake_failed(f"did not answer within {limit:g} s") from error
        except acp.RequestError as error:
            raise await self._handshake_failed(f"refused: {error} (code {error.code})") from error
        except ValidationError as error:
            raise await self._handshake_failed(f"gave a reply we cannot read: {error}") from error
        except ConnectionError as error:
            cause = await self._why_gone("during the handshake")
            raise AgentHandshakeError(cause.message, fix=cause.fix, detail=cause.detail) from error

    async def _handshake(self, resume: SessionState | None) -> None:
        context, declared, conn = self._context, self._declaration, self._conn
        hello = await conn.initialize(
            protocol_version=acp.PROTOCOL_VERSION,
            client_capabilities=schema.ClientCapabilities(),
            client_info=schema.Implementation(name="benchflow", version="1"),
        )
        if hello.protocol_version != acp.PROTOCOL_VERSION:
            raise acp.RequestError(
                -32000,
                f"it speaks protocol version {hello.protocol_version}, we speak {acp.PROTOCOL_VERSION}",
            )
        self._can_load = bool(hello.agent_capabilities and hello.agent_capabilities.load_session)
        self.agent_version = hello.agent_info.version if hello.agent_info else None
        if resume is None:
            started = await conn.new_session(cwd=context.workspace, mcp_servers=[])
            self.session_id = started.session_id
        else:
            await self._load(str(resume.data.get("session_id", "")))
        if declared.mode:
            await conn.set_session_mode(session_id=self.session_id, mode_id=declared.mode)
        for option, value in (
            (declared.model_option, context.route.model if context.route else None),
            (declared.effort_option, context.reasoning_effort),
        ):
            if option and value:
                await conn.set_config_option(config_id=option, session_id=self.session_id, value=value)

    async def _load(self, session_id: str) -> None:
        # The agent replays the conversation; it is in the parent's record already.
        self._recording = False
        try:
            await self._conn.load_session(cwd=self._context.workspace, session_id=session_id, mcp_servers=[])
        finally:
            self._recording = True
        self.session_id = session_id

    async def _handshake_failed(self, what: str) -> AgentHandshakeError:
        await self._kill()
        return AgentHandshakeError(
            f"agent {self._declaration.name} {what}",
            fix="see agent/stderr.txt of the rollout",
            detail=self._tail(),
        )

    # ── turns ────────────────────────────────────────────────────────────────────────────

    async def prompt(self, text: str) -> StopReason:
        """One turn. Cancelling it asks the agent to stop and, after the grace, kills it."""
        if self._dead:
            raise AgentCrashError(f"agent {self._declaration.name} is not running any more")
        text = text.encode("utf-8", "replace").decode()
        self._context.record(events.user_message(text))
        self._stopping = False
        self._questions.accept()
        self._transport.last_frame = time.monotonic()
        self._reply = asyncio.create_task(
            self._conn.prompt(session_id=self.session_id, prompt=[acp.text_block(text)])
        )
        try:
            await self._watch(self._reply)
            reason = await self._outcome(self._reply)
        except AgentError as error:
            self._context.record(events.error(error.message, category=error.category, detail=error.detail))
            raise
        except asyncio.CancelledError:
            await self.cancel()
            self._context.record(events.turn_end(StopReason.CANCELLED))
            raise
        finally:
            self._reply = None
        self._context.record(events.turn_end(reason))
        return reason

    def on_ask_user(self, handler: AskUserHandler) -> None:
        self._questions.handler = handler

    async def fork_state(self) -> SessionState | None:
        """What ``connect(resume=…)`` needs beside the files named in the declaration; None for
        an agent that cannot load a session."""
        if not self._can_load or self._dead:
            return None
        paths = list(self._declaration.state_paths)
        return SessionState("resume", {"session_id": self.session_id, "paths": paths})

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        await self.cancel()
        self._process.stdin.close()
        await self._exit_code()
        await self._kill()

    async def _watch(self, reply: asyncio.Task[Any]) -> None:
        """Return when the turn is over; raise when a handler failed or the agent fell silent."""
        idle = self._context.idle_timeout
        while not reply.done():
            left = None
            if idle and not self._questions.asking:
                last = max(self._transport.last_frame, self._questions.answered_at)
                left = last + idle - time.monotonic()
                if left <= 0:
                    await self.cancel()
                    raise AgentIdleTimeoutError(f"the agent sent nothing for {idle:g} s", detail=self._tail())
            # While a question is open the user is the one who is silent: look again soon.
            await asyncio.wait({reply}, timeout=idle if left is None else left)

    async def _outcome(self, reply: asyncio.Task[schema.PromptResponse]) -> StopReason:
        if self._questions.failure is not None:
            failure, self._questions.failure = self._questions.failure, None
            raise failure
        if self._stopping and (reply.cancelled() or reply.exception() is not None):
            return StopReason.CANCELLED
        try:
            response = reply.result()
        except acp.RequestError as error:
            raise AgentProtocolError(
                f"the agent answered the prompt with an error: {error} (code {error.code})",
                detail=str(error.data) if error.data else self._tail(),
            ) from error
        except ValidationError as error:
            raise AgentProtocolError(
                "the agent's reply to the prompt cannot be read", detail=str(error)
            ) from error
        except ConnectionError as error:
            raise await self._why_gone("during the turn") from error
        told = response.usage.model_dump(by_alias=True, exclude_none=True) if response.usage else {}
        if told or self._log.usage.source != "none":
            self._log.usage = add_usage(self._log.usage, told, source="agent")
        await self._drain_late_frames()
        return StopReason(response.stop_reason)

    async def _drain_late_frames(self) -> None:
        deadline = time.monotonic() + DRAIN_MAX
        while time.monotonic() < deadline:
            seen = self._transport.frames
            await asyncio.sleep(DRAIN_QUIET)
            if self._transport.frames == seen:
                return

    async def cancel(self) -> None:
        """Bring the running turn to its end: ask, answer open questions ``cancelled``, wait for
        the grace, then kill."""
        reply = self._reply
        if reply is None or reply.done():
            return
        self._stopping = True
        with contextlib.suppress(TimeoutError, ConnectionError):
            async with asyncio.timeout(self._context.cancel_grace):
                # In this order: an agent that waits for an answer reads the cancel first.
                await self._conn.cancel(session_id=self.session_id)
                self._questions.cancel_all()
                await asyncio.wait({reply})
        self._questions.cancel_all()
        if not reply.done():
            await self._kill()
            reply.cancel()
            await asyncio.wait({reply}, timeout=EXIT_WAIT)

    def _handler_failed(self) -> None:
        self._stopper = asyncio.create_task(self.cancel())

    # ── frames ───────────────────────────────────────────────────────────────────────────

    def _on_frame(self, frame: Frame) -> bool:
        """Record one incoming frame. Requests and replies go on to the SDK; notifications end
        here, since nobody needs them but the record."""
        method, params = frame.get("method"), frame.get("params")
        if method == "session/update":
            if is_update(frame) and self._recording:
                self._context.record(self._log.update(frame["params"]["update"]))
            return False
        if method == "session/request_permission" and isinstance(params, dict):
            self._context.record(self._log.permission(params))
        elif method is None and isinstance(frame.get("result"), dict):
            self._context.record({"direction": "from_agent", "kind": "reply", "update": frame["result"]})
        return "id" in frame

    # ── the process ──────────────────────────────────────────────────────────────────────

    async def _why_gone(self, when: str) -> AgentError:
        """The stream ended: find out why, and leave nothing of the agent running."""
        if self._transport.failure is not None:
            await self._kill()
            return self._transport.failure
        code = await self._exit_code()
        await self._kill()
        if code is None:
            what = f"closed its stdout {when} and did not exit"
        else:
            what = f"was killed by signal {-code} {when}" if code < 0 else f"exited with code {code} {when}"
        return AgentCrashError(
            f"agent {self._declaration.name} {what}",
            fix="see agent/stderr.txt of the rollout",
            detail=self._tail(),
        )

    async def _exit_code(self) -> int | None:
        try:
            return await asyncio.wait_for(self._process.wait(), EXIT_WAIT)
        except TimeoutError:
            return None

    async def _kill(self) -> None:
        """Kill the process tree and finish the logs. Idempotent and bounded."""
        if self._dead:
            return
        self._dead = True
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(KILL_WAIT):
                    await self._process.kill()
            await self._exit_code()
        finally:  # also when the sandbox itself is gone
            await self._conn.close()
            rest = asyncio.create_task(self._discard_stdout())
            await asyncio.wait({self._stderr_pump, rest}, timeout=EXIT_WAIT)
            self._stderr_pump.cancel()
            rest.cancel()
            self._stdout.close()
            self._stderr.close()

    async def _drain_stderr(self) -> None:
        while chunk := await self._process.stderr.read(65536):
            self._stderr.write(chunk)

    async def _discard_stdout(self) -> None:
        # A pipe that nobody reads to its end is never closed.
        while await self._process.stdout.read(1 << 20):
            pass

    def _tail(self) -> str | None:
        return self._stderr.tail() or None
