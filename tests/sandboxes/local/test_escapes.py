"""What a hostile program inside tries, as root and as the agent."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from benchflow.contracts.sandbox import Limits
from benchflow.sandboxes.local.nursery import MASKED
from benchflow.sandboxes.local.sandbox import LocalSandbox
from benchflow.sandboxes.local.seccomp import DENIED

EPERM, ENOSYS, EAFNOSUPPORT = 1, 38, 97

ATTACK = """
import ctypes, json, os, sys
libc = ctypes.CDLL(None, use_errno=True)
def attempt(number, *arguments):
    ctypes.set_errno(0)
    padded = [ctypes.c_ulong(value) for value in (*arguments, 0, 0, 0, 0, 0, 0)][:6]
    answer = libc.syscall(ctypes.c_long(number), *padded)
    return ctypes.get_errno() if answer < 0 else 0
calls = json.load(sys.stdin)
json.dump({name: attempt(*call) for name, call in calls.items()}, sys.stdout)
"""


def column() -> int:
    return 0 if os.uname().machine == "x86_64" else 1


async def attempts(sandbox: LocalSandbox, calls: dict[str, list[int]], user: str | None) -> dict[str, int]:
    result = await sandbox.exec(["python3", "-c", ATTACK], user=user, stdin=json.dumps(calls).encode())
    assert result.ok, result.err
    return json.loads(result.out)


@pytest.mark.parametrize("user", [None, "agent"])
async def test_denied_system_calls_answer_eperm(sandbox: LocalSandbox, user: str | None) -> None:
    calls = {name: [number] for name, numbers in DENIED.items() if (number := numbers[column()]) is not None}
    assert len(calls) > 40
    answers = await attempts(sandbox, calls, user)
    assert answers == dict.fromkeys(calls, EPERM)


async def test_namespaces_cannot_be_made_by_clone(sandbox: LocalSandbox) -> None:
    clone = (56, 220)[column()]
    kinds = {"user": 0x10000000, "mount": 0x20000, "pid": 0x20000000, "net": 0x40000000, "uts": 0x4000000}
    answers = await attempts(sandbox, {name: [clone, flag] for name, flag in kinds.items()}, None)
    assert answers == dict.fromkeys(kinds, EPERM)
    assert (await attempts(sandbox, {"clone3": [435]}, None)) == {"clone3": ENOSYS}


async def test_arguments_are_checked_where_only_some_are_harmful(sandbox: LocalSandbox) -> None:
    personality, socket, ioctl = ((135, 41, 16), (92, 198, 29))[column()]
    answers = await attempts(
        sandbox,
        {
            "ask for the personality": [personality, 0xFFFFFFFF],
            "read implies exec": [personality, 0x0400000],
            "vsock": [socket, 40, 1, 0],
            "alg": [socket, 38, 5, 0],
            "unix socket": [socket, 1, 1, 0],
            "push input into a terminal": [ioctl, 0, 0x5412],
        },
        "agent",
    )
    assert answers == {
        "ask for the personality": 0,
        "read implies exec": EPERM,
        "vsock": EAFNOSUPPORT,
        "alg": EAFNOSUPPORT,
        "unix socket": 0,
        "push input into a terminal": EPERM,
    }


SWITCHES = ("sys/kernel/core_pattern", "sys/kernel/hostname", "sysrq-trigger", "sys/vm/overcommit_memory",
            "irq/default_smp_affinity")  # fmt: skip


async def test_the_kernels_switches_cannot_be_thrown(sandbox: LocalSandbox, as_root: None) -> None:
    before = Path("/proc/sys/kernel/core_pattern").read_text()
    for name in SWITCHES:
        result = await sandbox.exec(f"echo 1 > /proc/{name}")
        assert result.exit_code != 0, name
    assert Path("/proc/sys/kernel/core_pattern").read_text() == before
    assert (await sandbox.exec("head -c 1 /proc/kcore")).stdout == b""


async def test_the_hosts_devices_cannot_be_changed(sandbox: LocalSandbox, as_root: None) -> None:
    before = os.stat("/dev/null")
    for attack in ("chmod 600 /dev/null", "chown 1000 /dev/null", "touch -d @0 /dev/null", "rm -f /dev/null"):
        await sandbox.exec(attack)
    after = os.stat("/dev/null")
    assert (after.st_mode, after.st_uid, after.st_mtime) == (before.st_mode, before.st_uid, before.st_mtime)
    assert (await sandbox.exec("echo works > /dev/null && head -c 4 /dev/zero | wc -c")).out.strip() == "4"


async def test_a_made_up_device_node_leads_nowhere(sandbox: LocalSandbox) -> None:
    result = await sandbox.exec("mknod /tmp/memory c 1 1 && head -c 1 /tmp/memory")
    assert result.exit_code != 0


@pytest.mark.parametrize("user", [None, "agent"])
async def test_the_program_of_process_one_is_out_of_reach(sandbox: LocalSandbox, user: str | None) -> None:
    """The interpreter trick of CVE-2019-5736, and plain writes through /proc."""
    for target in ("/proc/1/exe", "/dev/.benchflow/idle"):
        for attack in (f"chmod u+s {target}", f"sh -c 'echo x >> {target}'", f"rm -f {target}"):
            assert (await sandbox.exec(attack, user=user)).exit_code != 0, attack
    trick = "printf '#!/proc/self/exe\\n' > /tmp/trick && chmod +x /tmp/trick && /tmp/trick"
    await sandbox.exec(trick, user=user, timeout=10)
    writer = "import os; fd = os.open('/proc/self/exe', os.O_RDWR)"
    assert (await sandbox.exec(["python3", "-c", writer], user=user)).exit_code != 0


@pytest.mark.parametrize("user", [None, "agent"])
async def test_the_helper_is_neither_seen_nor_signalled(sandbox: LocalSandbox, user: str | None) -> None:
    count = "for f in /proc/[0-9]*/comm; do echo $f; done | wc -l"
    await sandbox.exec("kill -9 -1", user=user)
    await sandbox.exec("kill -9 1; kill -STOP 1; kill -TERM 1", user=user)
    assert (
        int((await sandbox.exec(count, user=user)).out) <= 6
    )  # process 1, two supervisors, the shell and its parts
    assert (await sandbox.exec("cat /proc/1/comm", user=user)).out.strip() == "idle"


PTRACE = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
for name in os.listdir('/proc'):
    if name.isdigit() and int(name) != os.getpid():
        parent = int(open(f'/proc/{name}/stat').read().rsplit(')', 1)[1].split()[1])
        if parent == 0 and name != '1':
            taken = libc.ptrace(16, int(name), None, None) == 0
            try: memory = open(f'/proc/{name}/mem', 'rb'); memory = True
            except OSError: memory = False
            print(name, taken, memory)
"""


@pytest.mark.parametrize("user", [None, "agent"])
async def test_a_supervisor_cannot_be_traced_or_read(sandbox: LocalSandbox, user: str | None) -> None:
    result = await sandbox.exec(["python3", "-c", PTRACE], user=user)
    seen = [line.split() for line in result.out.splitlines()]
    assert seen, result.err
    assert all(line[1:] == ["False", "False"] for line in seen), seen


@pytest.mark.parametrize("user", [None, "agent"])
async def test_nothing_but_its_stdio_is_inherited(sandbox: LocalSandbox, user: str | None) -> None:
    listing = "import os; print(sorted(int(f) for f in os.listdir('/proc/self/fd'))[:-1])"
    assert (await sandbox.exec(["python3", "-c", listing], user=user)).out.strip() == "[0, 1, 2]"


async def test_the_host_base_shows_no_place_where_people_keep_things(
    sandbox: LocalSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden = [
        str(Path(__file__).resolve().parents[3]),
        "/var/run/docker.sock",
        "/run/docker.sock",
        "/etc/shadow-",
        "/etc/pip.conf",
        os.getcwd(),
    ]
    hidden += [str(Path.home() / name) for name in (".ssh", ".cache", ".config", ".bashrc")]
    script = (
        "for p in $PLACES; do [ -e $p ] && echo $p; done; ls -A /root /home /run /mnt /srv /opt 2>/dev/null"
    )
    result = await sandbox.exec(script, env={"PLACES": " ".join(hidden)})
    shown = result.out.split()
    assert [line for line in shown if not line.endswith(":")] == ["agent"]


async def test_mounts_name_no_place_to_write_on_the_host(sandbox: LocalSandbox) -> None:
    lines = (await sandbox.exec("cat /proc/self/mountinfo")).out.splitlines()
    writable = [line for line in lines if "rw" in line.split()[5].split(",")]
    assert {line.split(" - ")[1].split()[0] for line in writable} <= {"overlay", "proc", "tmpfs", "devpts"}


async def test_the_agent_cannot_gain_powers_by_a_set_uid_program(sandbox: LocalSandbox) -> None:
    await sandbox.exec("cp /usr/bin/id /tmp/id && chmod u+s /tmp/id")
    assert (await sandbox.exec(["/tmp/id", "-u"], user="agent")).out.strip() == "1000"


async def test_the_neighbours_cannot_be_seen(sandbox: LocalSandbox, create) -> None:
    other = await create()
    await other.spawn(["sleep", "987654"])
    assert "987654" not in (await sandbox.exec("cat /proc/*/cmdline")).out


HALF_DEAD = """
import ctypes, threading, time
def beat():
    while True:
        with open('/tmp/beat', 'a') as file: file.write('x')
        time.sleep(0.005)
threading.Thread(target=beat, daemon=True).start()
time.sleep(0.02)
ctypes.CDLL(None).syscall(EXIT, 0)
""".replace("EXIT", str((60, 93)[column()]))


async def test_a_process_whose_first_thread_has_ended_is_killed(sandbox: LocalSandbox) -> None:
    """To ``/proc`` it looks like a zombie while its other threads run on."""
    start = 'setsid python3 -c "$0" > /dev/null 2>&1 & until [ -s /tmp/beat ]; do sleep 0.01; done'
    looks = "until grep -qs '^State:.*Z' /proc/[0-9]*/status; do sleep 0.01; done"
    assert (await sandbox.exec(["sh", "-c", f"{start}; {looks}", HALF_DEAD], user="agent", timeout=20)).ok
    assert await sandbox.kill_processes(user="agent") == 1
    await sandbox.exec("rm /tmp/beat")
    assert (await sandbox.exec(["python3", "-c", HALF_DEAD], user="agent", timeout=1)).timed_out
    await sandbox.exec("rm /tmp/beat; sleep 0.1")
    assert not (await sandbox.exec(["test", "-e", "/tmp/beat"])).ok


DEEP = """
import os
for _ in range(3000):
    os.mkdir('d' * 20); os.chdir('d' * 20)
"""


@pytest.mark.parametrize("storage", [64, 4000])
async def test_folders_too_deep_for_any_path_go_at_the_end(create, home: Path, storage: int) -> None:
    sandbox = await create(limits=Limits(storage_mb=storage))
    assert (await sandbox.exec(["python3", "-c", DEEP], user="agent")).ok
    upper = sandbox._cell._upper.root
    assert upper.exists()
    await sandbox.teardown()
    assert not upper.exists()


ON_THE_WAY = """
import array, resource, socket, sys
most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
kept = []
try:
    while True:
        pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        pair[0].setblocking(False)
        kept += pair
        try:
            while True:
                pair[0].sendmsg([b'x'], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array('i', [0] * 250))])
        except BlockingIOError:
            pass
except OSError as error:
    print(error.errno, flush=True)
sys.stdin.read()
"""


async def test_descriptors_on_their_way_do_not_stop_the_neighbours(sandbox: LocalSandbox, create) -> None:
    """The kernel counts them per user, for all sandboxes together."""
    other = await create()
    process = await sandbox.spawn(["python3", "-c", ON_THE_WAY])
    assert (await process.stdout.readline()).strip() == b"109"  # ETOOMANYREFS
    assert (await other.exec(["cat"], stdin=b"fine")).out == "fine"
    assert (await sandbox.exec(["cat"], stdin=b"fine")).out == "fine"


OPENED = """
import os
for folder, folders, files in os.walk('/proc'):
    if folder == '/proc':
        folders[:] = [name for name in folders if not name.isdigit() and 'self' not in name]
    for path in (os.path.join(folder, name) for name in files):
        try:
            os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))
        except OSError:
            continue
        if os.stat(path).st_mode & 0o222:
            print(path)
"""


async def test_nothing_of_the_whole_machine_in_proc_can_be_written(sandbox: LocalSandbox) -> None:
    """Watches for memory pressure are everybody's; what has no write bit ignores writes."""
    paths = (await sandbox.exec(["python3", "-c", OPENED])).out.split()
    masked = {f"/proc/{name}" for name in MASKED}
    assert not [path for path in paths if not path.startswith("/proc/pressure/") and path not in masked]
