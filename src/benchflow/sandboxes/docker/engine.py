"""The connection to a Docker engine: found, checked once, and every fault told in one line.

``DOCKER_HOST`` (unix, tcp, ssh), ``DOCKER_TLS_VERIFY`` with ``DOCKER_CERT_PATH``, and
docker's contexts are honoured. No ``docker`` process is started.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import stat
from collections.abc import AsyncIterable, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from aiodocker import Docker, DockerError
from aiodocker.stream import Stream
from yarl import URL

from benchflow.contracts.errors import PrerequisiteError, SandboxError, SandboxLostError
from benchflow.sandboxes.docker.ssh import SshTunnel

DEFAULT_HOST = "unix:///var/run/docker.sock"
OLDEST_API, NEWEST_API = (1, 40), (1, 48)
"""What is spoken: 1.40 came with Docker 19.03."""
_ANSWER_SEC = 20.0
_SCHEMES = ("unix", "tcp", "http", "https", "ssh")


class EngineError(SandboxError):
    """The engine refused a request. ``status`` is its HTTP status."""

    def __init__(self, message: str, *, status: int = 500, fix: str | None = None) -> None:
        super().__init__(message, fix=fix)
        self.status = status


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What the engine said of itself. ``machine`` is its architecture in Go's words (amd64)."""

    version: str
    api: str
    system: str
    machine: str


class Engine:
    """One engine, for use in one event loop. Call ``connect`` before anything else."""

    def __init__(self, host: str | None = None) -> None:
        self.host = host or os.environ.get("DOCKER_HOST") or _context_host() or DEFAULT_HOST
        self.docker: Docker | None = None
        self._info: EngineInfo | None = None
        self._tunnel: SshTunnel | None = None
        self._connecting = asyncio.Lock()

    @property
    def info(self) -> EngineInfo:
        if self._info is None:
            raise SandboxError("the docker engine has not been asked yet: call connect() first")
        return self._info

    async def connect(self) -> EngineInfo:
        """Reach the engine and agree on a version of its interface. Once it has answered, later
        calls cost nothing. Raises ``PrerequisiteError``."""
        async with self._connecting:
            if self._info is None:
                try:
                    self.docker = await self._client()
                    self._info = await self._hello()
                except BaseException:
                    await self._close()
                    raise
        return self._info

    async def _client(self) -> Docker:
        scheme, _, rest = self.host.partition("://")
        if scheme not in _SCHEMES or not rest:
            raise PrerequisiteError(
                f"DOCKER_HOST={self.host!r} is no address of a docker engine",
                fix="give unix:///PATH, tcp://HOST:PORT or ssh://USER@HOST, or unset DOCKER_HOST",
            )
        url = self.host
        if scheme == "ssh":
            self._tunnel = await SshTunnel.open(self.host)
            url = f"unix://{self._tunnel.path}"
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_ANSWER_SEC)
        try:
            return Docker(url, timeout=timeout)
        except (OSError, ValueError) as error:  # certificates
            raise PrerequisiteError(
                f"cannot use the certificates for the docker engine at {self.host}: {error}",
                fix="check DOCKER_CERT_PATH (ca.pem, cert.pem, key.pem), or unset DOCKER_TLS_VERIFY",
            ) from error

    async def _hello(self) -> EngineInfo:
        assert self.docker is not None
        try:
            async with (
                asyncio.timeout(_ANSWER_SEC),
                self.docker.session.get(f"{self.docker.docker_host}/version") as response,
            ):
                text = await response.text()
                said = json.loads(text) if response.status == 200 else {}
        except (OSError, TimeoutError, ValueError, aiohttp.ClientError) as error:
            raise self._unreachable(error) from error
        if not isinstance(said, dict) or "ApiVersion" not in said:
            raise PrerequisiteError(
                f"what answers at {self.host} is no docker engine: {text.strip()[:200]}",
                fix="check DOCKER_HOST",
            )
        newest, oldest = _version(said["ApiVersion"]), _version(said.get("MinAPIVersion") or "1.0")
        if newest < OLDEST_API:
            raise PrerequisiteError(
                f"the docker engine at {self.host} is too old: {said.get('Version')} speaks API "
                f"{said['ApiVersion']}, {_dotted(OLDEST_API)} is needed",
                fix="install Docker 19.03 or newer",
            )
        api = max(min(newest, NEWEST_API), oldest)
        self.docker.api_version = f"v{_dotted(api)}"
        return EngineInfo(
            str(said.get("Version", "unknown")),
            _dotted(api),
            str(said.get("Os", "linux")),
            str(said.get("Arch", "unknown")),
        )

    def _unreachable(self, error: Exception) -> PrerequisiteError:
        """The one line for whatever kept the engine from answering."""
        scheme, _, rest = self.host.partition("://")
        if self._tunnel is not None:
            return PrerequisiteError(
                f"no docker engine behind {self.host}: {self._tunnel.said or error or 'no answer'}",
                fix=f"check that `ssh {self._tunnel.target} docker version` works without a password",
            )
        if isinstance(error, TimeoutError):
            return PrerequisiteError(
                f"the docker engine at {self.host} does not answer",
                fix="restart it (systemctl restart docker)",
            )
        if scheme == "unix":
            path = Path(rest)
            cause = error
            if getattr(cause, "errno", None) in (errno.EACCES, errno.EPERM) or not _visible(path):
                return PrerequisiteError(
                    f"no permission on the docker socket {path}",
                    fix="add yourself to its group (sudo usermod -aG docker $USER) and log in again",
                )
            state = "nothing answers at" if path.exists() else "there is no"
            return PrerequisiteError(
                f"no docker engine: {state} {path}",
                fix="start it (systemctl start docker), set DOCKER_HOST, or use --sandbox local",
            )
        return PrerequisiteError(
            f"no docker engine at {self.host}: {_cause(error)}",
            fix="check DOCKER_HOST (and DOCKER_TLS_VERIFY, DOCKER_CERT_PATH)",
        )

    # -- requests ----------------------------------------------------------------------

    async def json(
        self,
        method: str,
        path: str,
        *,
        params: Mapping[str, Any] | None = None,
        body: Any = None,
    ) -> Any:
        """One request and its JSON answer (None when it has none). Parameters may be numbers,
        booleans and, for filters, mappings. Raises ``EngineError`` when it is refused and
        ``SandboxLostError`` when the engine went away."""
        data = None if body is None else json.dumps(body).encode()
        async with self.open(method, path, params=params, data=data) as response:
            try:
                text = await response.read()
            except (aiohttp.ClientError, OSError) as error:
                raise self.lost(error) from error
        return json.loads(text) if text.strip() else None

    @asynccontextmanager
    async def open(
        self,
        method: str,
        path: str,
        *,
        params: Mapping[str, Any] | None = None,
        data: bytes | AsyncIterable[bytes] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """A request whose body or answer is a stream (build, archive, events)."""
        await self.connect()
        assert self.docker is not None
        sent = {"Content-Type": "application/json", **(headers or {})}
        try:
            response = await self.docker.session.request(
                method, self._url(path, params), data=data, headers=sent
            )
        except (aiohttp.ClientError, OSError) as error:
            raise self.lost(error) from error
        async with response:
            if response.status >= 400:
                raise _refusal(response.status, await response.text())
            yield response

    async def hijack(self, path: str, params: Mapping[str, Any] | None = None, body: Any = None) -> Stream:
        """POST and take over the connection: ``read_out()`` gives (1 or 2, bytes) of stdout and
        stderr, None at the end; ``write_in()`` writes; ``close()`` when done."""
        await self.connect()
        assert self.docker is not None
        url = self._url(path, params, relative=True)
        data = None if body is None else json.dumps(body).encode()

        async def setup() -> tuple[URL, bytes | None, bool]:
            return url, data, False

        stream = Stream(self.docker, setup)
        try:
            await stream._init()  # connects now, so that what follows cannot be missed
        except DockerError as error:
            if error.status == 900:
                raise self.lost(error) from error
            raise _refusal(error.status, error.message) from error
        except (aiohttp.ClientError, OSError) as error:
            raise self.lost(error) from error
        return stream

    def _url(self, path: str, params: Mapping[str, Any] | None, *, relative: bool = False) -> URL:
        assert self.docker is not None
        top = "" if relative else f"{self.docker.docker_host}/{self.docker.api_version}/"
        query = {name: _parameter(value) for name, value in (params or {}).items() if value is not None}
        return URL(f"{top}{path}").with_query(query)

    def lost(self, error: BaseException | str) -> SandboxLostError:
        """The engine stopped answering in the middle of a run."""
        return SandboxLostError(f"the docker engine at {self.host} went away: {_cause(error)}")

    async def close(self) -> None:
        async with self._connecting:
            await self._close()

    async def _close(self) -> None:
        docker, tunnel = self.docker, self._tunnel
        self.docker = self._info = self._tunnel = None
        if docker is not None:
            await docker.close()
        if tunnel is not None:
            await tunnel.close()


def _refusal(status: int, text: str) -> EngineError:
    try:
        text = json.loads(text)["message"]
    except (ValueError, KeyError, TypeError):
        pass
    return EngineError(f"docker: {text.strip() or f'status {status}'}", status=status)


def _parameter(value: Any) -> str:
    if isinstance(value, bool):
        return "1" if value else "0"
    return json.dumps(value) if isinstance(value, (dict, list)) else str(value)


def _version(text: str) -> tuple[int, int]:
    major, _, minor = text.partition(".")
    return (int(major), int(minor)) if major.isdigit() and minor.isdigit() else (0, 0)


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"


def _visible(path: Path) -> bool:
    """False when the socket may exist, but this user may not look or connect."""
    try:
        return not stat.S_ISSOCK(path.stat().st_mode) or os.access(path, os.R_OK | os.W_OK)
    except PermissionError:
        return False
    except OSError:
        return True


def _cause(error: BaseException | str) -> str:
    return str(error) or type(error).__name__


def _context_host() -> str | None:
    """The address in docker's current context, as far as it needs no certificates of its own."""
    place = Path(os.environ.get("DOCKER_CONFIG") or os.path.expanduser("~/.docker"))
    try:
        name = os.environ.get("DOCKER_CONTEXT") or json.loads((place / "config.json").read_bytes()).get(
            "currentContext"
        )
        for path in (place / "contexts" / "meta").glob("*/meta.json"):
            meta = json.loads(path.read_bytes())
            if name and meta["Name"] == name:
                return meta["Endpoints"]["docker"]["Host"] or None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        pass
    return None
