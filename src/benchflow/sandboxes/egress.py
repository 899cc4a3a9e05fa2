"""The only way out of a sandbox with an allowlist: a proxy on the host that checks names.

It speaks ``CONNECT host:port`` and plain requests in absolute form. A name that is not on
the list is answered 403; so is one that is, but resolves into this machine or its private
networks while the list does not say so by address.
"""

from __future__ import annotations

import asyncio
import ipaddress
import shutil
import socket
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit

from benchflow.sandboxes.doors import Door, connect, join, listen

PROXY_PORT = 3128
"""Loopback port of the proxy inside a sandbox."""
_HEAD_LIMIT = 1 << 16
_HEAD_TIMEOUT = 30.0
_CONNECT_TIMEOUT = 20.0
_HOP_BY_HOP = ("proxy-connection:", "proxy-authorization:", "connection:", "keep-alive:")


class Refused(Exception):
    """``status`` is the HTTP answer for the client inside."""

    def __init__(self, status: str, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class AllowList:
    """Host names, ``*.example.org`` for all below a name, and addresses; each may end in ``:port``."""

    def __init__(self, entries: tuple[str, ...]) -> None:
        self._entries = [_split_port(entry.strip().lower()) for entry in entries]

    def allows(self, host: str, port: int) -> bool:
        host = host.lower().rstrip(".")
        return any(
            (wanted is None or wanted == port) and _matches(pattern, host)
            for pattern, wanted in self._entries
        )


def _split_port(entry: str) -> tuple[str, int | None]:
    name, colon, port = entry.rpartition(":")
    if colon and port.isdigit() and (":" not in name or name.endswith("]")):
        return name.strip("[]"), int(port)
    return entry.strip("[]").rstrip("."), None


def _matches(pattern: str, host: str) -> bool:
    if pattern.startswith("*."):
        return host.endswith(pattern[1:]) and host != pattern[2:]
    return host == pattern


class EgressProxy:
    """Serves one sandbox's connections (see ``Door``)."""

    def __init__(self, allowed: tuple[str, ...]) -> None:
        self._allowed = AllowList(allowed)

    async def serve(self, client: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(_HEAD_TIMEOUT):
                head, rest = await _read_head(client)
            upstream, said, asked = await self._answer(head)
        except Refused as refusal:
            body = f"benchflow: {refusal}\n"
            lines = ["Content-Type: text/plain", f"Content-Length: {len(body)}", "Connection: close"]
            reply = "\r\n".join([f"HTTP/1.1 {refusal.status}", *lines, "", body])
            await loop.sock_sendall(client, reply.encode())
            return
        with upstream:
            await loop.sock_sendall(client, said)
            await loop.sock_sendall(upstream, asked + rest)
            await join(client, upstream)

    async def _answer(self, head: bytes) -> tuple[socket.socket, bytes, bytes]:
        """For the head of a request: a connection, and what to send first to the client and there."""
        lines = head.decode("latin-1").split("\r\n")
        method, _, rest = lines[0].partition(" ")
        target, _, version = rest.rpartition(" ")
        if not version.startswith("HTTP/1."):
            raise Refused("400 Bad Request", "not an HTTP/1 request")
        if method == "CONNECT":
            upstream = await self._dial(*_authority(target, None))
            return upstream, b"HTTP/1.1 200 Connection established\r\n\r\n", b""
        url = urlsplit(target)
        if url.scheme != "http" or not url.netloc:
            raise Refused("400 Bad Request", "the proxy needs an absolute http:// address")
        authority = url.netloc.rpartition("@")[2]
        upstream = await self._dial(*_authority(authority, 80))
        path = (url.path or "/") + (f"?{url.query}" if url.query else "")
        kept = [line for line in lines[1:-2] if not line.lower().startswith((*_HOP_BY_HOP, "host:"))]
        # One request per connection: the next one could name another host.
        request = [f"{method} {path} HTTP/1.1", f"Host: {authority}", *kept, "Connection: close", "", ""]
        return upstream, b"", "\r\n".join(request).encode("latin-1")

    async def _dial(self, host: str, port: int) -> socket.socket:
        if not self._allowed.allows(host, port):
            raise Refused("403 Forbidden", f"{host}:{port} is not among this task's allowed hosts")
        literal = _is_address(host)
        try:
            async with asyncio.timeout(_CONNECT_TIMEOUT):
                found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
                addresses = [str(item[4][0]) for item in found]
                if not literal:
                    addresses = [item for item in addresses if ipaddress.ip_address(item).is_global]
                if not addresses:
                    raise Refused("403 Forbidden", f"{host} leads to a private address")
                return await connect((addresses[0], port))
        except (OSError, TimeoutError, UnicodeError) as error:
            raise Refused("502 Bad Gateway", f"cannot reach {host}:{port}: {error}") from error


@asynccontextmanager
async def open_proxy(allowed: tuple[str, ...]) -> AsyncIterator[Path]:
    """A proxy on a unix socket, in a folder of its own that is removed afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="benchflow-egress-"))  # short: socket paths are limited
    path = folder / "proxy"
    try:
        door = Door(listen(str(path)), EgressProxy(allowed).serve)
        path.chmod(0o666)  # root of a container may be nobody here; the folder keeps others out
        try:
            yield path
        finally:
            await door.close()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def proxy_env() -> dict[str, str]:
    url = f"http://127.0.0.1:{PROXY_PORT}"
    names = {"http_proxy": url, "https_proxy": url, "no_proxy": "127.0.0.1,localhost"}
    return names | {name.upper(): value for name, value in names.items()}


async def _read_head(client: socket.socket) -> tuple[bytes, bytes]:
    """The head of a request with its empty line, and what came after it."""
    loop, read = asyncio.get_running_loop(), b""
    while b"\r\n\r\n" not in read:
        data = await loop.sock_recv(client, _HEAD_LIMIT) if len(read) < _HEAD_LIMIT else b""
        if not data:
            raise Refused("400 Bad Request", "no HTTP request, or one with too long a head")
        read += data
    head, end, rest = read.partition(b"\r\n\r\n")
    return head + end, rest


def _authority(text: str, default: int | None) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    if not colon or port.endswith("]"):
        host, port = text, str(default or "")
    if not port.isdigit() or not 0 < int(port) < 65536 or not host:
        raise Refused("400 Bad Request", f"no host and port in {text!r}")
    return host.strip("[]"), int(port)


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
