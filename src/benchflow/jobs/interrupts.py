"""Ctrl-C and SIGTERM: once stops in good order, twice says what is left, three times leaves."""

from __future__ import annotations

import asyncio
import atexit
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

EXIT_CODES = {signal.SIGINT: 130, signal.SIGTERM: 143}


class Interrupts:
    """Counts signals for one asyncio task. ``received`` is the first one, or None."""

    def __init__(
        self, *, leftovers: Callable[[], list[str]], say: Callable[[str], None] | None = None
    ) -> None:
        self.received: signal.Signals | None = None
        self._count = 0
        self._leftovers = leftovers
        self._say = say or _to_stderr
        self._task: asyncio.Task[object] | None = None

    @property
    def exit_code(self) -> int | None:
        return EXIT_CODES[self.received] if self.received else None

    @contextmanager
    def watching(self) -> Iterator[None]:
        """While inside, the first signal cancels the current task. Afterwards, when there was
        one, nothing is left to remove: another ends the process, with the first one's code."""
        loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        for number in EXIT_CODES:
            loop.add_signal_handler(number, self.on_signal, number)
        try:
            yield
        finally:
            for number in EXIT_CODES:
                loop.remove_signal_handler(number)
                if self.received is not None:
                    signal.signal(number, self._leave)
                    # The interpreter's own end would give the signal its default back.
                    atexit.register(signal.signal, number, signal.SIG_IGN)

    def on_signal(self, number: signal.Signals) -> None:
        self._count += 1
        if self._count == 1:
            self.received = number
            self._say("stopping: no new rollouts; tearing down what runs (again: see what is left)")
            if self._task is not None:
                self._task.cancel()
        elif self._count == 2:
            self._say(f"still being removed: {_listed(self._leftovers())} (again: leave at once)")
        else:
            self._say(f"left behind: {_listed(self._leftovers())}; `bench sandbox cleanup` removes them")
            self._leave(number, None)

    def _leave(self, number: int, frame: object) -> None:
        os._exit(EXIT_CODES[self.received or signal.Signals(number)])


def _listed(names: list[str]) -> str:
    return ", ".join(names) if names else "nothing"


def _to_stderr(text: str) -> None:
    try:
        sys.stderr.write(text + "\n")
        sys.stderr.flush()
    except OSError:
        pass  # the terminal is gone; the signal still counts
