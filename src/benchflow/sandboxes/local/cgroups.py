"""Resource limits and the freezer, by whichever control groups this machine delegates.

Version 1 has one hierarchy per controller, and a thread moves itself cheaply; version 2
has one tree, and a small shell moves itself before it becomes bubblewrap. Where neither
may be written the sandbox runs without, and says so.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from benchflow.contracts.sandbox import Limits

_FOLDER = "benchflow"
_CPU_PERIOD = 100_000
_V1 = ("memory", "pids", "cpu", "freezer")
_REMOVE_DEADLINE = 5.0


@dataclass(frozen=True, slots=True)
class CgroupHost:
    """Where groups can be made: a folder per usable controller, and the caller's own groups."""

    version: int
    parents: dict[str, Path] = field(default_factory=dict[str, Path])
    own: dict[str, Path] = field(default_factory=dict[str, Path])
    why: str = ""

    def can(self, controller: str) -> bool:
        return controller in self.parents

    def folders(self, name: str) -> list[Path]:
        """Every folder that ``create`` may make."""
        return list({parent / name for parent in self.parents.values()})

    def create(self, name: str, limits: Limits) -> Cgroup:
        """Make the groups the limits need, plus the freezer. Controllers that are missing are
        left out; ``Cgroup.enforced`` tells what is in force."""
        group = Cgroup(self, name)
        try:
            group.make(limits)
        except OSError:
            group.remove()
            raise
        return group


@lru_cache(maxsize=1)
def cgroup_host() -> CgroupHost:
    try:
        mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
        groups = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    except OSError as error:
        return CgroupHost(0, why=f"no control groups: {error}")
    v1 = _find_v1(mounts, groups)
    if v1.parents:
        return v1
    v2 = _find_v2(mounts, groups)
    return v2 if v2.parents else CgroupHost(0, why="no control group that this user may write")


def _find_v1(mounts: list[list[str]], groups: list[list[str]]) -> CgroupHost:
    paths = {name: path for _, names, path in groups for name in names.split(",") if name}
    parents: dict[str, Path] = {}
    own: dict[str, Path] = {}
    for _, place, kind, options, *_ in mounts:
        if kind != "cgroup":
            continue
        for name in set(options.split(",")) & set(_V1) & paths.keys():
            here = _visible(Path(place), paths[name])
            parent = here / _FOLDER
            try:
                parent.mkdir(exist_ok=True)
            except OSError:
                continue
            if os.access(parent, os.W_OK):
                parents[name], own[name] = parent, here
    return CgroupHost(1, parents, own)


def _find_v2(mounts: list[list[str]], groups: list[list[str]]) -> CgroupHost:
    path = next((path for number, names, path in groups if number == "0" and not names), None)
    place = next((Path(mount[1]) for mount in mounts if mount[2] == "cgroup2"), None)
    if path is None or place is None:
        return CgroupHost(2)
    own = _visible(place, path)
    for base in dict.fromkeys([own, place] if os.geteuid() == 0 else [own]):
        parent = base / _FOLDER
        try:
            available = set((base / "cgroup.controllers").read_text().split()) & {"memory", "pids", "cpu"}
            if not available:
                continue
            parent.mkdir(exist_ok=True)
            for folder in (base, parent):
                (folder / "cgroup.subtree_control").write_text(" ".join(f"+{name}" for name in available))
        except OSError:
            continue
        return CgroupHost(2, {name: parent for name in (*available, "freezer")}, {"": own})
    return CgroupHost(2)


def _visible(place: Path, path: str) -> Path:
    """The caller's own group below a mount; the mount itself when its path lies outside."""
    here = place / path.lstrip("/")
    return here if here.is_dir() else place


class Cgroup:
    """The groups of one sandbox."""

    def __init__(self, host: CgroupHost, name: str) -> None:
        self._host = host
        self._folders: dict[str, Path] = {}
        self._name = name
        self.enforced: dict[str, object] = {}

    @property
    def folders(self) -> list[Path]:
        return list(dict.fromkeys(self._folders.values()))

    def make(self, limits: Limits) -> None:
        wanted = {
            "memory": limits.memory_mb,
            "pids": limits.pids,
            "cpu": limits.cpus,
            "freezer": True,
        }
        for controller, value in wanted.items():
            parent = self._host.parents.get(controller)
            if value is None or parent is None:
                continue
            folder = parent / self._name
            folder.mkdir(exist_ok=True)
            self._folders[controller] = folder
        self._limit(limits)

    def _limit(self, limits: Limits) -> None:
        v1 = self._host.version == 1
        if limits.memory_mb is not None and "memory" in self._folders:
            size = limits.memory_mb << 20
            names = ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes") if v1 else ("memory.max",)
            for name in names:
                target = self._folders["memory"] / name
                if target.exists():
                    target.write_text(str(size))
            self.enforced["memory_mb"] = limits.memory_mb
        if limits.pids is not None and "pids" in self._folders:
            (self._folders["pids"] / "pids.max").write_text(str(limits.pids))
            self.enforced["pids"] = limits.pids
        if limits.cpus is not None and "cpu" in self._folders:
            quota = max(1000, int(limits.cpus * _CPU_PERIOD))
            if v1:
                (self._folders["cpu"] / "cpu.cfs_period_us").write_text(str(_CPU_PERIOD))
                (self._folders["cpu"] / "cpu.cfs_quota_us").write_text(str(quota))
            else:
                (self._folders["cpu"] / "cpu.max").write_text(f"{quota} {_CPU_PERIOD}")
            self.enforced["cpus"] = limits.cpus

    @contextmanager
    def entered(self) -> Iterator[list[str]]:
        """What a thread forks in this context is in the group when it starts with the given
        argv prefix. Only this thread is moved, and back at the end."""
        if self._host.version == 2:
            script = 'echo 0 > "$0/cgroup.procs" && exec "$@"'
            yield ["/bin/sh", "-c", script, str(self.folders[0])] if self._folders else []
            return
        try:
            for folder in self._folders.values():
                _write(folder / "tasks", "0")
            yield []
        finally:
            for controller in self._folders:
                _write(self._host.own[controller] / "tasks", "0")

    def member_files(self) -> list[Path]:
        """Files into which a single-threaded process writes ``0`` to become a member."""
        name = "tasks" if self._host.version == 1 else "cgroup.procs"
        return [folder / name for folder in self.folders]

    @property
    def can_freeze(self) -> bool:
        return "freezer" in self._folders

    def freeze(self) -> None:
        """Return when every process of the group stands still. Blocks for milliseconds."""
        folder = self._folders["freezer"]
        if self._host.version == 2:
            _write(folder / "cgroup.freeze", "1")
            _until(lambda: "frozen 1" in (folder / "cgroup.events").read_text())
            return
        _write(folder / "freezer.state", "FROZEN")
        _until(lambda: (folder / "freezer.state").read_text().strip() == "FROZEN")

    def thaw(self) -> None:
        """Let it run again; also when it does, or when there is no freezer."""
        folder = self._folders.get("freezer")
        if folder is None:
            return
        if self._host.version == 2:
            _write(folder / "cgroup.freeze", "0")
        else:
            _write(folder / "freezer.state", "THAWED")

    def kill_frozen(self, chosen: Callable[[int], bool]) -> None:
        """Kill the members that ``chosen`` picks by host pid, while none of them can run, and
        so none can fork its way out. Needs the freezer; blocks for milliseconds."""
        self.freeze()
        try:
            for pid in map(int, (self._folders["freezer"] / "cgroup.procs").read_text().split()):
                if chosen(pid):
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
        finally:
            self.thaw()

    def out_of_memory(self) -> bool:
        """Whether the kernel killed something in here for want of memory."""
        folder = self._folders.get("memory")
        if folder is None:
            return False
        name = "memory.oom_control" if self._host.version == 1 else "memory.events"
        try:
            lines = (folder / name).read_text().splitlines()
        except OSError:
            return False
        return any(line.startswith("oom_kill ") and line.split()[1] != "0" for line in lines)

    def remove(self) -> None:
        """Idempotent; the processes are gone, or about to be."""
        remove_folders(self.folders)
        self._folders = {}


def remove_folders(folders: list[Path]) -> None:
    """Remove groups, after killing what is left in them. Raises ``OSError`` if one stays busy."""
    deadline = time.monotonic() + _REMOVE_DEADLINE
    for folder in folders:
        while True:
            try:
                folder.rmdir()
            except FileNotFoundError:
                pass
            except OSError:
                if time.monotonic() > deadline:
                    raise
                _end_members(folder)
                time.sleep(0.002)
                continue
            break


def _end_members(folder: Path) -> None:
    """Kill what is left in a group, thawed, as a frozen process does not die."""
    for name, value in (("freezer.state", "THAWED"), ("cgroup.freeze", "0")):
        with suppress(FileNotFoundError):
            _write(folder / name, value)
    with suppress(OSError):
        for member in (folder / "cgroup.procs").read_text().split():
            with suppress(ProcessLookupError):
                os.kill(int(member), signal.SIGKILL)


def _write(path: Path, text: str) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)


def _until(reached: Callable[[], bool], timeout: float = 5.0) -> None:
    deadline = time.monotonic() + timeout
    while not reached():
        if time.monotonic() > deadline:
            raise TimeoutError("the control group did not freeze")
        time.sleep(0.0005)
