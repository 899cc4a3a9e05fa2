"""The only way out of a sandbox with an allowlist: a proxy on the host that checks names.

It speaks ``CONNECT host:port`` and plain requests in absolute form. A name that is not on
the list is answered 403; so is one that is, but resolves into this machine or its private
networks while the list does not say so by address.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

from benchflow.sandboxes.local.doors import join

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
    """One per sandbox, on a unix socket that is bound into it."""

    def __init__(self, allowed: tuple[str, ...]) -> None:
        self._allowed = AllowList(allowed)
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def start(self, path: Path) -> None:
        self._server = await asyncio.start_unix_server(self._serve, path, limit=_HEAD_LIMIT)

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            await self._handle(reader, writer)
        except Refused as refusal:
            body = f"benchflow: {refusal}\n"
            head = f"HTTP/1.1 {refusal.status}\r\nContent-Type: text/plain\r\nContent-Length: {len(body)}\r\n"
            with suppress(ConnectionError):
                writer.write(f"{head}Connection: close\r\n\r\n{body}".encode())
                await writer.drain()
        except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, TimeoutError):
            pass  # the client went away or sends something that is not HTTP
        finally:
            writer.close()
            self._tasks.discard(task)

    async def _handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with asyncio.timeout(_HEAD_TIMEOUT):
            head = await reader.readuntil(b"\r\n\r\n")
        lines = head.decode("latin-1").split("\r\n")
        method, _, rest = lines[0].partition(" ")
        target, _, version = rest.rpartition(" ")
        if not version.startswith("HTTP/1."):
            raise Refused("400 Bad Request", "not an HTTP/1 request")
        if method == "CONNECT":
            host, port = _authority(target, None)
            upstream = await self._dial(host, port)
            writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
        else:
            url = urlsplit(target)
            if url.scheme != "http" or not url.netloc:
                raise Refused("400 Bad Request", "the proxy needs an absolute http:// address")
            host, port = _authority(url.netloc.rpartition("@")[2], 80)
            upstream = await self._dial(host, port)
            path = (url.path or "/") + (f"?{url.query}" if url.query else "")
            kept = [line for line in lines[1:-2] if not line.lower().startswith((*_HOP_BY_HOP, "host:"))]
            # One request per connection: the next one could name another host.
            request = [f"{method} {path} HTTP/1.1", f"Host: {url.netloc.rpartition('@')[2]}", *kept]
            upstream[1].write("\r\n".join([*request, "Connection: close", "", ""]).encode("latin-1"))
        await join((reader, writer), upstream)

    async def _dial(self, host: str, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if not self._allowed.allows(host, port):
            raise Refused("403 Forbidden", f"{host}:{port} is not among this task's allowed hosts")
        literal = _is_address(host)
        try:
            async with asyncio.timeout(_CONNECT_TIMEOUT):
                found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
                addresses = [item[4][0] for item in found]
                if not literal:
                    addresses = [item for item in addresses if ipaddress.ip_address(item).is_global]
                if not addresses:
                    raise Refused("403 Forbidden", f"{host} leads to a private address")
                return await asyncio.open_connection(addresses[0], port)
        except (OSError, TimeoutError) as error:
            raise Refused("502 Bad Gateway", f"cannot reach {host}:{port}: {error}") from error


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
