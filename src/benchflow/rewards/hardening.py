"""Between the agent's last action and the verifier's first: leave nothing that could
change the verdict except the work itself.

The order matters: the agent's processes go first, then what they planted is compared with
the baseline, and only then do the verifier's files enter the sandbox.
"""

from __future__ import annotations

import io
import posixpath
import re
import shlex
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass, field

from benchflow.contracts.reward import VerifyRequest
from benchflow.contracts.sandbox import ExecResult, Sandbox
from benchflow.contracts.task import VerifierPlan
from benchflow.rewards import inventory
from benchflow.rewards.inventory import UNREAD, Found, Inventory, check, is_inside, leads_to, leaves

_ROOM = """
room() {
    user=$1 target_mode=$2 logs_mode=$3; shift 3
    rm -rf "$@" && mkdir -p -m "$target_mode" "$1" && mkdir -p -m "$logs_mode" "$2" || return 1
    [ "$user" = 0 ] || chown "$user" "$1" "$2"
}
"""
_TEMPORARY = ("/tmp", "/var/tmp", "/dev/shm")
_SHARED = (*_TEMPORARY, "/logs")


@dataclass(frozen=True, slots=True)
class Plan:
    """What to undo: paths to remove, and baseline files to write back. ``revive`` are
    baseline files that were deleted: written back where their folder still exists."""

    remove: tuple[str, ...] = ()
    restore: Mapping[str, Found] = field(default_factory=dict[str, Found])
    revive: Mapping[str, Found] = field(default_factory=dict[str, Found])


async def baseline(sandbox: Sandbox, workspace: str) -> Inventory:
    """What stood where the agent can write before it acted."""
    roots = _roots(workspace, sandbox.spec.agent_user)
    return await inventory.take(sandbox, roots, _patience(0), whole=True)


async def quiet(request: VerifyRequest) -> None:
    """Kill the agent's processes, unless the task scores a running service. Raises
    ``HardeningError`` when they cannot be proved gone."""
    if not is_live(request):
        await request.sandbox.kill_processes(user=request.agent_user)


def is_live(request: VerifyRequest) -> bool:
    """True when processes of the agent may still run while the verifier does."""
    return request.soft or not request.task.verifier.kill_processes


async def clean(request: VerifyRequest, sandbox: Sandbox, logs: str, extra: str) -> None:
    """Undo what an agent could have planted in ``sandbox``, and make room there."""
    live, patience = is_live(request), budget(request)
    before = request.baseline if isinstance(request.baseline, Inventory) else Inventory()
    roots = _roots(request.workspace, request.agent_user)
    room = _room(request, logs, extra)
    undo = "" if live else _undo(request.workspace, request.task.verifier.user or "root")
    now = await inventory.take(sandbox, roots, patience, live=live, undo=undo, then=room)
    plan = plan_undo(before, now, request.workspace, request.task.verifier, soft=request.soft)
    await _apply(sandbox, plan, patience)


async def make_room(request: VerifyRequest, sandbox: Sandbox, logs: str, extra: str) -> None:
    """Make the verifier's folder and an empty ``logs``, whatever stood there. While processes
    of the agent live, only the verifier's user may read the first and write the second."""
    argv = ["/bin/sh", "-c", _room(request, logs, extra)]
    check(await root_exec(sandbox, argv, budget(request)), "making room")


def _room(request: VerifyRequest, logs: str, extra: str) -> str:
    modes = ("0700", "0755") if is_live(request) else ("0755", "0777")
    plan = request.task.verifier
    return f"{_ROOM}{shlex.join(['room', plan.user or '0', *modes, plan.target, logs, extra])}"


def _undo(workspace: str, owner: str) -> str:
    """What goes without a look at the baseline, as the front of ``find``'s expression: the
    Python files of the temporary folders are removed, and the workspace goes to the verifier's
    user, so that its tools trust what they read."""
    folder = re.sub(r"([*?\[\\])", r"\\\1", workspace.rstrip("/"))
    work = (
        f"-path {shlex.quote(f'.{folder}/*')} -o -path {shlex.quote(f'.{folder}')}"
        if folder
        else "! -name '*'"
    )
    places = " -o ".join(f"-path '.{place}/*'" for place in _TEMPORARY)
    scripts = f"! -type d -name '*.py' \\( {places} \\) ! \\( {work} \\) -exec rm -f {{}} +"
    user = shlex.quote(owner)
    return f"{scripts} -o \\( ! \\( {work} \\) -o -user {user} -o -exec chown -h {user} {{}} + \\)"


def budget(request: VerifyRequest) -> float:
    """Seconds that a helper command may take: never less than the verifier's own limit."""
    return _patience(request.timeout or request.task.verifier.timeout_sec)


def plan_undo(
    before: Inventory, now: Inventory, workspace: str, verifier: VerifierPlan, *, soft: bool = False
) -> Plan:
    """Compare two inventories. New hooks, caches, links that leave the workspace and links to
    the verifier's folders go;
    changed files get their old content back. Between rounds only hooks are touched."""

    def kept(path: str) -> bool:
        name = posixpath.basename(path)
        if name == "conftest.py":
            return not verifier.cleanup_conftests
        return soft and name in inventory.BUILD_CONFIG

    links = now.links
    private = (verifier.target, posixpath.dirname(verifier.reward_text))
    roots = (workspace, "/home", *_SHARED)
    new_folders = now.folders - before.folders
    remove = {path for path in new_folders if not soft or posixpath.basename(path) in inventory.STARTUP}
    restore: dict[str, Found] = {}
    for path, found in now.files.items():
        old = before.files.get(path)
        if old in (found, UNREAD):
            continue
        if not _is_listed(path):
            if not soft and (leaves(path, workspace, links) or leads_to(path, private, roots, links)):
                remove.add(path)
        elif old is not None and not kept(path):
            remove.add(path)
            restore[path] = old
        elif old is None and not kept(path) and _is_hook(path, found):
            remove.add(path)
    revive = {
        path: old
        for path, old in before.files.items()
        if path not in now.files and old != UNREAD and _is_listed(path) and not kept(path)
    }
    return Plan(tuple(sorted(remove)), restore, revive)


def _is_listed(path: str) -> bool:
    """True for a name that the inventory looks for, whatever its kind."""
    name = posixpath.basename(path)
    listed = (*inventory.HOOKS, *inventory.BUILD_CONFIG, inventory.PLUGINS)
    return name in listed or _is_startup(path)


def _is_startup(path: str) -> bool:
    """Files that Python reads by itself when it starts."""
    folder, name = posixpath.split(path)
    return name.partition(".")[0] in inventory.STARTUP or (name.endswith(".pth") and "-packages" in folder)


def _is_hook(path: str, found: Found) -> bool:
    """True for a new file that would run, or would configure, inside the verifier's tools."""
    name = posixpath.basename(path)
    if name in inventory.HOOKS or _is_startup(path):
        return True
    content = found.data if found.data is not None else b"[pytest11]"
    if name == inventory.PLUGINS:
        return b"pytest11" in content
    return name in inventory.PYTEST_SECTIONS and b"pytest" in content


async def _apply(sandbox: Sandbox, plan: Plan, timeout: float) -> None:
    """Remove, then write back. Names go through stdin: there may be more than argv holds."""
    remove, restore = set(plan.remove), dict(plan.restore)
    if plan.revive:
        for path in await _with_folder(sandbox, sorted(plan.revive), timeout):
            remove.add(path)
            restore[path] = plan.revive[path]
    if remove:
        names = "\0".join(sorted(remove)).encode("utf-8", "surrogateescape")
        done = await root_exec(sandbox, ["xargs", "-0", "rm", "-rf", "--"], timeout, stdin=names)
        check(done, "removing what the agent planted")
    await write_files(sandbox, restore, timeout)


async def write_files(sandbox: Sandbox, files: Mapping[str, Found], timeout: float) -> None:
    """Write files and links, owned by root, at their absolute paths."""
    if files:
        done = await root_exec(sandbox, ["tar", "-C", "/", "-xpf", "-"], timeout, stdin=_pack(files))
        check(done, "restoring files")


async def _with_folder(sandbox: Sandbox, paths: list[str], timeout: float) -> list[str]:
    """Those paths whose folder still exists."""
    script = """for path; do [ -d "${path%/*}" ] && printf '%s\\0' "$path"; done; exit 0"""
    command = ["xargs", "-0", "/bin/sh", "-c", script, "sh"]
    names = "\0".join(paths).encode("utf-8", "surrogateescape")
    done = await root_exec(sandbox, command, timeout, stdin=names)
    check(done, "looking for deleted build configuration")
    return inventory.names(done.stdout)


async def root_exec(
    sandbox: Sandbox, argv: list[str], timeout: float, stdin: bytes | None = None
) -> ExecResult:
    """A helper command as root that sees nothing of the image's or the agent's environment."""
    env = {"PATH": inventory.PATH}
    return await sandbox.exec(argv, clean_env=True, env=env, cwd="/", stdin=stdin, timeout=timeout)


def _pack(files: Mapping[str, Found]) -> bytes:
    """A tar of baseline files and links, owned by root."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for path, found in sorted(files.items()):
            member = tarfile.TarInfo(path.lstrip("/"))
            member.mode = found.mode
            if found.link is not None:
                member.type, member.linkname = tarfile.SYMTYPE, found.link
                archive.addfile(member)
            else:
                data = found.data or b""
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))
    return buffer.getvalue()


def _roots(workspace: str, agent_user: str | None) -> list[str]:
    """Folders to look through: the workspace, the agent's home, and where any user can write.
    Never ``/``."""
    home = f"/home/{agent_user}" if agent_user else "/"
    roots = [root.rstrip("/") for root in (workspace, home, *_SHARED) if root.strip("/")]
    return [root for root in dict.fromkeys(roots) if not any(is_inside(root, o) for o in roots if o != root)]


def _patience(seconds: float) -> float:
    return max(seconds, 600.0)
