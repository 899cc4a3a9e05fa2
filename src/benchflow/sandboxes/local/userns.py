"""The user namespace sandboxes run in: which uids exist inside, and whose they are.

One namespace serves all sandboxes of a process; they stay apart by their own pid, mount,
network, ipc and uts namespaces. As the machine's root a range of uids is mapped onto
itself (image layers belong to root and must look so inside); what an equal uid could do
to the host is closed by read-only covers, a filter and dropped capabilities. As an
ordinary user the caller becomes root inside, with the ranges of ``/etc/subuid`` when
``newuidmap`` is there, else alone.
"""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import sys
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from benchflow.contracts.errors import PrerequisiteError

_RANGE = 65536
_HOLD = (
    "import ctypes,sys\n"
    "libc=ctypes.CDLL(None,use_errno=True)\n"
    "sys.exit(ctypes.get_errno()) if libc.unshare(0x10000000) else None\n"
    "sys.stdout.write('x');sys.stdout.flush();sys.stdin.read()\n"
)
_REMOVE = (
    "import ctypes,os,sys\n"
    "ctypes.CDLL(None).setns(int(sys.argv[1]),0) and sys.exit('cannot join the user namespace')\n"
    "os.execvp('rm',['rm','-rf','--',sys.argv[2]])\n"
)


@dataclass(frozen=True, slots=True)
class UserNamespace:
    """``fd`` keeps it alive. ``multiple`` tells whether uids other than 0 exist inside."""

    fd: int
    multiple: bool
    why: str = ""


def user_namespace() -> UserNamespace:
    """This process's namespace, made on first use. Raises ``PrerequisiteError`` with the
    setting that forbids it."""
    return _make(os.getpid())


@lru_cache(maxsize=2)
def _make(_pid: int) -> UserNamespace:
    with subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdin and holder.stdout
        if holder.stdout.read(1) != b"x":
            raise no_namespaces(os.strerror(holder.wait()))
        multiple, why = _map_ids(holder.pid)
        fd = os.open(f"/proc/{holder.pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
        holder.stdin.close()
        holder.wait()
    return UserNamespace(fd, multiple, why)


def remove_tree(path: Path) -> None:
    """Remove a tree with files of the namespace's uids, which an ordinary user cannot touch
    outside of it. Raises ``PermissionError`` with what was said."""
    fd = user_namespace().fd
    argv = [sys.executable, "-I", "-S", "-c", _REMOVE, str(fd), str(path)]
    done = subprocess.run(argv, pass_fds=(fd,), capture_output=True, text=True, check=False)
    if done.returncode:
        raise PermissionError(f"cannot remove {path}: {done.stderr.strip()[-300:]}")


def _map_ids(pid: int) -> tuple[bool, str]:
    uid, gid = os.geteuid(), os.getegid()
    if uid == 0:
        _write(pid, "uid_map", f"0 0 {_own_range('uid')}")
        _write(pid, "gid_map", f"0 0 {_own_range('gid')}")
        return True, ""
    uids, gids = _subordinate("/etc/subuid"), _subordinate("/etc/subgid")
    if uids and gids and shutil.which("newuidmap") and shutil.which("newgidmap"):
        for tool, own, (start, count) in (("newuidmap", uid, uids), ("newgidmap", gid, gids)):
            done = subprocess.run(
                [tool, *map(str, (pid, 0, own, 1, 1, start, count))],
                capture_output=True,
                text=True,
                check=False,
            )
            if done.returncode:
                raise PrerequisiteError(
                    f"{tool}: {done.stderr.strip()}", fix="correct /etc/subuid and /etc/subgid"
                )
        return True, ""
    _write(pid, "setgroups", "deny")
    _write(pid, "uid_map", f"0 {uid} 1")
    _write(pid, "gid_map", f"0 {gid} 1")
    return False, "one uid is mapped: no range in /etc/subuid, or newuidmap (package uidmap) is missing"


def _write(pid: int, name: str, text: str) -> None:
    try:
        Path(f"/proc/{pid}/{name}").write_text(text)
    except OSError as error:
        raise no_namespaces(f"writing {name}: {error.strerror}") from error


def _own_range(kind: str) -> int:
    """How many ids from 0 up this process itself has (fewer inside a container)."""
    for line in Path(f"/proc/self/{kind}_map").read_text().splitlines():
        inside, _, count = map(int, line.split())
        if inside == 0:
            return min(count, _RANGE)
    return 1


def _subordinate(path: str) -> tuple[int, int] | None:
    """The first range of the caller in ``/etc/subuid`` or ``/etc/subgid``."""
    uid = os.geteuid()
    try:
        names = {str(uid), pwd.getpwuid(uid).pw_name}
    except KeyError:
        names = {str(uid)}
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        name, _, rest = line.partition(":")
        start, _, count = rest.partition(":")
        if name in names and start.isdigit() and count.isdigit():
            return int(start), min(int(count), _RANGE - 1)
    return None


def no_namespaces(reason: str) -> PrerequisiteError:
    """The error for a machine on which no sandbox can start, naming the setting at fault."""
    switches = {
        "user.max_user_namespaces": ("/proc/sys/user/max_user_namespaces", "0", "15000"),
        "kernel.unprivileged_userns_clone": ("/proc/sys/kernel/unprivileged_userns_clone", "0", "1"),
        "kernel.apparmor_restrict_unprivileged_userns": (
            "/proc/sys/kernel/apparmor_restrict_unprivileged_userns",
            "1",
            "0",
        ),
    }
    for name, (path, bad, good) in switches.items():
        try:
            value = Path(path).read_text().strip()
        except OSError:
            continue
        if value == bad:
            return PrerequisiteError(
                f"the local sandbox needs user namespaces, and {name} is {value} ({reason})",
                fix=f"sysctl -w {name}={good}, or use --sandbox docker",
            )
    return PrerequisiteError(
        f"the local sandbox cannot make namespaces here: {reason}",
        fix="allow user namespaces (user.max_user_namespaces, a container's seccomp profile), "
        "or use --sandbox docker",
    )
