"""Where a rollout runs.

A provider prepares an immutable image once per task version and creates any
number of live sandboxes from it; a snapshot of a sandbox is an image again,
so a branch child starts exactly like a first sandbox.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

if TYPE_CHECKING:
    import asyncio

NetworkMode = Literal["none", "allowlist", "open"]
DoorWay = Literal["auto", "namespace", "socket", "bridge", "stream"]

OUTPUT_LIMIT = 8 * 1024 * 1024
"""Bytes kept of each of stdout and stderr of one exec, unless the caller says otherwise."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Resources asked for; ``None`` means unlimited. Storage and memory in MB (2**20 bytes)."""

    cpus: float | None = None
    memory_mb: int | None = None
    storage_mb: int | None = None
    pids: int | None = 4096


@dataclass(frozen=True, slots=True)
class NetworkPolicy:
    mode: NetworkMode = "none"
    allowed_hosts: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Mount:
    """A host directory shown read-only inside (agent bundles)."""

    source: Path
    target: str


@dataclass(frozen=True, slots=True)
class ModelDoor:
    """How the sandbox reaches the gateway: the host's unix socket appears inside as
    ``http://127.0.0.1:<port>`` even when the network is closed.

    ``via``: ``namespace`` (the host listens in the sandbox's network), ``socket`` (bound into
    it), ``bridge`` (an address of the host on a network they share) or ``stream`` (over the
    connection by which the sandbox is driven). ``auto`` takes the first that works; a provider
    refuses what it does not have with ``UsageError``. ``enforced["model_door"]`` tells which."""

    socket: Path
    port: int = 4500
    via: DoorWay = "auto"


@dataclass(frozen=True, slots=True)
class SandboxSpec:
    """What one live sandbox must be."""

    name: str
    job: str = ""
    limits: Limits = field(default_factory=Limits)
    network: NetworkPolicy = field(default_factory=NetworkPolicy)
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    workdir: str | None = None
    agent_user: str | None = "agent"
    """Name of the non-root user to create for the agent; ``None`` runs the agent as root."""
    mounts: tuple[Mount, ...] = ()
    model_door: ModelDoor | None = None
    lifetime_sec: float = 24 * 3600
    setup_timeout: float = 120


@dataclass(frozen=True, slots=True)
class ImageSource:
    """The parts of a task that decide its image."""

    name: str
    context: Path | None
    """The task's ``environment/`` folder, the build context; ``None`` when there is none."""
    dockerfile: Path | None
    docker_image: str | None = None
    local_base: str | None = None
    """``host`` when the task, or the user, consents to the machine's own ``/usr`` as the base."""
    exclude: tuple[str, ...] = ()
    """Paths under the context left out of the build (task skills in no-skill mode)."""
    build_timeout: float = 600
    base_override: tuple[str, ...] = ()
    """What the user wants instead: ``IMAGE`` for the base of the image, or ``NAME=IMAGE``."""

    def base_for(self, name: str, *, last: bool = True) -> str:
        """The image to use where the task says ``name``. ``last`` tells the base of the image
        itself from those of earlier build stages, which only ``NAME=IMAGE`` replaces."""
        found = {old: new for old, _, new in (item.rpartition("=") for item in self.base_override)}
        return found.get(name) or (found.get("") if last else None) or name


@dataclass(frozen=True, slots=True)
class SandboxImage:
    """Immutable and content-addressed. ``ref`` is the provider's own handle."""

    provider: str
    ref: str
    digest: str
    base: str
    workdir: str | None = None
    user: str | None = None
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SandboxCapabilities:
    """What this provider, on this host, can do. A false flag carries its reason in ``why``."""

    snapshot: bool = False
    fork: bool = False
    pause: bool = False
    network_none: bool = False
    network_allowlist: bool = False
    network_open: bool = False
    multiple_users: bool = False
    memory_limit: bool = False
    cpu_limit: bool = False
    pids_limit: bool = False
    storage_limit: bool = False
    writable_system: bool = False
    services: bool = False
    gpu: bool = False
    why: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True, slots=True)
class ExecResult:
    """One finished command. Output is kept raw; ``out`` and ``err`` decode with replacement.

    ``stdout_bytes``/``stderr_bytes`` are the original sizes; when larger than what was
    kept, the middle was dropped (head and tail are kept). ``exit_code`` is negative for
    a signal. After ``timed_out`` nothing of this exec is running in the sandbox.
    """

    exit_code: int
    stdout: bytes = b""
    stderr: bytes = b""
    stdout_bytes: int = 0
    stderr_bytes: int = 0
    duration: float = 0.0
    timed_out: bool = False

    @property
    def ok(self) -> bool:
        return self.exit_code == 0 and not self.timed_out

    @property
    def out(self) -> str:
        return self.stdout.decode("utf-8", "replace")

    @property
    def err(self) -> str:
        return self.stderr.decode("utf-8", "replace")

    @property
    def stdout_truncated(self) -> bool:
        return self.stdout_bytes > len(self.stdout)

    @property
    def stderr_truncated(self) -> bool:
        return self.stderr_bytes > len(self.stderr)


@dataclass(frozen=True, slots=True)
class Endpoint:
    url: str


@dataclass(frozen=True, slots=True)
class Running:
    """A sandbox that exists now. ``alive`` tells whether its owner, a process, still is."""

    provider: str
    name: str
    job: str
    age_sec: float
    owner: str
    alive: bool


@dataclass(frozen=True, slots=True)
class Reaped:
    """A leftover of a dead run that was, or with ``dry_run`` would be, removed."""

    provider: str
    name: str
    kind: str
    age_sec: float
    owner: str
    removed: bool


Command = str | Sequence[str]
"""A string runs under ``/bin/sh -c``; a sequence is an argv and meets no shell."""


class Process(Protocol):
    """A live process in a sandbox with its three pipes."""

    @property
    def pid(self) -> int: ...

    stdin: asyncio.StreamWriter
    stdout: asyncio.StreamReader
    stderr: asyncio.StreamReader

    async def wait(self) -> int: ...

    async def kill(self) -> None:
        """Kill the process and every descendant, also those that left its session."""
        ...


@runtime_checkable
class Sandbox(Protocol):
    """A live sandbox. ``user=None`` is root; names and numeric uids are accepted."""

    name: str
    spec: SandboxSpec
    image: SandboxImage
    capabilities: SandboxCapabilities
    enforced: Mapping[str, object]
    """What is really in force: limits, network, users, base, upper (tmpfs or disk)."""

    async def exec(
        self,
        cmd: Command,
        *,
        user: str | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        clean_env: bool = False,
        stdin: bytes | None = None,
        timeout: float | None = None,
        output_limit: int = OUTPUT_LIMIT,
        service: str = "main",
    ) -> ExecResult: ...

    async def spawn(
        self,
        cmd: Command,
        *,
        user: str | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        service: str = "main",
    ) -> Process: ...

    async def upload(self, local: Path, remote: str, *, owner: str | None = None) -> None:
        """Copy a file, or the contents of a directory, to ``remote``. Links inside the tree
        stay links; a link that leaves the tree is refused with ``TransferError``."""
        ...

    async def download(self, remote: str, local: Path, *, limit: int = 1 << 30) -> tuple[str, ...]:
        """Copy a file or directory out. Nothing is ever written outside ``local``; links that
        leave the tree are refused. Devices, FIFOs and sockets are left out; returns their
        names, relative to ``remote``."""
        ...

    async def expose(self, port: int) -> Endpoint: ...

    async def kill_processes(self, *, user: str | None = None) -> int:
        """Kill every process inside except the sandbox's own helper (only ``user``'s when
        given) and return once they are proved gone; raises ``HardeningError`` otherwise."""
        ...

    async def pause(self) -> None: ...

    async def resume(self) -> None: ...

    async def snapshot(self) -> SandboxImage: ...

    async def teardown(self) -> None:
        """Idempotent. Afterwards no process, mount or writable layer of it is left."""
        ...


@runtime_checkable
class SandboxProvider(Protocol):
    name: str

    def capabilities(self) -> SandboxCapabilities: ...

    async def preflight(self) -> None:
        """Raise ``PrerequisiteError`` with the fix when no sandbox can start here."""
        ...

    async def facts(self) -> Mapping[str, str]:
        """After ``preflight``: versions, drivers and places that help a person find a fault.
        ``data_root``, when present, is a folder of this machine whose disk can fill up."""
        ...

    async def check(self, source: ImageSource) -> None:
        """Raise ``UsageError`` or ``PrerequisiteError`` when the base that ``source`` names is
        not to be had here. Builds nothing, so that a run can ask before it makes any folder."""
        ...

    async def prepare(self, source: ImageSource) -> SandboxImage:
        """Build or fetch once per task version; cached by content."""
        ...

    async def create(self, image: SandboxImage, spec: SandboxSpec) -> Sandbox: ...

    async def running(self) -> list[Running]:
        """The sandboxes that this state folder's runs have here."""
        ...

    async def reap(self, *, older_than: float = 0.0, dry_run: bool = False) -> list[Reaped]:
        """Remove what belongs to owners that no longer live, and nothing else."""
        ...

    async def close(self) -> None: ...
