"""``DOCKER_HOST=ssh://…``: a private unix socket whose every connection is one ``ssh``."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from pathlib import Path
from urllib.parse import urlsplit

from benchflow.contracts.errors import PrerequisiteError

_CHUNK = 1 << 16
_SAID = 400


class SshTunnel:
    """Listens at ``path`` (of this user alone) and joins each connection to
    ``ssh HOST docker system dial-stdio``. ``said`` is the last line that ssh complained with."""

    def __init__(self, folder: Path, target: str, argv: list[str]) -> None:
        self.path = folder / "engine.sock"
        self.target = target
        self.said = ""
        self._argv = argv
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @classmethod
    async def open(cls, address: str) -> SshTunnel:
        """Raises ``PrerequisiteError`` when there is no ssh, or the address names no host."""
        url, ssh = urlsplit(address), shutil.which("ssh")
        if ssh is None:
            raise PrerequisiteError(f"DOCKER_HOST={address} needs ssh", fix="install an OpenSSH client")
        if not url.hostname or url.hostname.startswith("-") or (url.username or "").startswith("-"):
            raise PrerequisiteError(
                f"DOCKER_HOST={address!r} names no host", fix="give ssh://USER@HOST or ssh://USER@HOST:PORT"
            )
        target = f"{url.username}@{url.hostname}" if url.username else url.hostname
        port = ["-p", str(url.port)] if url.port else []
        argv = [ssh, "-T", "-o", "BatchMode=yes", *port, "--", target, "docker", "system", "dial-stdio"]
        tunnel = cls(Path(tempfile.mkdtemp(prefix="benchflow-ssh-")), target, argv)
        tunnel._server = await asyncio.start_unix_server(tunnel._accept, tunnel.path)
        return tunnel

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.get_running_loop().create_task(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(*self._argv, stdin=pipe, stdout=pipe, stderr=pipe)
        assert process.stdin and process.stdout and process.stderr
        try:
            await asyncio.gather(
                _copy(reader, process.stdin), _copy(process.stdout, writer), self._listen(process.stderr)
            )
        finally:
            writer.close()
            if process.returncode is None:
                process.kill()
            await process.wait()

    async def _listen(self, stderr: asyncio.StreamReader) -> None:
        while line := await stderr.readline():
            self.said = line.decode("utf-8", "replace").strip()[:_SAID] or self.said

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        shutil.rmtree(self.path.parent, ignore_errors=True)


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while (data := await reader.read(_CHUNK)) and not writer.is_closing():
            writer.write(data)
            await writer.drain()
        if not writer.is_closing() and writer.can_write_eof():
            writer.write_eof()
    except ConnectionError:
        pass
