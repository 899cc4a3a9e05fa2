"""The engine's end of the nursery (``inside/nursery.py``): it turns a finished jail into a
sandbox with a helper in it."""

from __future__ import annotations

import array
import atexit
import fcntl
import marshal
import os
import resource
import socket
import subprocess
from pathlib import Path
from typing import Any

from benchflow.contracts.errors import PrerequisiteError, SandboxStartError
from benchflow.sandboxes import runtime
from benchflow.sandboxes.local.capabilities import MASK
from benchflow.sandboxes.local.seccomp import program

_MFD_EXEC = 0x10
_START_TIMEOUT = 60.0
READ_ONLY = ("sys", "sysrq-trigger", "irq", "bus", "fs", "dynamic_debug", "driver", "mtrr")
MASKED = ("kcore", "keys", "timer_list", "sched_debug", "latency_stats", "kpagecount", "kpageflags")
EMPTY = ("acpi", "scsi", "asound")
"""Below /proc. With equal uids inside and outside, root inside would otherwise own the host's
kernel settings. The helper covers them before anything else runs, at a quarter of what
bubblewrap takes: that reads its table of mounts again for each."""
_NAMESPACES = ("user", "ipc", "uts", "net", "cgroup", "pid", "mnt")
"""In the order they are joined: the user namespace gives the right to the others."""
_COVERS = (READ_ONLY, MASKED, EMPTY)


class Nursery:
    """A running nursery. ``start`` and ``enter`` do not need an event loop."""

    def __init__(self, channel: socket.socket, process: subprocess.Popen[bytes]) -> None:
        self._channel = channel
        self._process = process

    @classmethod
    def start(cls) -> Nursery:
        """Call in the launcher thread. Blocks until it is ready to fork."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        loader = _sealed(runtime.loader_path())
        try:
            process = subprocess.Popen(
                runtime.argv(f"import nursery; nursery.main({theirs.fileno()})"),
                executable=f"/proc/self/fd/{loader}",
                cwd=runtime.runtime_dir(),
                env={},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(loader, theirs.fileno()),
            )
        except OSError as error:
            ours.close()
            raise PrerequisiteError(
                f"the local sandbox cannot start its helper: {error}",
                fix="allow programs in memory files (sysctl vm.memfd_noexec=0), or use --sandbox docker",
            ) from error
        finally:
            theirs.close()
            os.close(loader)
        ours.settimeout(_START_TIMEOUT)
        covers = [[f"/proc/{name}" for name in names if os.path.exists(f"/proc/{name}")] for names in _COVERS]
        ours.send(marshal.dumps((MASK, program(), covers, *resource.getrlimit(resource.RLIMIT_NOFILE))))
        if ours.recv(16) != b"ready":
            raise PrerequisiteError("the local sandbox's helper does not start", fix="use --sandbox docker")
        return cls(ours, process)

    def enter(
        self,
        first: int,
        channel: int,
        open_network: bool,
        groups: list[Path],
        plan: dict[str, Any] | None,
    ) -> None:
        """Fork a helper into the sandbox whose first process is ``first``; it carries out
        ``plan`` and serves ``channel``. Raises ``SandboxStartError`` when the sandbox is gone already."""
        wanted = [name for name in _NAMESPACES if not (open_network and name == "net")]
        fds: list[int] = []
        try:
            fds += [os.open(f"/proc/{first}/ns/{name}", os.O_RDONLY | os.O_CLOEXEC) for name in wanted]
            rights = array.array("i", [channel, *fds])
            body = marshal.dumps(([str(group) for group in groups], plan))
            self._channel.sendmsg([body], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
        except OSError as error:
            raise SandboxStartError(f"the sandbox ended while it started: {error}") from error
        finally:
            for fd in fds:
                os.close(fd)

    def alive(self) -> bool:
        return self._process.poll() is None

    def close(self) -> None:
        """Let it end; helpers live on until their sandboxes end."""
        self._channel.close()
        self._process.wait()


_current: dict[int, Nursery] = {}


def nursery() -> Nursery:
    """This process's nursery, started on first use. Call in the launcher thread."""
    known = _current.get(os.getpid())
    if known is None or not known.alive():
        known = _current[os.getpid()] = Nursery.start()
        atexit.register(known.close)
    return known


def _sealed(path: Path) -> int:
    """An executable copy in memory that nobody can change."""
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        fd = os.memfd_create("benchflow", flags | _MFD_EXEC)
    except OSError:
        fd = os.memfd_create("benchflow", flags)  # kernels before 6.3
    with open(os.dup(fd), "wb") as copy:
        copy.write(path.read_bytes())
    seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd
