"""``DOCKER_HOST=ssh://…``: a private unix socket whose every connection is one ``ssh``."""

from __future__ import annotations

import asyncio
import shutil
import socket
import subprocess
import tempfile
from pathlib import Path
from urllib.parse import urlsplit

from benchflow.contracts.errors import PrerequisiteError
from benchflow.sandboxes.doors import Door, listen

_SAID = 400


class SshTunnel:
    """Listens at ``path`` (of this user alone) and gives each connection to
    ``ssh HOST docker system dial-stdio``. ``said`` is the last line that ssh complained with."""

    def __init__(self, address: str) -> None:
        """Raises ``PrerequisiteError`` when there is no ssh, or the address names no host."""
        url, ssh = urlsplit(address), shutil.which("ssh")
        if ssh is None:
            raise PrerequisiteError(f"DOCKER_HOST={address} needs ssh", fix="install an OpenSSH client")
        if not url.hostname or url.hostname.startswith("-") or (url.username or "").startswith("-"):
            raise PrerequisiteError(
                f"DOCKER_HOST={address!r} names no host", fix="give ssh://USER@HOST or ssh://USER@HOST:PORT"
            )
        self.target = f"{url.username}@{url.hostname}" if url.username else url.hostname
        self.said = ""
        port = ["-p", str(url.port)] if url.port else []
        self._argv = [ssh, "-T", "-o", "BatchMode=yes", *port, "--", self.target]
        self._argv += ["docker", "system", "dial-stdio"]
        self.path = Path(tempfile.mkdtemp(prefix="benchflow-ssh-")) / "engine.sock"
        self._door = Door(listen(str(self.path)), self._serve)

    async def _serve(self, accepted: socket.socket) -> None:
        accepted.setblocking(True)
        end = accepted.fileno()
        ours, theirs = socket.socketpair()
        with ours:
            with theirs:  # no asyncio process: its watcher complains of one that has ended when it is killed
                process = subprocess.Popen(self._argv, stdin=end, stdout=end, stderr=theirs.fileno())
            ours.setblocking(False)
            try:
                while data := await asyncio.get_running_loop().sock_recv(ours, _SAID):
                    lines = data.decode("utf-8", "replace").strip().splitlines()
                    self.said = lines[-1] if lines else self.said
            finally:
                process.kill()
                process.wait()

    async def close(self) -> None:
        await self._door.close()
        shutil.rmtree(self.path.parent, ignore_errors=True)
