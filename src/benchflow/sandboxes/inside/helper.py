"""A sandbox's resident process: serves exec, kill and transfer requests of the engine.

It enters the sandbox (``nursery.py``) before anything else runs there, under every
namespace, capability, cgroup and seccomp rule, so whatever it forks inherits them. Only
its children are in the sandbox's pid namespace: nothing inside can see or signal it, and
process numbers mean something else here than in them.

The engine talks to it over one SOCK_SEQPACKET socket. A request is a marshalled tuple
``(verb, id, …)`` with the stdio descriptors attached; a large one comes in a memory file.
A reply is a kind, an id and two numbers, followed by optional text. The engine never
unmarshals anything from here.

Each command has a supervisor (``supervisor.py``). From inside, only process 1 and what
this process forked have no visible parent, which is how they are told from all others.
"""

import _signal  # pyright: ignore[reportMissingImports]
import _socket
import marshal
import posix
import select
import sys
import time

import door
import setup
import supervisor
from trees import end_users, signal, signal_new, targets
from users import find_user
from wire import (
    CHANNEL,
    DONE,
    ERROR,
    FATAL,
    GONE,
    PR_SET_DUMPABLE,
    READY,
    SIGCHLD,
    SIGCONT,
    SIGTERM,
    SOCKET,
    Failure,
    encode,
    pack_reply,
    prctl,
    read_file,
    receive,
    send,
)

PF_EXITING = 4


class Helper:
    def __init__(self):
        self.socket = _socket.socket(fileno=CHANNEL)
        self.poll = select.epoll()
        self.children = {}  # pid -> request id
        self.spare = None  # pid and socket of the next supervisor
        self.killed = set()  # supervisors that were told to end, and are not used again
        self.own = set()  # pids of all supervisors
        self.handlers: dict = {CHANNEL: self.on_request}
        self.deadline = None

    def say(self, kind, ident, a=0, b=0, text=b""):
        send(kind, ident, a, b, text)

    def run(self):
        """Serve until the engine goes away or the lifetime ends."""
        self.watch_children()
        self.spare = self.fork_supervisor()
        self.poll.register(CHANNEL, select.EPOLLIN)
        while True:
            wait = -1 if self.deadline is None else max(0.0, self.deadline - time.monotonic())
            for fd, events in self.poll.poll(wait):
                handler = self.handlers.get(fd)
                if handler is not None:
                    handler(fd, events)
            if self.deadline is not None and time.monotonic() >= self.deadline:
                self.say(FATAL, 0, text=b"the sandbox reached the end of its lifetime")
                return

    def watch_children(self):
        inner, outer = _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_STREAM | _socket.SOCK_NONBLOCK)
        self.wakeup = (inner, outer)
        _signal.signal(SIGCHLD, lambda *_: None)
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
                self.killed.discard(pid)
                self.own.discard(pid)
                ident = self.children.pop(pid, None)
                if ident is not None:
                    self.say(GONE, ident)
                if self.spare is not None and self.spare[0] == pid:
                    self.spare[1].close()
                    self.spare = None
        except ChildProcessError:
            pass

    def on_request(self, fd, _):
        data, fds = receive(self.socket)
        if not data:
            posix._exit(0)  # the engine is gone
        self.carry_out(data, fds)

    def carry_out(self, data, fds):
        message = data
        if data == b"M":
            data = b"".join(iter(lambda: posix.read(fds[0], 1 << 20), b""))
            posix.lseek(fds[0], 0, 0)
        verb, ident, *rest = marshal.loads(data)
        try:
            if verb in supervisor.VERBS:
                self.hand_on(ident, message, fds)
            else:
                getattr(self, f"do_{verb}")(ident, *rest)
        except Failure as error:
            self.say(ERROR, ident, text=encode(str(error)))
        except OSError as error:
            if first_is_dying():
                self.say(FATAL, 0, text=b"its first process died")
                posix._exit(1)
            self.say(ERROR, ident, text=encode(f"{verb}: {error}"))
        finally:
            for fd in fds:
                posix.close(fd)

    def hand_on(self, ident, message, fds):
        """Give a request to the waiting supervisor."""
        rights = b"".join(fd.to_bytes(4, sys.byteorder) for fd in fds)
        while True:
            pid, inbox = self.spare or self.fork_supervisor()
            self.spare = None
            try:
                inbox.sendmsg([message], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, rights)])
            except ConnectionError:
                inbox.close()  # it was killed while it waited
                continue
            except OSError:
                inbox.close()
                raise
            self.children[pid] = ident
            self.await_free(pid, inbox)
            return

    def await_free(self, pid, inbox):
        self.handlers[inbox.fileno()] = lambda *_: self.on_free(pid, inbox)
        self.poll.register(inbox.fileno(), select.EPOLLIN)

    def on_free(self, pid, inbox):
        """A supervisor whose command has left nothing behind takes the next one."""
        self.poll.unregister(inbox.fileno())
        del self.handlers[inbox.fileno()]
        told = inbox.recv(1)
        if told:
            self.say(GONE, self.children.pop(pid))
        if told and self.spare is None and pid not in self.killed:
            self.spare = pid, inbox
        else:
            inbox.close()

    def fork_supervisor(self):
        ours, theirs = _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
        # A signal that came between the fork and its handler would be lost.
        _signal.pthread_sigmask(_signal.SIG_BLOCK, (SIGTERM,))
        try:
            pid = posix.fork()
            if pid == 0:
                try:
                    ours.close()
                    supervisor.serve(theirs)
                finally:
                    posix._exit(0)
        finally:
            _signal.pthread_sigmask(_signal.SIG_UNBLOCK, (SIGTERM,))
        theirs.close()
        self.own.add(pid)
        return pid, ours

    def set_up(self, plan):
        """Carry out ``setup.prepare``, open the doors, and say that the sandbox is ready."""
        self.deadline = time.monotonic() + plan["lifetime"]
        uid, gid, home = setup.prepare(plan)
        if plan["doors"]:
            door.Door(self.poll, self.handlers, plan["doors"], self.hand_out)
        self.say(READY, 0, uid, gid, encode(home))

    def do_kill_of(self, _ident, wanted):
        for pid, ident in self.children.items():
            if ident == wanted:
                self.killed.add(pid)
                signal(pid, SIGTERM)
                signal(pid, SIGCONT)  # root of a container may have stopped it
                return
        self.say(GONE, wanted)

    def do_killall(self, ident, user):
        uid = None if user is None else find_user(user)[0]
        self.inside(ident, lambda: end_users(uid), b"processes are left that cannot be killed")

    def do_hold(self, ident, number):
        """Stop (19) or continue (18) all commands."""
        self.inside(ident, lambda: signal_new(number))

    def do_count(self, ident):
        self.inside(ident, lambda: len(targets()))

    def inside(self, ident, work, failure=b""):
        """Answer with the number ``work`` finds in a child, where process numbers are the
        sandbox's; None means ``failure``."""
        pid = posix.fork()
        if pid:
            self.children[pid] = ident
            return
        try:
            _signal.set_wakeup_fd(-1)
            count = work()
            if count is None:
                send(ERROR, ident, text=failure)
            else:
                send(DONE, ident, count)
        except OSError as error:
            send(ERROR, ident, text=encode(str(error)))
        finally:
            posix._exit(0)

    def do_connect(self, ident, port):
        """A socket connected to a port inside, handed out."""
        peer = _socket.socket(_socket.AF_INET, _socket.SOCK_STREAM)
        try:
            peer.settimeout(2.0)  # this process must not hang on a server that does not accept
            peer.connect(("127.0.0.1", port))
            self.hand_out(peer, port, ident)
        finally:
            peer.close()

    def hand_out(self, peer, port, ident=0):
        """Give the engine a connection: one it asked for, or one made from inside to its port."""
        rights = (_socket.SOL_SOCKET, _socket.SCM_RIGHTS, peer.fileno().to_bytes(4, sys.byteorder))
        self.socket.sendmsg([pack_reply(SOCKET, ident, port)], [rights])


def first_is_dying():
    """Whether process 1 is on its way out, so that nothing can be forked any more."""
    stat = read_file("/proc/1/stat")
    fields = stat[stat.rfind(b")") + 2 :].split()
    return len(fields) < 7 or bool(int(fields[6]) & PF_EXITING)


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
            send(READY, 0)
        else:
            helper.set_up(plan)
        helper.run()
    except Exception as error:  # the last words of a defect, which the engine shows
        send(FATAL, 0, text=encode(repr(error)))
    posix._exit(1)
