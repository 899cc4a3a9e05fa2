"""Processes of the sandbox: which there are, and how to end them for certain.

Only for a process inside the sandbox's pid namespace, as the numbers are the sandbox's.
"""

import posix
import time

from users import become
from wire import SIGKILL, SIGSTOP, read_file

KILL_DEADLINE = 20.0
"""Seconds a killed process may take to vanish; only one stuck in the kernel takes longer."""
THREADS = 17
"""Place of the number of threads in ``/proc/PID/stat``, counted from the state."""


def processes():
    """``{pid: (alive, parent)}`` of everything in the sandbox. A process whose first thread
    has ended looks like a zombie, but lives as long as it has others."""
    found = {}
    for name in posix.listdir("/proc"):
        if name.isdigit():
            stat = read_file(f"/proc/{name}/stat")
            fields = stat[stat.rfind(b")") + 2 :].split()
            if len(fields) > THREADS:
                alive = fields[0] not in (b"Z", b"X") or int(fields[THREADS]) > 1
                found[int(name)] = (alive, int(fields[1]))
    return found


def living_below(root):
    """Pids of the descendants of ``root`` that are alive."""
    found = processes()
    children = {}
    for pid, (_, parent) in found.items():
        children.setdefault(parent, []).append(pid)
    pending, below = list(children.get(root, ())), []
    while pending:
        pid = pending.pop()
        if found[pid][0]:
            below.append(pid)
        pending.extend(children.get(pid, ()))
    return below


def signal(pid, number):
    try:
        posix.kill(pid, number)
    except ProcessLookupError:
        pass


def end_tree(root, reap):
    """Kill all below ``root`` and return when none is left. Everything is stopped first,
    until a look finds nothing new, so that nothing can fork its way out."""
    stopped = set()
    while fresh := [pid for pid in living_below(root) if pid not in stopped]:
        for pid in fresh:
            signal(pid, SIGSTOP)
            stopped.add(pid)
    deadline = time.monotonic() + KILL_DEADLINE
    while left := living_below(root):
        for pid in left:
            signal(pid, SIGKILL)
        reap()
        if time.monotonic() > deadline:
            return False
        time.sleep(0.0005)
    reap()
    return True


def signal_new(number):
    """Send a signal to every command's processes, until a look finds none that has not got
    it; return how many there were."""
    done = set()
    while fresh := [pid for pid in targets() if pid not in done]:
        for pid in fresh:
            signal(pid, number)
            done.add(pid)
    return len(done)


def uids_of(pid):
    for line in read_file(f"/proc/{pid}/status").splitlines():
        if line.startswith(b"Uid:"):
            return {int(uid) for uid in line.split()[1:]}
    return set()


def targets(uid=None, spared=()):
    """Living processes of commands, of ``uid`` only unless it is None. ``spared`` are the
    helper's own where they have a visible parent."""
    return [
        pid
        for pid, (alive, parent) in processes().items()
        if alive and parent != 0 and pid not in spared and (uid is None or uid in uids_of(pid))
    ]


def signal_all_as(uid):
    """Kill everything ``uid`` owns in one step that no fork can race."""
    pid = posix.fork()
    if pid == 0:
        try:
            become(uid, uid, [])
            posix.kill(-1, SIGKILL)
        except OSError:
            pass
        posix._exit(0)
    posix.waitpid(pid, 0)


def end_users(uid):
    """Kill all processes (of ``uid``) until two looks in a row find none; None on failure."""
    seen, clean = set(), 0
    deadline = time.monotonic() + KILL_DEADLINE
    while clean < 2:
        left = targets(uid)
        seen.update(left)
        clean = 0 if left else clean + 1
        if left and uid:
            signal_all_as(uid)
        for pid in left:
            signal(pid, SIGKILL)
        if time.monotonic() > deadline:
            return None
        if left:
            time.sleep(0.001)
    return len(seen)
