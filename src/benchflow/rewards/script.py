"""The script verifier: upload it, run it, read the reward file it wrote.

A plain ``test.sh`` runs in the workspace; a script strategy changes into the verifier's
folder itself. The verifier's files enter the sandbox only after the agent is gone.
"""

from __future__ import annotations

import posixpath
import shlex
import shutil
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from benchflow.contracts.errors import (
    RewardFileError,
    TransferError,
    UsageError,
    VerifierError,
    VerifierFailedError,
    VerifierTimeoutError,
)
from benchflow.contracts.reward import RewardEvent, VerifyRequest, VerifyResult
from benchflow.contracts.sandbox import ExecResult, Sandbox
from benchflow.contracts.task import Task
from benchflow.kernel.env import resolve_env
from benchflow.kernel.storage import Redactor, write_bytes
from benchflow.rewards import hardening, isolated
from benchflow.rewards.ctrf import collected_tests, missing_runner
from benchflow.rewards.environment import GUARD_FILE, hardened_env
from benchflow.rewards.inventory import Inventory
from benchflow.rewards.reward_files import JSON_LIMIT, Reading, RewardFile, read_reward

LOGS = "/logs/verifier"
STDOUT_FILE = "test-stdout.txt"
_GUARD = Path(__file__).with_name("pytest_guard.py")
_DOWNLOAD_LIMIT = 256 * 1024 * 1024
_OUTPUT_KEPT = 64 * 1024
_MASK_LIMIT = 16 * 1024 * 1024
_TAIL = 2000
_BASELINES_KEPT = 64

_NO_LINK = f"\ncode=$?; [ ! -L {LOGS} ] || rm -f {LOGS}; exit $code"
"""A link in the place of the results leads to what is none of them."""
_KINDS = """
logs=$1; shift
kind() {
    if [ -L "$1" ]; then echo link
    elif [ -f "$1" ]; then echo file
    elif [ -d "$1" ]; then echo folder
    elif [ -e "$1" ]; then echo special
    else echo absent; fi
}
kind "$logs"
for name; do kind "$logs/$name"; done
"""


class ScriptReward:
    """``contracts.reward.Reward`` for verifiers that are scripts."""

    def __init__(self) -> None:
        self._baselines: dict[tuple[str, ...], Inventory] = {}

    async def baseline(self, task: Task, sandbox: Sandbox, workspace: str) -> object:
        """What hardening compares with afterwards. It is the same for every fresh sandbox of an
        image, and looked for once."""
        image, user = sandbox.image, sandbox.spec.agent_user or ""
        key = (image.provider, image.ref, image.digest, workspace, user)
        found = self._baselines.pop(key, None) or await hardening.baseline(sandbox, workspace)
        self._baselines[key] = found
        if len(self._baselines) > _BASELINES_KEPT:
            del self._baselines[next(iter(self._baselines))]
        return found

    async def score(self, request: VerifyRequest) -> VerifyResult:
        """Score the state of ``request.sandbox``. Errors of the sandbox are raised; every
        fault of the verifier is in the result. Between rounds nothing is moved elsewhere."""
        if request.soft:
            request = replace(request, mode="shared")
        run = _Run(request)
        try:
            reading = await run.score()
        except VerifierError as error:
            return VerifyResult(
                None, error=error, mode=request.mode, output=run.output, notes=tuple(run.notes)
            )
        event = RewardEvent("output", "terminal", reading.reward, "verifier")
        return VerifyResult(
            reading.reward,
            items=reading.items,
            events=(event,),
            mode=request.mode,
            output=run.output,
            notes=tuple(run.notes),
        )


class _Run:
    """One verification. ``output`` and ``notes`` hold what is known, also after an error."""

    def __init__(self, request: VerifyRequest) -> None:
        self.request = request
        self.plan = request.task.verifier
        self.notes: list[str] = []
        self.output = ""
        self._redact = Redactor()

    async def score(self) -> Reading:
        request = self.request
        try:
            own, secrets = resolve_env(self.plan.env, f"the verifier of task {request.task.name!r}")
        except UsageError as error:
            raise VerifierFailedError(error.message, fix=error.fix) from error
        self._redact.add(*secrets)
        if request.hardening:
            await hardening.quiet(request)
        isolate = request.mode == "isolated"
        place = isolated.fresh(request, self.notes) if isolate else isolated.with_network(request)
        async with place as sandbox:
            make_room = hardening.clean if request.hardening else hardening.make_room
            await make_room(request, sandbox, LOGS, posixpath.dirname(GUARD_FILE))
            env = await self._environment(sandbox, own)
            await self._install(sandbox)
            done = await self._execute(sandbox, env)
            try:
                return await self._verdict(sandbox, done)
            finally:
                if request.soft:
                    await self._helper(sandbox, "cleaning up", 'rm -rf "$@"', self.plan.target, LOGS)

    async def _environment(self, sandbox: Sandbox, own: dict[str, str]) -> dict[str, str]:
        if not self.request.hardening:
            return own
        request = self.request
        task_env = {key: value for key, value in sandbox.spec.env.items() if key in request.task.env}
        return await hardened_env(
            sandbox,
            self.plan,
            base={**sandbox.image.env, **task_env},
            own=own,
            workspace=request.workspace,
            agent_user=request.agent_user,
            pytest=self._uses_pytest(),
            timeout=hardening.budget(request),
        )

    async def _install(self, sandbox: Sandbox) -> None:
        """The verifier's own files."""
        await sandbox.upload(self.plan.directory, self.plan.target)
        if self.request.hardening and self._uses_pytest():
            await sandbox.upload(_GUARD, GUARD_FILE)

    async def _execute(self, sandbox: Sandbox, env: dict[str, str]) -> ExecResult:
        """Run the command, its stderr in line with its stdout. Packages come without their
        exec bits from some archives, so every file of the verifier may be executed."""
        request, target = self.request, shlex.quote(self.plan.target)
        live = hardening.is_live(request)
        open_files = f"chmod -R u+rwx,{'go-rwx' if live else 'go+rx'} {target}"
        if not live and is_open(self.plan.directory, request.task.digest):
            open_files = ":"
        elif self.plan.user is not None:
            await self._helper(sandbox, "opening the verifier's files", open_files)
            open_files = ":"
        done = await sandbox.exec(
            ["/bin/sh", "-c", f"{{ {open_files} && ({self.plan.command}\n) }} 2>&1{_NO_LINK}"],
            user=self.plan.user,
            cwd=request.workspace,
            env=env,
            clean_env=request.hardening,
            timeout=request.timeout or self.plan.timeout_sec,
        )
        self.output = self._mask(done.stdout).decode("utf-8", "replace")[-_OUTPUT_KEPT:]
        if done.stdout_truncated:
            self.notes.append(f"{STDOUT_FILE} holds {len(done.stdout)} of {done.stdout_bytes} bytes")
        return done

    async def _verdict(self, sandbox: Sandbox, done: ExecResult) -> Reading:
        """Keep what the verifier left, then judge it. A fresh reward counts whatever the
        exit code; without one the exit code is the reason."""
        files = await self._collect(sandbox, done)
        if done.timed_out:
            limit = self.request.timeout or self.plan.timeout_sec
            raise VerifierTimeoutError(
                f"the verifier did not end within {limit:g} seconds",
                fix="raise verifier.timeout_sec",
                detail=self._tail(),
            )
        if done.exit_code and not any(file.present for file in files):
            what = f"the verifier ended with exit code {done.exit_code} and wrote no reward"
            raise VerifierFailedError(f"{what}: {self._last_line()}", detail=self._tail())
        reading = read_reward(*files, self.plan.reward_range)
        if done.exit_code:
            self.notes.append(f"the verifier ended with exit code {done.exit_code} after its reward")
        if self.plan.expects_ctrf and reading.reward == 0 and not collected_tests(self.request.logs):
            raise VerifierFailedError(
                "the verifier gave 0 without a test report: its ctrf.json is missing or counts no test",
                fix=f"see {STDOUT_FILE}: a dependency of the verifier may not have been installed",
                detail=self._tail(),
            )
        missing = missing_runner(done.stdout) if reading.reward == 0 and self._uses_pytest() else None
        if missing:
            raise VerifierFailedError(
                f"the verifier gave 0 without running a test: {missing}",
                fix="install the test runner in the image, or in the verifier before it is used",
                detail=self._tail(),
            )
        return reading

    async def _collect(self, sandbox: Sandbox, done: ExecResult) -> tuple[RewardFile, RewardFile]:
        """Copy the results to the host. Links and special files are noted and left behind."""
        names = [posixpath.basename(path) for path in (self.plan.reward_text, self.plan.reward_json)]
        logs = self.request.logs
        shutil.rmtree(logs, ignore_errors=True)
        try:
            special = await sandbox.download(LOGS, logs, limit=_DOWNLOAD_LIMIT)
            if not logs.is_dir():
                logs.unlink()
                raise TransferError(f"{LOGS} is a file")
            kinds = [_kind(logs / name, name in special) for name in names]
        except TransferError as error:
            self.notes.append(f"only the reward files were kept: {error}")
            listed = await self._helper(sandbox, "looking at the results", _KINDS, LOGS, *names)
            folder, *kinds = listed.out.split()
            if folder != "folder":
                raise RewardFileError(f"{LOGS} is no folder after the verifier ran") from error
            logs.mkdir(parents=True, exist_ok=True)
            for name, kind in zip(names, kinds, strict=True):
                if kind == "file":
                    await sandbox.download(f"{LOGS}/{name}", logs / name, limit=_DOWNLOAD_LIMIT)
        files = [_read(logs / name, kind) for name, kind in zip(names, kinds, strict=True)]
        self._mask_files(logs)
        write_bytes(logs / STDOUT_FILE, self._mask(done.stdout), sync=False)
        return files[0], files[1]

    def _mask_files(self, folder: Path) -> None:
        for path in folder.rglob("*"):
            if path.is_file() and not path.is_symlink() and path.stat().st_size <= _MASK_LIMIT:
                data = path.read_bytes()
                if (masked := self._mask(data)) != data:
                    write_bytes(path, masked, sync=False)

    def _uses_pytest(self) -> bool:
        return mentions_pytest(self.plan.directory, self.request.task.digest, self.plan.command)

    async def _helper(self, sandbox: Sandbox, what: str, script: str, *args: str) -> ExecResult:
        argv = ["/bin/sh", "-c", script, "sh", *args]
        done = await hardening.root_exec(sandbox, argv, hardening.budget(self.request))
        if not done.ok:
            raise VerifierFailedError(f"{what} in the sandbox failed: {done.err[-300:].strip()}")
        return done

    def _mask(self, data: bytes) -> bytes:
        data = self._redact(data)
        return self.request.redact(data) if self.request.redact else data

    def _tail(self) -> str:
        return self.output[-_TAIL:]

    def _last_line(self) -> str:
        lines = self.output.strip().splitlines()
        return lines[-1][:200] if lines else "no output"


@lru_cache(maxsize=256)
def mentions_pytest(directory: Path, digest: str, command: str) -> bool:
    """True when the verifier's command or one of its files names pytest. ``digest`` pins
    the folder's content for the cache."""
    if "pytest" in command:
        return True
    files = (path for path in directory.rglob("*") if path.is_file() and path.stat().st_size <= _MASK_LIMIT)
    return any(b"pytest" in path.read_bytes() for path in files)


@lru_cache(maxsize=256)
def is_open(directory: Path, digest: str) -> bool:
    """True when everybody may read and execute the whole folder as it stands. ``digest`` pins
    its content for the cache."""
    return all(
        path.lstat().st_mode & 0o755 == 0o755
        for path in (directory, *directory.rglob("*"))
        if not path.is_symlink()
    )


def _kind(path: Path, special: bool) -> str:
    """What a result is, by what was copied of it."""
    if special:
        return "special"
    if path.is_symlink():
        return "link"
    return "file" if path.is_file() else "folder" if path.is_dir() else "absent"


def _read(path: Path, kind: str) -> RewardFile:
    if kind != "file":
        return RewardFile(path.name, kind)
    with path.open("rb") as handle:
        return RewardFile(path.name, kind, handle.read(JSON_LIMIT + 1))
