"""What could turn a verifier against its task: hook and configuration files, links, caches.

Taken once before the agent acts and once after, in one exec each; the two are compared
on the host.
"""

from __future__ import annotations

import io
import posixpath
import shlex
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from benchflow.contracts.errors import HardeningError
from benchflow.contracts.sandbox import ExecResult, Sandbox

HOOKS = ("conftest.py", "pytest.ini", ".pytest.ini", "pytest.toml", ".pytest.toml")
PYTEST_SECTIONS = ("setup.cfg", "tox.ini")
BUILD_CONFIG = (
    *PYTEST_SECTIONS,
    "setup.py",
    "pyproject.toml",
    "noxfile.py",
    "hatch.toml",
    "flit.ini",
    "MANIFEST.in",
    "requirements.txt",
    "requirements-dev.txt",
    "Makefile",
)
STARTUP = ("sitecustomize", "usercustomize")
PLUGINS = "entry_points.txt"
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

_SYSTEM = ("/usr/", "/bin/", "/sbin/", "/lib/", "/lib64/")
"""A link to these leads to nothing the agent can write, nor to the verifier's own files."""
_MAX_LINKS = 40
_CONTENT_LIMIT = 1024 * 1024
"""A larger file is listed without its content."""
_BLOCK = 512
_NO_NAME = "?" * 3000 + "*"
"""Paths so long that what is below them can hardly be named any more (a path holds 4096 bytes)."""
THEN_FAILED = 3
_STREAM_LIMIT = 64 * 1024 * 1024
_LIST = """sh -c 'printf "%s\\0" "$@" >&3' sh"""
_PACK = """sh -c 'tar -cf - "$@" 2>/dev/null' sh"""
_FOLDERS = " -o ".join(f"-name {name}" for name in ("__pycache__", *STARTUP))
_NAMES = " -o ".join(
    [
        *(f"-name {name}" for name in (*HOOKS, *BUILD_CONFIG, PLUGINS)),
        *(f"-name '{name}.*'" for name in STARTUP),
        "-path '*-packages/*.pth'",
    ]
)
# Folders and oversize files are listed on stderr, the rest is packed to stdout. Names travel
# as arguments, so that no name can be mistaken for another. What an ``undo`` in front removes is
# not listed.
_FUNCTION = f"""
inventory() {{
    for tool in find tar; do
        command -v $tool >/dev/null || {{ echo "the image has no $tool" >&2; exit 1; }}
    done
    mode=$1; shift
    count=$#
    while [ $count -gt 0 ]; do
        [ -d "$1" ] && set -- "$@" "$1"
        shift; count=$((count - 1))
    done
    [ $# -gt 0 ] || return 0
    find "$@" UNDO \\( -type d \\( {_FOLDERS} \\) -exec {_LIST} {{}} + -prune \\
        -o -type l -exec {_PACK} {{}} + \\
        -o -type f \\( {_NAMES} \\) -size -LIMIT -exec {_PACK} {{}} + \\
        -o ! -type d \\( {_NAMES} \\) -exec {_LIST} {{}} + \\) \\
        3>&2 2>/dev/null || [ $mode = live ]
}}
"""


@dataclass(frozen=True, slots=True)
class Found:
    """A file with its content, or a link with its target; ``data`` is None when too large."""

    data: bytes | None = None
    link: str | None = None
    mode: int = 0o644


UNREAD = Found()
"""A file too large to read: there is nothing to compare or to write back."""


@dataclass(frozen=True, slots=True)
class Inventory:
    """Absolute paths inside the sandbox. ``folders`` are caches and start-up packages."""

    files: dict[str, Found] = field(default_factory=dict[str, Found])
    folders: frozenset[str] = frozenset()

    @property
    def links(self) -> dict[str, str]:
        return {path: found.link for path, found in self.files.items() if found.link is not None}


async def take(
    sandbox: Sandbox,
    roots: Sequence[str],
    timeout: float,
    *,
    live: bool = False,
    whole: bool = False,
    undo: str = "",
    then: str = "",
) -> Inventory:
    """List ``roots`` without following links. Raises ``HardeningError`` when it cannot. Nobody
    gets out of being scored by what he leaves: folders too deep to be named are removed, and
    where there is too much configuration its content counts as unread, unless ``whole`` says
    that it is needed.

    ``live`` forgives what vanished meanwhile: processes of the agent may still run. ``undo`` is
    the front of ``find``'s expression; paths in it begin with ``.``. ``then`` is a command to run
    after the listing.
    """
    if not roots and not then:
        return Inventory()
    listing = shlex.join(["inventory", "live" if live else "still", *(f".{root}" for root in roots)])
    end = f"{listing} || exit 1\n{then or ':'} || exit {THEN_FAILED}"

    async def run(*argv: str) -> ExecResult:
        env = {"PATH": PATH}
        return await sandbox.exec(
            argv, clean_env=True, env=env, cwd="/", timeout=timeout, output_limit=_STREAM_LIMIT
        )

    async def look(content: int = _CONTENT_LIMIT) -> ExecResult:
        # The limit first: what is undone names folders of the task, whatever they are called.
        function = _FUNCTION.replace("LIMIT", str(content // _BLOCK)).replace("UNDO", undo)
        return await run("/bin/sh", "-c", function + end)

    done = await look()
    if done.exit_code == 1:
        remove = ("-path", _NO_NAME, "-prune", "-exec", "rm", "-rf", "{}", "+")
        await run("find", *(f".{root}" for root in roots), *remove)
        done = await look()
    if done.stdout_truncated and not whole:
        done = await look(_BLOCK)
    check(done, "making room" if done.exit_code == THEN_FAILED else "listing the workspace")
    if done.stdout_truncated or done.stderr_truncated:
        raise HardeningError(f"the workspace holds over {_STREAM_LIMIT >> 20} MiB of configuration files")
    listed = {name[1:] for name in names(done.stderr)}
    files = _unpack(done.stdout)
    folders = {path for path in listed if posixpath.basename(path) in ("__pycache__", *STARTUP)}
    return Inventory(files | {path: UNREAD for path in listed - folders}, frozenset(folders))


def check(done: ExecResult, what: str) -> None:
    if not done.ok:
        tail = done.err.rpartition("\0")[2][-300:].strip()
        why = "timed out" if done.timed_out else f"exit code {done.exit_code}{f': {tail}' if tail else ''}"
        raise HardeningError(f"{what} before the verifier failed: {why}")


def names(output: bytes) -> list[str]:
    """The names that a script printed, each ended by a zero byte."""
    return [name for name in output.decode("utf-8", "surrogateescape").split("\0") if name]


def is_inside(path: str, folder: str) -> bool:
    """True for the folder itself, too."""
    return f"{path.rstrip('/')}/".startswith(f"{folder.rstrip('/')}/")


def leaves(path: str, workspace: str, links: Mapping[str, str]) -> bool:
    """True for a link of the workspace that ends outside of it, other links followed, or that
    cannot be followed for certain. A loop ends nowhere."""
    if not path.startswith(workspace.rstrip("/") + "/"):
        return False
    end, certain = _end(path, links, (workspace,))
    if end is None:
        return False
    return not certain or not f"{end}/".startswith((workspace.rstrip("/") + "/", *_SYSTEM))


def leads_to(path: str, folders: Sequence[str], roots: Sequence[str], links: Mapping[str, str]) -> bool:
    """True for a link that ends in one of ``folders`` or in /proc, whose links lead anywhere, or
    that cannot be followed for certain: ``links`` are all there are below ``roots``."""
    end, certain = _end(path, links, roots)
    if end is None:
        return False
    return not certain or any(is_inside(end, folder) for folder in (*folders, "/proc"))


def _end(path: str, links: Mapping[str, str], roots: Sequence[str]) -> tuple[str | None, bool]:
    """Where a link ends; None for a loop. That is not certain when ``..`` is taken in a folder
    that may itself be reached by a link, one that is not among ``links``."""
    at, pending, steps, certain = "/", path.split("/"), 0, True
    while pending:
        part = pending.pop(0)
        if part in ("", "."):
            continue
        if part == "..":
            certain = certain and any(is_inside(at, root) or is_inside(root, at) for root in roots)
            at = posixpath.dirname(at)
            continue
        at = posixpath.join(at, part)
        link = links.get(at)
        if link is None:
            continue
        steps += 1
        if steps > _MAX_LINKS:
            return None, certain
        pending = [*link.split("/"), *pending]
        at = "/" if link.startswith("/") else posixpath.dirname(at)
    return at, certain


def _unpack(stream: bytes) -> dict[str, Found]:
    if not stream:
        return {}
    found: dict[str, Found] = {}
    try:
        with tarfile.open(fileobj=io.BytesIO(stream), mode="r:", ignore_zeros=True) as archive:
            for member in archive:
                path = posixpath.normpath(f"/{member.name}")
                if member.issym():
                    found[path] = Found(link=member.linkname)
                elif member.isreg() or member.islnk():
                    data = archive.extractfile(member)
                    found[path] = Found(data.read() if data else None, mode=member.mode & 0o777)
    except (tarfile.TarError, KeyError) as error:
        raise HardeningError(f"the listing of the workspace cannot be read: {error}") from error
    return found
