"""The one tool of ``mini``: a shell command in the sandbox."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from benchflow.contracts.agent import SessionContext
from benchflow.contracts.sandbox import ExecResult, Sandbox

# The command arrives on standard input: no length limit, and a `pkill -f` in it cannot
# match the shell that runs it. The command itself reads from /dev/null.
_RUNNER = (
    "exec 2>&1; if command -v bash >/dev/null 2>&1; then s=bash; else s=sh; fi; "
    "exec $s -c 'BENCH_CMD=$(cat); exec </dev/null; eval \"$BENCH_CMD\"'"
)

SCHEMA: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": (
            "Run a shell command in the workspace and return its output and exit code. Every call is a "
            "fresh shell: directory and variables are not kept. There is no terminal and no input. Start "
            "a background process with its output redirected, as in `server >log 2>&1 &`."
        ),
        "parameters": {
            "type": "object",
            "properties": {
                "command": {"type": "string", "description": "The command line"},
                "timeout": {"type": "number", "description": "Seconds before it is killed"},
            },
            "required": ["command"],
        },
    },
}


class BadArguments(ValueError):
    """The model's arguments cannot be used; the message is meant for the model."""


@dataclass(frozen=True, slots=True)
class Command:
    line: str
    timeout: float

    @classmethod
    def parse(cls, arguments: object, longest: float) -> Command:
        """Read a tool call's arguments: a JSON text, or already an object. Raises ``BadArguments``."""
        if isinstance(arguments, str):
            try:
                arguments = orjson.loads(arguments)
            except orjson.JSONDecodeError as error:
                raise BadArguments(f"the arguments are not valid JSON: {error}") from error
        if not isinstance(arguments, Mapping):
            raise BadArguments('the arguments must be an object such as {"command": "ls"}')
        line, timeout = arguments.get("command"), arguments.get("timeout", longest)
        if not isinstance(line, str) or not line.strip():
            raise BadArguments('"command" must be a non-empty string')
        if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not timeout > 0:
            timeout = longest
        return cls(line, min(float(timeout), longest))


async def run(sandbox: Sandbox, context: SessionContext, command: Command) -> ExecResult:
    """Run it as the agent's user in the workspace; stdout and stderr come back as one stream."""
    return await sandbox.exec(
        _RUNNER,
        user=context.user,
        cwd=context.workspace,
        env=context.env,
        stdin=command.line.encode("utf-8", "surrogatepass"),
        timeout=command.timeout,
    )


def describe(result: ExecResult, command: Command, limit: int) -> str:
    """What the model reads: the clipped output, then how the command ended."""
    output = clip(result.out, limit, result.stdout_bytes)
    if result.timed_out:
        ending = f"[killed after {command.timeout:g} s; nothing of it is still running]"
    elif result.exit_code < 0:
        ending = f"[killed by signal {-result.exit_code}]"
    else:
        ending = f"[exit code {result.exit_code}]"
    return f"{output}\n{ending}" if output else ending


def clip(text: str, limit: int, original: int) -> str:
    """Head and tail of ``text`` in about ``limit`` characters; ``original`` is its size in bytes."""
    text = text.rstrip("\n")
    if len(text) <= limit:
        return text
    head, tail = text[: limit // 2], text[-(limit // 2) :]
    return f"{head}\n[… {original} bytes in all; the middle is left out …]\n{tail}"
