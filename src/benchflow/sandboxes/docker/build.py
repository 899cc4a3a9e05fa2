"""One build on the engine: send the context, follow the output, tell a failure in one line."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import re
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any

import aiohttp

from benchflow.contracts.errors import BenchflowError, HostPressureError, ImageBuildError, SandboxLostError
from benchflow.sandboxes.buildlog import BuildLog, where
from benchflow.sandboxes.docker.engine import Engine, EngineError
from benchflow.sandboxes.docker.recipe import SENT_AS
from benchflow.sandboxes.docker.registry import registry_config
from benchflow.sandboxes.dockerfile import Instruction

_PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "FTP_PROXY", "ALL_PROXY", "NO_PROXY")
_STEP = re.compile(r"Step (\d+)/\d+ : ")
_CHATTER = re.compile(r"\n| ---> .*\n|Removing intermediate container .*\n")
"""What the engine says between the commands' own output."""
_EXIT = re.compile(r"returned a non-zero code: (\d+)|exit code: (\d+)")
_LONGEST_MESSAGE = 1 << 24
_BATCH = 1 << 20
DISK_FULL = "no space left on device"


async def build(
    engine: Engine,
    *,
    tag: str,
    stream: Iterator[bytes],
    steps: Sequence[Instruction | None],
    buildkit: bool,
    labels: Mapping[str, str],
    log: BuildLog,
) -> str:
    """Build an image under ``tag`` and return its id. The Dockerfile in ``stream`` is called
    ``SENT_AS``; ``steps`` are the instructions the engine
    will announce. When this is cancelled, so is the build on the engine.

    Raises ``ImageBuildError`` naming the line, ``HostPressureError`` when the engine's disk is
    full, ``SandboxLostError`` when the engine goes away.
    """
    output = _Output(log, steps)
    faults: list[BenchflowError] = []
    params = {
        "t": tag,
        "dockerfile": SENT_AS,
        "rm": True,
        "forcerm": True,
        "version": "2" if buildkit else "1",
        "labels": dict(labels),
        "buildargs": proxies(),
    }
    headers = {"Content-Type": "application/x-tar", **registry_config()}
    try:
        body = batches(stream, faults)
        async with engine.open("POST", "build", params=params, data=body, headers=headers) as response:
            async for message in messages(response, engine):
                output.take(message)
    except EngineError as error:
        raise _refused(error.message.removeprefix("docker: ")) from error
    except SandboxLostError:
        if faults:  # our own stream ended it
            raise faults[0] from None
        raise
    return output.image()


def proxies() -> dict[str, str]:
    """The host's proxies in both spellings, as arguments that no image keeps."""
    found: dict[str, str] = {}
    for name in _PROXIES:
        value = os.environ.get(name) or os.environ.get(name.lower())
        if value:
            found |= {name: value, name.lower(): value}
    return found


async def messages(response: aiohttp.ClientResponse, engine: Engine) -> AsyncIterator[dict[str, Any]]:
    """The JSON objects that the engine streams, one a line."""
    kept = b""
    try:
        async for data in response.content.iter_any():
            *lines, kept = (kept + data).split(b"\n")
            for line in lines:
                if line.strip():
                    yield json.loads(line)
            if len(kept) > _LONGEST_MESSAGE:
                raise engine.lost("an answer without end")
        if kept.strip():
            yield json.loads(kept)
    except (aiohttp.ClientError, OSError, ValueError) as error:
        raise engine.lost(error) from error


async def batches(stream: Iterator[bytes], faults: list[BenchflowError]) -> AsyncIterator[bytes]:
    """``stream`` read off the event loop. What goes wrong in it is kept in ``faults``, as the
    connection only tells that it broke."""

    def batch() -> bytes:
        found = bytearray()
        for data in stream:
            found += data
            if len(found) >= _BATCH:
                break
        return bytes(found)

    try:
        while data := await asyncio.to_thread(batch):
            yield data
    except BenchflowError as error:
        faults.append(error)
        raise OSError(error.message) from error


class _Output:
    """Follows what the engine says of a build."""

    def __init__(self, log: BuildLog, steps: Sequence[Instruction | None]) -> None:
        self._log = log
        self._steps = steps
        self._at: Instruction | None = None
        self._id = ""
        self._error: str | None = None

    def take(self, message: Mapping[str, Any]) -> None:
        aux = message.get("aux")
        if message.get("id") == "moby.buildkit.trace":
            self._trace(base64.b64decode(aux or ""))
        elif isinstance(aux, dict) and "ID" in aux:
            self._id = str(aux["ID"])
        elif "error" in message:
            detail = message.get("errorDetail") or {}
            self._error = str(detail.get("message") or message["error"])
        elif "stream" in message:
            self._said(str(message["stream"]))

    def _said(self, text: str) -> None:
        match = _STEP.match(text)
        if match is None:
            if not _CHATTER.fullmatch(text):
                self._log.write(text.encode())
            return
        index = int(match[1]) - 1
        self._begin(self._steps[index] if index < len(self._steps) else None)

    def _begin(self, instruction: Instruction | None) -> None:
        self._at = instruction
        if instruction is not None:
            self._log.begin(instruction, ())

    def _trace(self, data: bytes) -> None:
        """BuildKit's own form: steps that begin or fail, and their output."""
        for number, value in _fields(data):
            fields: dict[int, Any] = dict(_fields(value)) if isinstance(value, bytes) else {}
            if number == 1 and (7 in fields or (5 in fields and 6 not in fields)):  # failed, or running
                self._vertex(fields)
            elif number == 3:
                self._log.write(fields.get(4, b""))

    def _vertex(self, fields: Mapping[int, Any]) -> None:
        name = " ".join(fields.get(3, b"").decode("utf-8", "replace").split()).partition("] ")[2]
        found = (
            step
            for step in self._steps
            if step and name.startswith(step.keyword) and " ".join(step.value.split()) in name
        )
        instruction = next(found, None)
        if instruction is not None and instruction is not self._at:
            self._begin(instruction)

    def image(self) -> str:
        if self._error is None and self._id:
            return self._id
        error, tail = self._error or "the engine named no image", self._log.tail()
        place = f"{where(self._at)} " if self._at else ""
        fix = f"the whole output is in {self._log.path}" if self._log.used else None
        if DISK_FULL in error.lower() or DISK_FULL in tail[-500:].lower():
            raise HostPressureError(
                f"{place}did not fit on the disk of the docker engine: {DISK_FULL}",
                fix="free space there (docker system df, docker image prune), then run again",
                detail=tail,
            )
        match = _EXIT.search(error)
        if match is not None:
            how = f"exited with {match[1] or match[2]}{self._log.reason()}"
            raise ImageBuildError(f"{place}{how}", fix=fix, detail=tail)
        raise ImageBuildError(f"{place.rstrip()}: {error}" if place else error, fix=fix, detail=tail)


def _refused(message: str) -> ImageBuildError | HostPressureError:
    if DISK_FULL in message.lower():
        return HostPressureError(
            f"the build context did not fit on the disk of the docker engine: {DISK_FULL}",
            fix="free space there (docker system df, docker image prune), then run again",
        )
    return ImageBuildError(f"the docker engine refused the build: {message}")


def _fields(data: bytes) -> Iterator[tuple[int, bytes | int]]:
    """The fields of one protocol-buffers message: (number, bytes or integer)."""
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = data[at]
            at += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while at < len(data):
        key = varint()
        match key & 7:
            case 0:
                yield key >> 3, varint()
            case 2:
                size = varint()
                yield key >> 3, data[at : at + size]
                at += size
            case kind:
                at += 8 if kind == 1 else 4
