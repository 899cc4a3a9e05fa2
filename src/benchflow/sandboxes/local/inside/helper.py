"""A sandbox's resident process: serves exec, kill and transfer requests of the engine.

It enters the sandbox (``nursery.py``) before anything else runs there, under every
namespace, capability, cgroup and seccomp rule, so whatever it forks inherits them. Only
its children are in the sandbox's pid namespace: nothing inside can see or signal it, and
process numbers mean something else here than in them.

The engine talks to it over one SOCK_SEQPACKET socket. A request is a marshalled tuple
``(verb, id, …)`` with the stdio descriptors attached; a large one comes in a memory file.
A reply is a kind, an id and two numbers, followed by optional text. The engine never
unmarshals anything from here.

Each command has a supervisor: a child subreaper, so that every descendant of the command
stays below it, whatever sessions it makes. From inside, only process 1 and what this
process forked have no visible parent, which is how they are told from everything else.
"""

import _ctypes
import _signal  # pyright: ignore[reportMissingImports]
import _socket
import marshal
import posix
import select
import sys
import time

READY, EXIT, ERROR, GONE, DONE, STARTED, SOCKET, FATAL = range(1, 9)
SIGTERM, SIGKILL, SIGSTOP, SIGCONT, SIGCHLD, SIGPIPE, SIGXFSZ = 15, 9, 19, 18, 17, 13, 25
PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER = 4, 36
CHANNEL = 3
MESSAGE = 1 << 16
KILL_DEADLINE = 20.0
"""Seconds a killed process may take to vanish; only one stuck in the kernel takes longer."""

_prctl = _ctypes.dlsym(_ctypes.dlopen(None, 2), "prctl")  # pyright: ignore[reportArgumentType]


class Killed(BaseException):
    """The engine asked this supervisor to end its tree."""


class Failure(Exception):
    """A request that cannot be carried out; the text goes to the engine."""


def prctl(option, value):
    _ctypes.call_function(_prctl, (option, value, 0, 0, 0))


def pack_reply(kind, ident, a=0, b=0, text=b""):
    return (
        bytes((kind,))
        + ident.to_bytes(8, "little")
        + a.to_bytes(8, "little", signed=True)
        + b.to_bytes(8, "little", signed=True)
        + text
    )


def read_file(path):
    try:
        fd = posix.open(path, posix.O_RDONLY | posix.O_CLOEXEC)
    except OSError:
        return b""
    try:
        parts = []
        while part := posix.read(fd, 1 << 16):
            parts.append(part)
        return b"".join(parts)
    finally:
        posix.close(fd)


# --- users ---------------------------------------------------------------------------


def accounts(path):
    """The colon-separated records of passwd or group."""
    for line in read_file(path).decode("utf-8", "surrogateescape").splitlines():
        fields = line.split(":")
        if len(fields) >= 3 and fields[2].isdigit():
            yield fields


def find_user(user):
    """``(uid, gid, groups, name, home)`` of a name, ``uid`` or ``uid:gid``; None is root."""
    wanted, _, group = (user or "0").partition(":")
    name, home, uid, gid = wanted, "/", None, 0
    for fields in accounts("/etc/passwd"):
        if len(fields) >= 6 and (fields[0] == wanted or (wanted.isdigit() and fields[2] == wanted)):
            name, uid, gid, home = fields[0], int(fields[2]), int(fields[3]), fields[5] or "/"
            break
    if uid is None:
        if wanted == "root":
            uid = 0
        elif wanted.isdigit():
            uid = gid = int(wanted)
        else:
            raise Failure(f"no user {wanted!r} in the sandbox")
        home = "/root" if uid == 0 else "/"
    groups = [gid]
    for fields in accounts("/etc/group"):
        if len(fields) >= 4 and name in fields[3].split(","):
            groups.append(int(fields[2]))
        if group and fields[0] == group:
            gid = int(fields[2])
    if group.isdigit():
        gid = int(group)
    return uid, gid, sorted(set(groups)), name, home


def become(uid, gid, groups):
    """Switch for good. Leaving uid 0 drops every capability."""
    try:
        posix.setgroups(groups)
    except PermissionError:
        if uid or gid:  # with a single mapped uid there is nothing to switch to
            raise
    posix.setresgid(gid, gid, gid)
    posix.setresuid(uid, uid, uid)


# --- process trees -------------------------------------------------------------------


def processes():
    """``{pid: (state, parent)}`` of everything in the sandbox."""
    found = {}
    for name in posix.listdir("/proc"):
        if name.isdigit():
            stat = read_file(f"/proc/{name}/stat")
            fields = stat[stat.rfind(b")") + 2 :].split(None, 2)
            if len(fields) == 3:
                found[int(name)] = (fields[0], int(fields[1]))
    return found


def living_below(root):
    """Pids of the descendants of ``root`` that are not zombies."""
    found = processes()
    children = {}
    for pid, (_, parent) in found.items():
        children.setdefault(parent, []).append(pid)
    pending, below = list(children.get(root, ())), []
    while pending:
        pid = pending.pop()
        if found[pid][0] not in (b"Z", b"X"):
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


def uids_of(pid):
    for line in read_file(f"/proc/{pid}/status").splitlines():
        if line.startswith(b"Uid:"):
            return {int(uid) for uid in line.split()[1:]}
    return set()


def targets(uid=None):
    """Living processes of commands, of ``uid`` only unless it is None."""
    return [
        pid
        for pid, (state, parent) in processes().items()
        if parent != 0 and state not in (b"Z", b"X") and (uid is None or uid in uids_of(pid))
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


# --- one command ---------------------------------------------------------------------


class Supervisor:
    """Runs in a fork of the helper: starts one command, reports its exit, ends its tree."""

    armed = False
    asked = False

    def __init__(self, ident):
        self.ident = ident
        self.command = 0

    def run(self, start):
        """``start()`` runs in the command's process and does not return."""
        try:
            try:
                prctl(PR_SET_CHILD_SUBREAPER, 1)
                begun, beginning = posix.pipe()  # closed by the exec
                self.command = posix.fork()
                if self.command == 0:
                    start()
                for fd in (0, 1, 2, beginning):
                    posix.close(fd)
                posix.read(begun, 1)
                posix.close(begun)
                self.send(STARTED, self.command)
                Supervisor.armed = True
                if Supervisor.asked:
                    raise Killed
                while True:
                    self.reap_one(0)
            except Killed:
                Supervisor.armed = False
                if end_tree(posix.getpid(), self.reap):
                    self.send(DONE)
                else:
                    self.send(ERROR, text=b"a process of this command cannot be killed")
        except ChildProcessError:
            pass
        finally:
            posix._exit(0)

    def reap_one(self, flags):
        pid, status = posix.waitpid(-1, flags)
        if pid == self.command:
            self.send(EXIT, posix.waitstatus_to_exitcode(status))
        return pid

    def reap(self):
        try:
            while self.reap_one(posix.WNOHANG):
                pass
        except ChildProcessError:
            pass

    def send(self, kind, a=0, text=b""):
        posix.write(CHANNEL, pack_reply(kind, self.ident, a, 0, text))


def on_term(_number, _frame):
    Supervisor.asked = True
    if Supervisor.armed:
        raise Killed


def place_stdio(fds):
    """Put ``fds`` (None is the null device) on 0, 1, 2 and close everything above 3."""
    held = [posix.open("/dev/null", posix.O_RDWR) if fd is None else fd for fd in fds]
    held = [posix.dup(fd) if fd <= 3 else fd for fd in held]
    for place, fd in enumerate(held):
        posix.dup2(fd, place)
    posix.closerange(4, 1 << 20)


def run_command(argv, cwd, low, high, user, bare):
    """Replace this process by the command; say on stderr why when it cannot. ``user`` is
    what ``find_user`` found."""
    posix.setsid()
    for number in (SIGPIPE, SIGXFSZ, SIGTERM, SIGCHLD):
        _signal.signal(number, 0)
    code = 126
    try:
        uid, gid, groups, name, home = user
        env = dict(low)
        if not bare:
            env.update(HOME=home, USER=name, LOGNAME=name)
        env.update(high)
        become(uid, gid, groups)
        try:
            posix.chdir(cwd)
        except OSError as error:
            raise Failure(f"cannot enter {cwd}: {error.strerror}") from None
        code = 127
        execute(argv, env)
    except Failure as error:
        complain(str(error))
    except OSError as error:
        complain(f"{argv[0]}: {error.strerror}")
        code = 127 if error.errno == 2 else 126
    except ValueError as error:
        complain(f"{argv[0]}: {error}")
    finally:
        posix._exit(code)


def execute(argv, env):
    program = argv[0]
    if "/" in program:
        posix.execve(program, argv, env)
    last = FileNotFoundError(2, "command not found")
    for folder in env.get("PATH", "/usr/bin:/bin").split(":"):
        try:
            posix.execve(f"{folder or '.'}/{program}", argv, env)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            last = error
    raise last


def complain(text):
    posix.write(2, b"benchflow: " + text.encode("utf-8", "surrogateescape") + b"\n")


# --- the resident process ------------------------------------------------------------


class Helper:
    def __init__(self):
        self.socket = _socket.socket(fileno=CHANNEL)
        self.poll = select.epoll()
        self.supervisors = {}  # pid -> request id
        self.handlers = {CHANNEL: self.on_request}
        self.deadline = None

    def run(self):
        """Serve until the engine goes away or the lifetime ends."""
        self.watch_children()
        self.poll.register(CHANNEL, select.EPOLLIN)
        while True:
            wait = -1 if self.deadline is None else max(0.0, self.deadline - time.monotonic())
            for fd, events in self.poll.poll(wait):
                handler = self.handlers.get(fd)
                if handler is not None:
                    handler(fd, events)
            if self.deadline is not None and time.monotonic() >= self.deadline:
                self.reply(FATAL, 0, text=b"the sandbox reached the end of its lifetime")
                return

    def watch_children(self):
        inner, outer = _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_STREAM | _socket.SOCK_NONBLOCK)
        self.wakeup = (inner, outer)
        _signal.signal(SIGCHLD, lambda *_: None)
        _signal.signal(SIGTERM, on_term)
        _signal.set_wakeup_fd(inner.fileno(), warn_on_full_buffer=False)
        self.handlers[outer.fileno()] = self.on_child
        self.poll.register(outer.fileno(), select.EPOLLIN)

    def on_child(self, fd, _):
        posix.read(fd, 4096)
        try:
            while True:
                pid, _ = posix.waitpid(-1, posix.WNOHANG)
                if pid == 0:
                    return
                ident = self.supervisors.pop(pid, None)
                if ident is not None:
                    self.reply(GONE, ident)
        except ChildProcessError:
            pass

    def on_request(self, fd, _):
        data, ancillary, *_ = self.socket.recvmsg(MESSAGE, 512, 0x40000000)  # MSG_CMSG_CLOEXEC
        if not data:
            posix._exit(0)  # the engine is gone
        fds = [fd for _, _, raw in ancillary for fd in memoryview(raw).cast("i")]
        if data == b"M":
            body = fds.pop(0)
            data = b"".join(iter(lambda: posix.read(body, 1 << 20), b""))
            posix.close(body)
        verb, ident, *rest = marshal.loads(data)
        try:
            getattr(self, f"do_{verb}")(ident, fds, *rest)
        except Failure as error:
            self.reply(ERROR, ident, text=str(error).encode("utf-8", "surrogateescape"))
        except OSError as error:
            if processes().get(1, (b"X",))[0] in (b"Z", b"X"):
                self.reply(FATAL, 0, text=b"its first process died")
                posix._exit(1)
            self.reply(ERROR, ident, text=f"{verb}: {error}".encode("utf-8", "surrogateescape"))
        finally:
            for fd in fds:
                posix.close(fd)

    def reply(self, kind, ident, a=0, b=0, text=b""):
        self.socket.send(pack_reply(kind, ident, a, b, text))

    def fork(self):
        """Fork a child of which only the channel and what ``place_stdio`` moves survives."""
        pid = posix.fork()
        if pid == 0:
            _signal.set_wakeup_fd(-1)
        return pid

    def supervise(self, ident, stdio, start):
        Supervisor.asked = False  # anyone inside may have signalled this process
        pid = self.fork()
        if pid:
            self.supervisors[pid] = ident
            return
        try:
            place_stdio(stdio)
            Supervisor(ident).run(start)
        finally:
            posix._exit(70)

    def set_up(self, plan):
        """Carry out ``setup.prepare``, open the doors, and say that the sandbox is ready."""
        import door
        import setup

        self.deadline = time.monotonic() + plan["lifetime"]
        uid, gid, home = setup.prepare(plan)
        if plan["doors"]:
            door.Door(self.poll, self.handlers, plan["doors"])
        self.reply(READY, 0, uid, gid, home.encode())

    def do_exec(self, ident, fds, has_stdin, argv, cwd, low, high, user, bare):
        found = find_user(user)
        stdio = fds if has_stdin else [None, *fds]
        self.supervise(ident, stdio, lambda: run_command(argv, cwd, low, high, found, bare))

    def do_pack(self, ident, fds, path):
        self.supervise(ident, [None, *fds], lambda: transfer("pack", path))

    def do_unpack(self, ident, fds, path, owner):
        uid, gid, *_ = find_user(owner)
        self.supervise(ident, [fds[0], None, fds[1]], lambda: transfer("unpack", path, uid, gid))

    def do_kill_of(self, _ident, _fds, wanted):
        for pid, owner in self.supervisors.items():
            if owner == wanted:
                signal(pid, SIGTERM)
                return
        self.reply(GONE, wanted)

    def do_killall(self, ident, _fds, user):
        uid = None if user is None else find_user(user)[0]
        self.inside(ident, lambda: end_users(uid), b"processes are left that cannot be killed")

    def do_hold(self, ident, _fds, number):
        """Stop (19) or continue (18) every command's processes, until nothing new is found."""

        def hold():
            done = set()
            while fresh := [pid for pid in targets() if pid not in done]:
                for pid in fresh:
                    signal(pid, number)
                    done.add(pid)
            return len(done)

        self.inside(ident, hold)

    def do_count(self, ident, _fds):
        self.inside(ident, lambda: len(targets()))

    def inside(self, ident, work, failure=b""):
        """Answer with the number ``work`` finds in a child, where process numbers are the
        sandbox's; None means ``failure``."""
        if self.fork():
            return
        try:
            count = work()
            kind = ERROR if count is None else DONE
            posix.write(CHANNEL, pack_reply(kind, ident, count or 0, 0, failure if count is None else b""))
        finally:
            posix._exit(0)

    def do_connect(self, ident, _fds, port):
        """A socket connected to a port inside, handed out."""
        peer = _socket.socket(_socket.AF_INET, _socket.SOCK_STREAM)
        try:
            peer.settimeout(2.0)  # this process must not hang on a server that does not accept
            peer.connect(("127.0.0.1", port))
            rights = (_socket.SOL_SOCKET, _socket.SCM_RIGHTS, peer.fileno().to_bytes(4, sys.byteorder))
            self.socket.sendmsg([pack_reply(SOCKET, ident)], [rights])
        finally:
            peer.close()


def transfer(verb, *arguments):
    import archive

    try:
        getattr(archive, verb)(*arguments)
        posix._exit(0)
    except OSError as error:
        posix.write(2, str(error).encode("utf-8", "surrogateescape"))
    posix._exit(1)


def main(channel, plan):
    """Serve ``channel`` until the engine closes it. Without a plan there is nothing to set up."""
    prctl(PR_SET_DUMPABLE, 0)
    if channel != CHANNEL:
        posix.dup2(channel, CHANNEL)
    posix.set_inheritable(CHANNEL, False)
    posix.closerange(CHANNEL + 1, 1 << 20)
    null = posix.open("/dev/null", posix.O_RDWR)
    for place in (0, 1, 2):
        posix.dup2(null, place)
    posix.close(null)
    posix.umask(0o022)
    helper = Helper()
    try:
        if plan is None:
            helper.reply(READY, 0)
        else:
            helper.set_up(plan)
        helper.run()
    except Exception as error:  # the last words of a defect, which the engine shows
        helper.reply(FATAL, 0, text=repr(error).encode())
    posix._exit(1)
