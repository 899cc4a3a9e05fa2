"""The agent that runs the task's own reference solution, as root."""

from __future__ import annotations

import shlex
from pathlib import Path

from benchflow.agents import events
from benchflow.agents.declaration import DeclaredAgent
from benchflow.agents.nop import NopSession
from benchflow.contracts.agent import SessionContext, SessionState, StopReason
from benchflow.contracts.errors import TaskError
from benchflow.contracts.sandbox import ExecResult, Sandbox
from benchflow.kernel import storage

OUTPUT_TAIL = 64 * 1024
"""Bytes of the solution's output that its record repeats."""
STDERR_TAIL = 2000
"""Characters of a failed solution's stderr kept in the event."""


class OracleAgent(DeclaredAgent):
    """Uploads the reference solution, runs it and takes it away again."""

    async def connect(
        self, sandbox: Sandbox, context: SessionContext, *, resume: SessionState | None = None
    ) -> OracleSession:
        if context.oracle is None:
            raise TaskError(
                "the task has no reference solution", fix="add oracle/solve.sh, or run another agent"
            )
        return OracleSession(sandbox, context, context.oracle)


class OracleSession(NopSession):
    """Each prompt runs the solution once. A solution that fails ends the turn like any other:
    the verifier decides, and the exit code and stderr are in the record and in ``agent/``."""

    session_id = "oracle"

    def __init__(self, sandbox: Sandbox, context: SessionContext, solution: Path) -> None:
        super().__init__(context)
        self._sandbox = sandbox
        self._solution = solution

    async def prompt(self, text: str) -> StopReason:
        context = self._context
        context.record(events.user_message(text))
        self.n_tool_calls += 1
        call = events.tool_call(
            f"oracle-{self.n_tool_calls}",
            title=context.oracle_command,
            input={"command": context.oracle_command},
        )
        context.record(call)
        result = await self._run()
        self._keep(result)
        context.record(
            events.tool_result(
                call,
                output=_told(context.redact(result.stdout), result.stdout_bytes),
                exit_code=result.exit_code,
                status="completed" if result.ok else "failed",
            )
        )
        if not result.ok:
            context.record(_failure(context.oracle_command, result))
        context.record(events.turn_end(StopReason.END_TURN))
        return StopReason.END_TURN

    async def _run(self) -> ExecResult:
        context, sandbox = self._context, self._sandbox
        target = context.oracle_target
        await sandbox.upload(self._solution, target, owner="root")
        removal = f"rm -rf -- {shlex.quote(target)}"
        removed = False
        try:
            result = await sandbox.exec(
                f"trap {shlex.quote(removal)} EXIT\n{_inside(context.oracle_command, target)}",
                cwd=context.workspace,
                env=dict(context.env) | dict(context.oracle_env),
            )
            removed = result.exit_code >= 0
            return result
        finally:
            if not removed:  # the shell itself was killed, and its trap with it
                await sandbox.exec(removal)

    def _keep(self, result: ExecResult) -> None:
        context = self._context
        for name, data, size in (
            ("stdout.txt", result.stdout, result.stdout_bytes),
            ("stderr.txt", result.stderr, result.stderr_bytes),
        ):
            note = b"" if len(data) == size else b"\n[... %d of %d bytes kept ...]\n" % (len(data), size)
            storage.write_bytes(context.logs / name, context.redact(data) + note, sync=False)


def _inside(command: str, target: str) -> str:
    """The command line to run in the workspace. A first word ``./solve.sh`` is relative to the
    solution. Packages often lose the executable bit on their way, so it is set."""
    word, _, rest = command.partition(" ")
    if word.startswith("./"):
        word = f"{target.rstrip('/')}/{word[2:]}"
    if not word.startswith(f"{target.rstrip('/')}/"):
        return command
    script = shlex.quote(word)
    return f"[ -x {script} ] || chmod +x {script}; {script} {rest}".rstrip()


def _told(data: bytes, size: int) -> str:
    """The end of a masked output, for the record; more is in ``agent/``. Says what was cut."""
    text = data[-OUTPUT_TAIL:].decode("utf-8", "replace")
    return text if size <= OUTPUT_TAIL else f"[… the end of {size} bytes …]\n{text}"


def _failure(command: str, result: ExecResult) -> events.Event:
    how = "timed out" if result.timed_out else f"exited with code {result.exit_code}"
    return events.error(
        f"the reference solution {command} {how}",
        exit_code=result.exit_code,
        stderr=result.err[-STDERR_TAIL:],
    )
