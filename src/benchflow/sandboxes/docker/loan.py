"""Host settings for a build, on an engine that shares no files with us.

A small image holds what ``lent`` collects. BuildKit mounts it while a RUN runs, and it is removed
afterwards: none of it enters a layer. Addresses with a password are left out, as an engine
keeps what it was given in its cache.
"""

from __future__ import annotations

import asyncio
import io
import os
import re
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from benchflow.contracts.errors import ImageBuildError
from benchflow.sandboxes.buildlog import BuildLog
from benchflow.sandboxes.docker.build import build
from benchflow.sandboxes.docker.engine import Engine, EngineError
from benchflow.sandboxes.docker.recipe import LABEL, SENT_AS, whole
from benchflow.sandboxes.lent import PASSWORD, lend
from benchflow.sandboxes.tarstream import END, entries

LOAN = "benchflow.loan"
"""Label of everything that holds lent files."""
_UNREACHED = re.compile(
    r"certificate|SSL|TLS|resolv|onnection|timed out|No matching distribution|Unable to locate package"
    r"|[Ff]ailed to fetch|ENOTFOUND|Network is unreachable",
)
_MARKS = {LABEL: "1", LOAN: "1"}


@dataclass(frozen=True, slots=True)
class Loan:
    """An image to mount at ``lent.TARGET``, and the variables that point into it."""

    image: str
    env: Mapping[str, str]


def may_help(error: ImageBuildError) -> bool:
    """True when a build looks as if it failed for want of the host's certificates or indexes."""
    return bool(error.detail) and _UNREACHED.search(error.detail or "") is not None


@asynccontextmanager
async def lend_to(engine: Engine, base: str, log: BuildLog) -> AsyncIterator[Loan]:
    """Have the settings on the engine for one build that starts from ``base``."""
    release = await _os_release(engine, base)
    tag = f"benchflow/loan:{os.urandom(8).hex()}"
    with tempfile.TemporaryDirectory(prefix="benchflow-lent-") as scratch:
        lent = await asyncio.to_thread(lend, Path(scratch), release)

        def stream() -> Iterator[bytes]:
            yield from whole(SENT_AS, b"FROM scratch\nCOPY lent /\n")
            for path in sorted(Path(scratch).rglob("*")):
                if path.is_file():
                    lines = path.read_text("utf-8", "surrogateescape").splitlines(keepends=True)
                    text = "".join(line for line in lines if not PASSWORD.search(line))
                    name = f"lent/{path.relative_to(scratch)}"
                    yield from whole(name, text.encode("utf-8", "surrogateescape"))
            yield END

        try:
            await build(engine, tag=tag, stream=stream(), steps=(), buildkit=False, labels=_MARKS, log=log)
            env = {name: value for name, value in lent.env.items() if not PASSWORD.search(value)}
            yield Loan(tag, env)
        finally:
            await engine.remove(f"images/{tag}")


async def _os_release(engine: Engine, base: str) -> str | None:
    body = {"Image": base, "Cmd": ["none"], "Entrypoint": [], "Labels": _MARKS, "NetworkDisabled": True}
    try:
        made = await engine.json("POST", "containers/create", body=body)
    except EngineError:  # built on nothing
        return None
    try:
        path = f"containers/{made['Id']}/archive"
        async with engine.open("GET", path, params={"path": "/usr/lib/os-release"}) as response:
            found = next(entries(io.BytesIO(await response.read())))
            return found.read(1 << 16).decode("utf-8", "replace")
    except EngineError as error:
        if error.status != 404:
            raise
        return None
    finally:
        await engine.remove(f"containers/{made['Id']}")
