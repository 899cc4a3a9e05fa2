"""Newline-delimited JSON-RPC frames over the pipes of an agent's process.

The SDK asks its transport for messages one at a time; this one hands each frame to the
session first, in the order of arrival, so that the record is ordered before the SDK's own
tasks interleave. What is not a frame (banners, colour codes, half a JSON) is logged and
skipped, up to a bound; so is every frame but the updates, which are events of the record.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import orjson

from benchflow.agents.logs import RawLog
from benchflow.contracts.errors import AgentProtocolError
from benchflow.contracts.sandbox import Process

MAX_LINE = 32 * 1024 * 1024
"""Bytes of one frame; a longer line is a protocol error."""
MAX_NOISE_LINES = 10_000
MAX_NOISE_BYTES = 16 * 1024 * 1024
"""What an agent may print on stdout that is not a frame; more is a protocol error."""
_CHUNK = 256 * 1024

Frame = dict[str, Any]


class FrameTransport:
    """The SDK's ``Transport``. ``on_frame(frame)`` sees every incoming frame and returns
    whether the SDK shall see it too."""

    def __init__(self, process: Process, log: RawLog, on_frame: Callable[[Frame], bool]) -> None:
        self._process = process
        self._log = log
        self._on_frame = on_frame
        self._buffer = bytearray()
        self._scanned = 0
        self._ended = False
        self._noise_lines = 0
        self._noise_bytes = 0
        self.frames = 0
        self.last_frame = time.monotonic()
        self.failure: AgentProtocolError | None = None
        """Why the stream was given up, when it was not the agent that ended it."""

    async def send(self, message: Frame) -> None:
        try:
            self._process.stdin.write(orjson.dumps(message) + b"\n")
            await self._process.stdin.drain()
        except (ConnectionError, RuntimeError):
            # An answer to an agent that has gone has no reader; a request has a caller to tell.
            if "method" in message:
                raise ConnectionError("the agent's stdin is closed") from None

    async def receive(self) -> Frame | None:
        """The next frame for the SDK, or None at the end of the stream."""
        while self.failure is None:
            line = await self._line()
            if line is None:
                return None
            frame = parse(line)
            if frame is None or not (is_update(frame) and _is_text(line)):
                self._log.write(line)  # an update is recorded whole, as an event
            if frame is None:
                self._count_noise(line)
                continue
            self.frames += 1
            self.last_frame = time.monotonic()
            try:
                wanted = self._on_frame(frame)
            except TypeError as error:  # what orjson raises for JSON nested too deeply to write down
                self._fail(f"a frame cannot be recorded: {error}")
                continue
            if wanted:
                return frame
        return None

    async def close(self) -> None:
        self._process.stdin.close()

    async def _line(self) -> bytes | None:
        """The next line without its end; the last one may lack a newline. None at the end."""
        while True:
            at = self._buffer.find(b"\n", self._scanned)
            if at >= 0:
                return self._cut(at + 1)
            self._scanned = len(self._buffer)
            if self._scanned > MAX_LINE:
                self._log.write(self._cut(self._scanned))
                self._fail(f"a line on stdout is longer than {MAX_LINE >> 20} MiB")
                return None
            if self._ended:
                return self._cut(self._scanned) if self._buffer else None
            chunk = await self._process.stdout.read(_CHUNK)
            self._ended = not chunk
            self._buffer += chunk

    def _cut(self, end: int) -> bytes:
        line = bytes(self._buffer[:end])
        del self._buffer[:end]
        self._scanned = 0
        return line

    def _count_noise(self, line: bytes) -> None:
        if not line.strip():
            return
        self._noise_lines += 1
        self._noise_bytes += len(line)
        if self._noise_lines > MAX_NOISE_LINES or self._noise_bytes > MAX_NOISE_BYTES:
            self._fail(
                f"too much on stdout that is no frame: {self._noise_lines} lines, {self._noise_bytes} bytes",
                detail=line[:2000].decode("utf-8", "replace"),
            )

    def _fail(self, what: str, detail: str | None = None) -> None:
        self.failure = AgentProtocolError(what, fix="see agent/stdout.txt of the rollout", detail=detail)


def is_update(frame: Frame) -> bool:
    params = frame.get("params")
    return (
        frame.get("method") == "session/update"
        and isinstance(params, dict)
        and isinstance(params.get("update"), dict)
    )


def _is_text(line: bytes) -> bool:
    try:
        line.decode()
    except UnicodeDecodeError:
        return False
    return True


def parse(line: bytes) -> Frame | None:
    """The JSON-RPC frame in ``line``, or None when there is none that could be acted on.

    Bytes that are not UTF-8 are replaced; something printed before the frame on the same
    line is dropped.
    """
    start = line.find(b"{")
    if start < 0:
        return None
    value = _load(line[start:])
    if value is None and (marker := line.find(b'{"jsonrpc"', start + 1)) > 0:
        value = _load(line[marker:])
    return value if isinstance(value, dict) and _is_frame(value) else None


def _load(data: bytes) -> Any:
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError:
        pass
    try:
        value = json.loads(data.decode("utf-8", "replace"), strict=False, parse_int=_int64)
    except (ValueError, RecursionError):
        return None
    return _whole(value)


def _int64(digits: str) -> int | float:
    number = int(digits) if len(digits) < 20 else float(digits)
    return number if -(1 << 63) <= number < 1 << 63 else float(digits)


def _whole(value: Any) -> Any:
    """Replace lone surrogates, which JSON can spell but no file can hold."""
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, list):
        return [_whole(item) for item in value]
    if isinstance(value, dict):
        return {_whole(key): _whole(item) for key, item in value.items()}
    return value


def _is_frame(value: Frame) -> bool:
    if not isinstance(value.get("id", 0), (int, str, type(None))):
        return False
    if "method" in value:
        return isinstance(value["method"], str) and isinstance(value.get("params"), (dict, list, type(None)))
    if isinstance(value.get("error", {}), dict):
        return "id" in value and ("result" in value or "error" in value)
    return False
