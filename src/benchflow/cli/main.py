"""``bench``: dispatch by hand, so that a resource is imported only when it is used.

``bench --help`` and ``bench --version`` import nothing; each resource is a typer app in
``benchflow.cli.<module>``.
"""

from __future__ import annotations

import errno
import io
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

_REFUSALS = ("EACCES", "EPERM", "EROFS", "ENOENT", "ENOTDIR", "EISDIR", "ENAMETOOLONG", "ELOOP", "ENOSPC")
_OF_THE_MACHINE = frozenset(getattr(errno, name) for name in (*_REFUSALS, "EDQUOT", "EMFILE", "ENFILE"))
"""What a file system or its owner refuses is one line; any other ``OSError`` is our own fault."""

STARTED = time.time()
"""When this command began: jobs created later are not earlier jobs to continue."""

RESOURCES: dict[str, tuple[str, str]] = {
    "run": ("run", "Run tasks with an agent and score them."),
    "eval": ("eval", "Create, list, measure and resume evaluations."),
    "train": ("train", "Turn scored rollouts into rows, groups and advantages."),
    "tasks": ("tasks", "Check and pin task packages."),
    "agent": ("agent", "List and describe agents."),
    "model": ("model", "Serve the scripted model."),
    "sandbox": ("sandbox", "Manage images and leftovers of sandboxes."),
    "doctor": ("doctor", "Say what this machine can run, and what to do about the rest."),
}
"""Name on the command line: module under ``benchflow.cli`` and one line of help."""

APART: dict[tuple[str, str], str] = {("eval", verb): "reading" for verb in ("list", "metrics")}
"""Verbs that only read and print, in a module that starts without the rest of their resource."""


def main() -> None:
    """The console script."""
    sys.exit(run(sys.argv[1:]))


def run(argv: Sequence[str]) -> int:
    """Run one command line and return its exit code."""
    if sys.stdout is None or sys.stderr is None:  # closed by the caller: `>&-`
        nowhere = open(os.devnull, "w")  # noqa: SIM115 - in use until the process ends
        sys.stdout, sys.stderr = sys.stdout or nowhere, sys.stderr or nowhere
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a name may hold what this locale cannot show
            stream.reconfigure(errors="replace")
    try:
        code = _dispatch(list(argv))
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # The reader (`| head`) is gone. Python would flush, and complain, once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return 130
    except OSError as error:
        if error.errno is None or error.errno not in _OF_THE_MACHINE:
            raise
        return _refused(error, os.strerror(error.errno))


def _refused(error: OSError, reason: str) -> int:
    from pathlib import Path

    from benchflow.kernel.ownership import state_dir

    if not isinstance(error.filename, (str, bytes)):
        return _fail(reason, "check the disk and the permissions", 1)
    where = os.fsdecode(error.filename)
    if Path(where).is_relative_to(state_dir()):
        return _fail(f"{where}: {reason}", "export BENCHFLOW_HOME=FOLDER, one that can be written", 3)
    return _fail(f"{where}: {reason}", "check the path, its permissions and the disk", 1)


def _dispatch(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print(help_text())
        return 0 if argv else 2
    if argv[0] == "--version":
        from importlib.metadata import version

        print(f"benchflow {version('benchflow')}")
        return 0
    for word in argv:
        if any("\ud800" <= char <= "\udfff" for char in word):
            return _fail(f"{word!r} is not UTF-8", "rename it, or set LANG to a UTF-8 locale", 2)
    name, rest = argv[0], argv[1:]
    if name not in RESOURCES:
        return _fail(f"no such command: {name}", f"one of {', '.join(RESOURCES)}", 2)
    return _call(name, rest)


def _call(name: str, rest: list[str]) -> int:
    """Import the resource and run it. What a user can fix is one line, never a traceback."""
    import importlib

    from benchflow.contracts.errors import BenchflowError

    reading = APART.get((name, rest[0] if rest else ""))
    if reading is not None:
        import gc

        gc.disable()  # a short process that drops nothing until it ends
    app = importlib.import_module(f"benchflow.cli.{reading or RESOURCES[name][0]}").app
    try:
        code = app(args=rest, prog_name=f"bench {name}", standalone_mode=False)
    except BenchflowError as error:
        return _fail(error.message, error.fix, error.exit_code)
    except BrokenPipeError:
        raise
    except Exception as error:
        # typer's own errors (an unknown option, a missing value) are known by their shape:
        # their classes live in a vendored module without a public name.
        if hasattr(error, "format_message") and hasattr(error, "exit_code"):
            return _misused(error, f"bench {name}")
        if type(error).__name__ == "Abort":
            return 130
        raise
    return code if isinstance(code, int) else 0


def _misused(error: Any, command: str) -> int:
    """A command line that typer refuses. One without a verb is answered with the help."""
    if type(error).__name__ == "NoArgsIsHelpError":
        print(error.format_message())
        return 2
    message = error.format_message().rstrip(".")
    context = getattr(error, "ctx", None)
    return _fail(message, f"see `{context.command_path if context else command} --help`", 2)


def _fail(message: str, fix: str | None, code: int) -> int:
    print(f"error: {message}" + (f" ({fix})" if fix else ""), file=sys.stderr)
    return code


def help_text() -> str:
    width = max(len(name) for name in RESOURCES)
    lines = [f"  {name.ljust(width)}  {text}" for name, (_, text) in RESOURCES.items()]
    return "\n".join(
        [
            "Usage: bench [--version] [--help] RESOURCE …",
            "",
            "Scored agent rollouts: sandboxes that start in milliseconds, exact tokens, group advantages.",
            "",
            "Resources (bench RESOURCE --help):",
            *lines,
        ]
    )


if __name__ == "__main__":
    main()
