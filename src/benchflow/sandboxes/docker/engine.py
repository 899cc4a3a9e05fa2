"""The connection to a Docker engine: found, checked once, and every fault told in one line.

``DOCKER_HOST`` (unix, tcp, ssh), ``DOCKER_TLS_VERIFY`` with ``DOCKER_CERT_PATH``, and
docker's contexts are honoured. No ``docker`` process is started.
"""

from __future__ import annotations

import asyncio
import errno
import io
import json
import os
import ssl
import stat
from collections.abc import AsyncIterable, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import aiohttp
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
        self._session: aiohttp.ClientSession | None = None
        self._top = ""
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
                    await self._open_session()
                    self._info = await self._hello()
                except BaseException:
                    await self._close()
                    raise
        return self._info

    async def _open_session(self) -> None:
        scheme, _, rest = self.host.partition("://")
        if scheme not in _SCHEMES or not rest:
            raise PrerequisiteError(
                f"DOCKER_HOST={self.host!r} is no address of a docker engine",
                fix="give unix:///PATH, tcp://HOST:PORT or ssh://USER@HOST, or unset DOCKER_HOST",
            )
        if scheme == "ssh":
            self._tunnel = SshTunnel(self.host)
        if scheme in ("unix", "ssh"):
            path = str(self._tunnel.path) if self._tunnel else rest
            connector = aiohttp.UnixConnector(path, limit=0)  # a live container holds one
            self._top = "http://docker"
        else:
            context = self._certificates() if os.environ.get("DOCKER_TLS_VERIFY") else None
            connector = aiohttp.TCPConnector(ssl=context or True, limit=0)
            self._top = f"{'https' if context or scheme == 'https' else 'http'}://{rest.rstrip('/')}"
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_ANSWER_SEC)
        self._session = aiohttp.ClientSession(connector=connector, timeout=timeout)

    def _certificates(self) -> ssl.SSLContext:
        place = Path(os.environ.get("DOCKER_CERT_PATH") or os.path.expanduser("~/.docker"))
        try:
            context = ssl.create_default_context(cafile=str(place / "ca.pem"))
            context.load_cert_chain(place / "cert.pem", place / "key.pem")
        except OSError as error:
            raise PrerequisiteError(
                f"cannot use the certificates for the docker engine at {self.host}: {error}",
                fix="check DOCKER_CERT_PATH (ca.pem, cert.pem, key.pem), or unset DOCKER_TLS_VERIFY",
            ) from error
        return context

    @property
    def _open_http(self) -> aiohttp.ClientSession:
        assert self._session is not None, "connect() comes first"
        return self._session

    async def _hello(self) -> EngineInfo:
        try:
            async with (
                asyncio.timeout(_ANSWER_SEC),
                self._open_http.get(f"{self._top}/version") as response,
            ):
                text = (await response.read()).decode("utf-8", "replace")
                said = _json(text) if response.status == 200 else None
        except aiohttp.ClientResponseError as error:  # an answer, but not one of HTTP
            text, said = error.message, None
        except (OSError, TimeoutError, aiohttp.ClientError) as error:
            raise self._unreachable(error) from error
        if not isinstance(said, dict) or "ApiVersion" not in said:
            raise PrerequisiteError(
                f"what answers at {self.host} is no docker engine: {' '.join(text.split())[:200]}",
                fix="check DOCKER_HOST",
            )
        newest, oldest = api_version(said["ApiVersion"]), api_version(said.get("MinAPIVersion") or "1.0")
        if newest < OLDEST_API:
            raise PrerequisiteError(
                f"the docker engine at {self.host} is too old: {said.get('Version')} speaks API "
                f"{said['ApiVersion']}, {_dotted(OLDEST_API)} is needed",
                fix="install Docker 19.03 or newer",
            )
        api = max(min(newest, NEWEST_API), oldest)
        self._top += f"/v{_dotted(api)}"
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

    async def back(self, patience: float = 60.0) -> None:
        """Return when the engine answers: at once, or after a restart, for which it waits up to
        ``patience`` seconds. Raises ``SandboxLostError``."""
        deadline = asyncio.get_running_loop().time() + patience
        while True:
            try:
                async with self.open("GET", "_ping"):
                    return
            except (SandboxLostError, EngineError):
                if asyncio.get_running_loop().time() > deadline:
                    raise
            await asyncio.sleep(0.2)

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

    async def find(self, path: str) -> Any:
        """What the engine says of a thing by its path; None when there is no such thing."""
        try:
            return await self.json("GET", path)
        except EngineError as error:
            if error.status == 404:
                return None
            raise

    async def remove(self, path: str) -> bool:
        """Remove a container (killed first, with its anonymous volumes), an image or a volume by
        its path; False when it was gone, is going, or is in use by something else."""
        params = {"force": path.startswith("containers/"), "v": True}
        try:
            await self.json("DELETE", path, params=params)
        except EngineError as error:
            if error.status in (404, 409):
                return False
            raise
        return True

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
        sent = {"Content-Type": "application/json", **(headers or {})}
        body = io.BytesIO(data) if isinstance(data, bytes) else data  # which aiohttp sends in parts
        try:
            response = await self._open_http.request(method, self._url(path, params), data=body, headers=sent)
        except (aiohttp.ClientError, OSError) as error:
            raise self.lost(error) from error
        async with response:
            if response.status >= 400:
                raise _refusal(response.status, await response.text())
            yield response

    async def hijack(self, path: str, params: Mapping[str, Any], hearer: Hearer) -> Hijacked:
        """POST and take over the connection: from now on it belongs to ``hearer``."""
        await self.connect()
        headers = {"Connection": "Upgrade", "Upgrade": "tcp", "Content-Type": "application/json"}
        try:
            response = await self._open_http.post(
                self._url(path, params), headers=headers, read_until_eof=False
            )
            if response.status >= 400:
                raise _refusal(response.status, await response.text())
        except (aiohttp.ClientError, OSError) as error:
            raise self.lost(error) from error
        return Hijacked(response, hearer)

    def _url(self, path: str, params: Mapping[str, Any] | None) -> URL:
        query = {name: _parameter(value) for name, value in (params or {}).items() if value is not None}
        return URL(f"{self._top}/{path}").with_query(query)

    def lost(self, error: BaseException | str) -> SandboxLostError:
        """The engine stopped answering in the middle of a run."""
        return SandboxLostError(f"the docker engine at {self.host} went away: {_cause(error)}")

    async def close(self) -> None:
        async with self._connecting:
            await self._close()

    async def _close(self) -> None:
        session, tunnel = self._session, self._tunnel
        self._session = self._info = self._tunnel = None
        if session is not None:
            await session.close()
        if tunnel is not None:
            await tunnel.close()


class Hearer(Protocol):
    """Who gets what comes out of a container: stream 1 is stdout, 2 stderr."""

    def on_output(self, stream: int, data: bytes) -> None: ...

    def on_end(self) -> None: ...


class Hijacked:
    """The standard streams of a container's process."""

    def __init__(self, response: aiohttp.ClientResponse, hearer: Hearer) -> None:
        connection = response.connection
        if connection is None or connection.protocol is None or connection.transport is None:
            response.close()
            raise SandboxLostError("the docker engine closed the connection it should hand over")
        self._response = response
        self._transport = connection.transport
        self._hearer: Hearer | None = hearer
        self._buffer = bytearray()
        connection.protocol.force_close()
        connection.protocol.set_parser(self, self)

    def write(self, data: bytes) -> None:
        if not self._transport.is_closing():
            self._transport.write(data)

    def close(self) -> None:
        """End the connection, and with it the process's stdin. Nothing is heard any more."""
        self._hearer = None
        self._transport.abort()
        self._response.close()

    # What aiohttp asks of a parser and of its payload.

    def feed_data(self, data: bytes) -> tuple[bool, bytes]:
        buffer = self._buffer
        buffer += data
        at = 0
        while len(buffer) - at >= 8:
            end = at + 8 + int.from_bytes(buffer[at + 4 : at + 8], "big")
            if len(buffer) < end or self._hearer is None:
                break
            self._hearer.on_output(buffer[at], bytes(buffer[at + 8 : end]))
            at = end
        del buffer[:at]
        return False, b""

    def feed_eof(self) -> None:
        hearer, self._hearer = self._hearer, None
        if hearer is not None:
            hearer.on_end()

    def is_eof(self) -> bool:
        return True

    def set_exception(self, error: BaseException, cause: object = None) -> None:
        self.feed_eof()


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


def _refusal(status: int, text: str) -> EngineError:
    said = _json(text)
    text = str(said["message"]) if isinstance(said, dict) and "message" in said else text
    return EngineError(f"docker: {text.strip() or f'status {status}'}", status=status)


def _parameter(value: Any) -> str:
    if isinstance(value, bool):
        return "1" if value else "0"
    return json.dumps(value) if isinstance(value, (dict, list)) else str(value)


def api_version(text: str) -> tuple[int, int]:
    """A version of the interface as numbers that compare; (0, 0) for words that are none."""
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
    why = getattr(error, "os_error", error)  # what a connector wraps says the reason without its own words
    if isinstance(why, ConnectionError) and why.errno:
        return os.strerror(why.errno)
    return str(why) or type(why).__name__


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
