"""exec: results, input, environment, identity, and what a timeout leaves."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from benchflow.contracts.errors import SandboxError
from benchflow.contracts.sandbox import Limits, Sandbox

Create = Callable[..., Awaitable[Sandbox]]
Inside = Callable[[Sandbox, str], Awaitable[list[str]]]


@pytest.mark.parametrize("code", [0, 1, 2, 127, 255])
async def test_exit_codes_are_the_commands_own(sandbox: Sandbox, code: int) -> None:
    result = await sandbox.exec(f"exit {code}")
    assert result.exit_code == code
    assert result.ok == (code == 0)
    assert result.duration > 0
    assert not result.timed_out


@pytest.mark.parametrize(("name", "number"), [("TERM", 15), ("KILL", 9), ("SEGV", 11)])
async def test_a_signal_is_a_negative_exit_code(sandbox: Sandbox, name: str, number: int) -> None:
    assert (await sandbox.exec(["sh", "-c", f"kill -{name} $$"])).exit_code == -number


async def test_a_string_meets_a_shell_and_a_list_does_not(sandbox: Sandbox) -> None:
    assert (await sandbox.exec("echo $((1 + 1)) | cat")).out == "2\n"
    assert (await sandbox.exec(["echo", "$HOME", "a  b", "", "*"])).out == "$HOME a  b  *\n"


async def test_a_command_that_does_not_exist_fails(sandbox: Sandbox) -> None:
    result = await sandbox.exec(["no-such-command"])
    assert result.exit_code in (126, 127)
    assert "no-such-command" in result.err


async def test_stdout_and_stderr_stay_apart(sandbox: Sandbox) -> None:
    result = await sandbox.exec("echo out; echo err >&2")
    assert (result.out, result.err) == ("out\n", "err\n")
    assert (result.stdout_bytes, result.stderr_bytes) == (4, 4)


async def test_stdin_is_sent_and_then_closed(sandbox: Sandbox) -> None:
    data = bytes(range(256)) * 4096
    result = await sandbox.exec(["cat"], stdin=data)
    assert result.ok
    assert result.stdout == data


async def test_without_stdin_a_reader_sees_its_end_at_once(sandbox: Sandbox) -> None:
    assert (await sandbox.exec("cat; echo done")).out == "done\n"


async def test_a_command_may_leave_its_stdin_unread(sandbox: Sandbox) -> None:
    result = await sandbox.exec("echo ignored", stdin=b"x" * (16 << 20))
    assert (result.exit_code, result.out) == (0, "ignored\n")


async def test_environment_of_image_spec_and_call_in_this_order(create: Create) -> None:
    sandbox = await create(env={"FROM_SPEC": "spec", "BOTH": "spec"})
    result = await sandbox.exec(
        "echo $FROM_IMAGE $FROM_SPEC $BOTH $FROM_CALL", env={"BOTH": "call", "FROM_CALL": "a b\nc"}
    )
    assert result.out.split() == ["image", "spec", "call", "a", "b", "c"]


async def test_a_clean_environment_has_only_what_is_given(create: Create) -> None:
    sandbox = await create(env={"FROM_SPEC": "spec"})
    result = await sandbox.exec(["env"], clean_env=True, env={"GIVEN": "1"})
    found = dict(line.split("=", 1) for line in result.out.splitlines())
    assert found.pop("GIVEN") == "1"
    assert not {"FROM_SPEC", "FROM_IMAGE"} & set(found)
    assert set(found) <= {"PATH", "HOME", "USER", "LOGNAME", "PWD", "SHLVL", "_"}


async def test_nothing_of_the_hosts_environment_is_seen(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOST_SECRET", "hunter2")
    assert "hunter2" not in (await sandbox.exec("env; cat /proc/[0-9]*/environ")).out


async def test_the_working_directory(sandbox: Sandbox) -> None:
    assert (await sandbox.exec("pwd", cwd="/tmp")).out == "/tmp\n"
    assert not (await sandbox.exec("pwd", cwd="/no/such/place")).ok


async def test_the_workspace_is_never_the_root(create: Create) -> None:
    """C64: also when the image sets no WORKDIR and when somebody asks for ``/``."""
    for asked in (None, "/", "//", "/."):
        sandbox = await create(workdir=asked)
        where = (await sandbox.exec("pwd")).out.strip()
        assert where not in ("", "/")
        assert (await sandbox.exec(["stat", "-c", "%U", "/"])).out == "root\n"
        assert (await sandbox.exec("touch mine", user="agent")).ok


async def test_the_agent_exists_and_is_nobody_special(sandbox: Sandbox) -> None:
    if not sandbox.capabilities.multiple_users:
        pytest.skip(sandbox.capabilities.why["multiple_users"])
    result = await sandbox.exec("id -u; id -un; echo $HOME; cd ~ && touch here", user="agent")
    uid, name, home = result.out.split()
    assert result.ok
    assert (int(uid) > 0, name, home) == (True, "agent", "/home/agent")
    assert not (await sandbox.exec("echo x >/etc/x", user="agent")).ok
    assert not (await sandbox.exec("cat /etc/shadow", user="agent")).ok
    assert not (await sandbox.exec("ls /root", user="agent")).ok


async def test_users_by_name_and_number(sandbox: Sandbox) -> None:
    assert (await sandbox.exec(["id", "-u"])).out == "0\n"
    if not sandbox.capabilities.multiple_users:
        pytest.skip(sandbox.capabilities.why["multiple_users"])
    agent = (await sandbox.exec(["id", "-u"], user="agent")).out.strip()
    assert (await sandbox.exec(["id", "-un"], user=agent)).out == "agent\n"
    assert (await sandbox.exec(["id", "-u"], user="4321")).out == "4321\n"


async def test_an_unknown_user_is_an_error(sandbox: Sandbox) -> None:
    with pytest.raises(SandboxError, match="nobody-has-this-name"):
        await sandbox.exec("true", user="nobody-has-this-name")
    assert (await sandbox.exec("true")).ok


FIELDS = ("Uid", "Gid", "CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb", "NoNewPrivs", "Seccomp")


def fields(status: str) -> dict[str, str]:
    pairs = (line.split(":", 1) for line in status.splitlines())
    return {name: value.strip() for name, value in pairs if name in FIELDS}


async def test_start_exec_and_spawn_have_equal_powers(sandbox: Sandbox) -> None:
    first = fields((await sandbox.exec(["cat", "/proc/1/status"])).out)
    executed = fields((await sandbox.exec(["cat", "/proc/self/status"])).out)
    process = await sandbox.spawn(["cat", "/proc/self/status"])
    spawned = fields((await process.stdout.read()).decode())
    assert await process.wait() == 0
    assert set(first) == set(FIELDS)
    assert first == executed == spawned
    assert executed["NoNewPrivs"] == "1"
    assert executed["Seccomp"] == "2"
    assert not int(executed["CapEff"], 16) & 1 << 21, "CAP_SYS_ADMIN"


async def test_the_agent_has_no_capability_by_exec_or_spawn(sandbox: Sandbox) -> None:
    if not sandbox.capabilities.multiple_users:
        pytest.skip(sandbox.capabilities.why["multiple_users"])
    executed = fields((await sandbox.exec(["cat", "/proc/self/status"], user="agent")).out)
    process = await sandbox.spawn(["cat", "/proc/self/status"], user="agent")
    assert fields((await process.stdout.read()).decode()) == executed
    assert await process.wait() == 0
    for name in ("CapPrm", "CapEff", "CapAmb"):  # CapInh gives nothing under NoNewPrivs
        assert int(executed[name], 16) == 0
    assert (executed["NoNewPrivs"], executed["Seccomp"]) == ("1", "2")


REFORK = """
import os, time
while True:
    if os.fork():
        os._exit(0)
    os.setsid()
    time.sleep(0.01)
"""
STUBBORN = {
    "a child": "sleep WORD",
    "a busy loop beside it": "sleep WORD & while :; do :; done",
    "ignoring TERM": "trap '' TERM HUP INT; while :; do sleep WORD; done",
    "a double fork in its own session": (
        "(setsid sh -c \"trap '' TERM HUP; while :; do sleep WORD; done\" >/dev/null 2>&1 &) ; sleep WORD"
    ),
    "holding the pipes": "(setsid sleep WORD &); sleep WORD",
    "a daemon that forks again and again": 'python3 -c "$REFORK" WORD >/dev/null 2>&1 & sleep WORD',
}


@pytest.mark.parametrize("how", STUBBORN)
async def test_a_timeout_leaves_nothing_running(
    sandbox: Sandbox, how: str, marker: str, inside: Inside
) -> None:
    """C16."""
    keeper = await sandbox.spawn(["sleep", "98765.5"])
    command = STUBBORN[how].replace("WORD", marker)
    result = await asyncio.wait_for(sandbox.exec(command, timeout=1.0, env={"REFORK": REFORK}), 60)
    assert result.timed_out
    assert not result.ok
    assert await inside(sandbox, marker) == []
    assert len(await inside(sandbox, "98765.5")) == 1, "another command was killed too"
    await keeper.kill()


async def test_a_timed_out_command_keeps_the_output_so_far(sandbox: Sandbox, marker: str) -> None:
    result = await sandbox.exec(f"echo early; echo hint >&2; sleep {marker}", timeout=1.0)
    assert (result.out, result.err, result.timed_out) == ("early\n", "hint\n", True)


async def test_a_cancelled_exec_leaves_nothing_running(sandbox: Sandbox, marker: str, inside: Inside) -> None:
    task = asyncio.ensure_future(sandbox.exec(f"echo started >/tmp/started; sleep {marker}"))
    while not (await sandbox.exec("test -s /tmp/started")).ok:
        pass
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await inside(sandbox, marker) == []


async def test_a_daemon_left_behind_does_not_hold_the_call(
    sandbox: Sandbox, marker: str, inside: Inside
) -> None:
    """A service started in the background outlives its exec, as in any container."""
    result = await asyncio.wait_for(
        sandbox.exec(f"setsid sleep {marker} >/dev/null 2>&1 </dev/null & echo started"), 60
    )
    assert (result.exit_code, result.out) == (0, "started\n")
    assert len(await inside(sandbox, marker)) == 1


async def test_commands_run_side_by_side(sandbox: Sandbox) -> None:
    """The first waits for what the last writes: one at a time would never end."""
    await sandbox.exec("mkfifo /tmp/turn")
    results = await asyncio.wait_for(
        asyncio.gather(
            sandbox.exec("cat /tmp/turn"),
            *(sandbox.exec(f"echo {index}") for index in range(20)),
            sandbox.exec("echo now >/tmp/turn"),
        ),
        60,
    )
    assert [result.out for result in results] == ["now\n", *(f"{index}\n" for index in range(20)), ""]


MB = 1 << 20


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
@pytest.mark.parametrize("extra", [-1, 0, 1])
async def test_output_at_the_limit(sandbox: Sandbox, stream: str, extra: int) -> None:
    """C38."""
    size = 100_000 + extra
    redirect = " >&2" if stream == "stderr" else ""
    result = await sandbox.exec(f"head -c {size} /dev/zero | tr '\\0' x{redirect}", output_limit=100_000)
    kept: bytes = getattr(result, stream)
    assert result.ok
    assert getattr(result, f"{stream}_bytes") == size
    assert getattr(result, f"{stream}_truncated") == (extra > 0)
    assert len(kept) <= 100_000
    if extra <= 0:
        assert kept == b"x" * size


async def test_a_flood_is_bounded_counted_and_keeps_both_ends(sandbox: Sandbox) -> None:
    """C38: 100 MB, the middle dropped."""
    result = await sandbox.exec("seq 1 13000000")
    assert result.ok
    assert result.stdout_bytes > 100 * MB
    assert result.stdout_truncated
    assert len(result.stdout) <= 8 * MB
    assert result.stdout.startswith(b"1\n2\n3\n")
    assert result.stdout.endswith(b"12999999\n13000000\n")


async def test_one_endless_line(sandbox: Sandbox) -> None:
    result = await sandbox.exec(f"head -c {50 * MB} /dev/zero | tr '\\0' y >&2")
    assert (result.exit_code, result.stderr_bytes) == (0, 50 * MB)
    assert result.stderr_truncated
    assert set(result.stderr) == {ord("y")}


async def test_both_streams_flooded_at_once_do_not_hang(sandbox: Sandbox) -> None:
    half = f"head -c {20 * MB} /dev/zero"
    result = await asyncio.wait_for(sandbox.exec(f"{half} & {half} >&2; wait"), 120)
    assert (result.exit_code, result.stdout_bytes, result.stderr_bytes) == (0, 20 * MB, 20 * MB)


async def test_bytes_that_are_no_text_are_kept(sandbox: Sandbox) -> None:
    """C36."""
    result = await sandbox.exec(r"printf 'ok\342\050\n'; printf '\377\376' >&2")
    assert result.stdout == b"ok\xe2(\n"
    assert result.out == "ok\ufffd(\n"
    assert result.stderr == b"\xff\xfe"


async def test_a_character_split_between_reads_is_whole(sandbox: Sandbox) -> None:
    result = await sandbox.exec(
        ["python3", "-c", "import os\nfor b in '\u20ac'.encode(): os.write(1, bytes([b]))"]
    )
    assert result.out == "\u20ac"


async def test_an_unknown_service_is_an_error(sandbox: Sandbox) -> None:
    if sandbox.capabilities.services:
        pytest.skip("this provider runs services")
    with pytest.raises(Exception, match="db"):
        await sandbox.exec("true", service="db")


async def test_large_requests_arrive_whole(sandbox: Sandbox) -> None:
    word = "é" * 40_000
    result = await sandbox.exec(["sh", "-c", 'printf %s "$1$BIG" | wc -c', "sh", word], env={"BIG": word})
    assert result.out.strip() == str(2 * len(word.encode()))


async def test_a_sandbox_full_of_processes_can_be_cleaned(create: Create) -> None:
    """C20: an agent that forks without end does not keep the verifier away."""
    sandbox = await create(limits=Limits(pids=60, storage_mb=16))
    if not sandbox.capabilities.pids_limit:
        pytest.skip(sandbox.capabilities.why["pids_limit"])
    bomb = "import os\nwhile True:\n  try: os.fork()\n  except OSError: pass\n"
    await sandbox.spawn(["python3", "-c", bomb], user="agent")
    while True:
        try:
            await sandbox.exec(["true"])
        except SandboxError:
            break  # full
    await sandbox.kill_processes(user="agent")
    assert (await sandbox.exec("cat /proc/[0-9]*/comm")).out.count("python3") == 0
    assert (await sandbox.exec(["echo", "clean"])).out == "clean\n"
