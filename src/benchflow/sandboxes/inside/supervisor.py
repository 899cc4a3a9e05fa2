"""A command's supervisor: starts it, reports its end, and ends its tree on demand.

A supervisor is a child subreaper, so that every descendant of the command stays below it.
It is forked ahead of the command it will get, as a fork costs more than the rest, and when
the last of a command's processes has ended by itself it takes the next command.
"""

import _signal  # pyright: ignore[reportMissingImports]
import _socket
import marshal
import posix

import archive
from trees import end_tree
from users import become, find_user
from wire import (
    CHANNEL,
    DONE,
    ERROR,
    EXIT,
    PR_SET_CHILD_SUBREAPER,
    SIGCHLD,
    SIGPIPE,
    SIGTERM,
    SIGXFSZ,
    STARTED,
    Failure,
    encode,
    limit_files,
    prctl,
    receive,
    send,
)

DEFAULT_SIGNALS = (SIGPIPE, SIGXFSZ, SIGTERM, SIGCHLD)
INBOX, NULL = CHANNEL + 1, CHANNEL + 2
"""Descriptors a supervisor keeps for itself: requests come on one, the other is the null device."""
VERBS = ("exec", "pack", "unpack")
"""Requests that the helper hands to a supervisor."""


class Killed(BaseException):
    """The engine asked this supervisor to end its tree."""


class Refused(Exception):
    """A command that cannot be started; stderr says why. ``code`` is its exit code."""

    def __init__(self, code):
        super().__init__(code)
        self.code = code


class Supervisor:
    armed = False
    asked = False

    def __init__(self, ident):
        self.ident = ident
        self.command = 0

    def run(self, start):
        """``start()`` returns the pid of the command it has started, or raises ``Refused``.
        Returns whether nothing of it is left and nobody asked to end it."""
        try:
            try:
                self.command = start()
            except Refused as refusal:
                send(STARTED, self.ident)
                send(EXIT, self.ident, refusal.code)
                return True
            finally:
                for fd in (0, 1, 2):
                    posix.dup2(NULL, fd)
            send(STARTED, self.ident, self.command)
            Supervisor.armed = True
            if Supervisor.asked:
                raise Killed
            while True:
                self.reap_one(0)
        except Killed:
            Supervisor.armed = False
            if end_tree(posix.getpid(), self.reap):
                send(DONE, self.ident)
            else:
                send(ERROR, self.ident, text=b"a process of this command cannot be killed")
            return False
        except ChildProcessError:
            Supervisor.armed = False
            return not Supervisor.asked

    def reap_one(self, flags):
        pid, status = posix.waitpid(-1, flags)
        if pid == self.command:
            send(EXIT, self.ident, posix.waitstatus_to_exitcode(status))
        return pid

    def reap(self):
        try:
            while self.reap_one(posix.WNOHANG):
                pass
        except ChildProcessError:
            pass


def on_term(_number, _frame):
    Supervisor.asked = True
    if Supervisor.armed:
        raise Killed


def serve(inbox):
    """The life of a supervisor: take requests from the socket ``inbox``, one at a time."""
    _signal.set_wakeup_fd(-1)
    _signal.signal(SIGTERM, on_term)
    _signal.pthread_sigmask(_signal.SIG_UNBLOCK, (SIGTERM,))
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    if inbox.fileno() != INBOX:
        posix.dup2(inbox.fileno(), INBOX, False)
    posix.dup2(0, NULL, False)
    posix.closerange(NULL + 1, 1 << 20)
    limit_files()
    requests = _socket.socket(fileno=INBOX)
    while carry_out(requests):
        requests.send(b"f")


def carry_out(requests):
    """Take one request and see it through; False when this supervisor must end."""
    data, fds = receive(requests)
    if not data:
        return False  # the sandbox ends, or another supervisor waits already
    if data == b"M":
        body = fds.pop(0)
        data = b"".join(iter(lambda: posix.read(body, 1 << 20), b""))
    verb, ident, *rest = marshal.loads(data)
    try:
        stdio, start = prepare(verb, fds, *rest)
    except Failure as error:
        posix.closerange(NULL + 1, 1 << 20)
        send(ERROR, ident, text=encode(str(error)))
        return True
    place_stdio(stdio)
    return Supervisor(ident).run(start)


def prepare(verb, fds, *rest):
    """The three descriptors (None is the null device) and the function that starts it."""
    if verb == "pack":
        return [None, *fds], lambda: fork(lambda: transfer(archive.pack, *rest))
    if verb == "unpack":
        path, owner = rest
        uid, gid, *_ = find_user(owner)
        return [fds[0], None, fds[1]], lambda: fork(lambda: transfer(archive.unpack, path, uid, gid))
    has_stdin, argv, cwd, low, high, user, bare = rest
    uid, gid, groups, name, home = find_user(user)
    env = low | ({} if bare else {"HOME": home, "USER": name, "LOGNAME": name}) | high
    stdio = fds if has_stdin else [None, *fds]
    if uid == gid == 0:
        return stdio, lambda: spawn(argv, cwd, env, groups)
    return stdio, lambda: fork(lambda: run_command(argv, cwd, env, (uid, gid, groups)))


def place_stdio(fds):
    """Put ``fds`` (None is the null device) on 0, 1, 2 and close what came with the request."""
    for place, fd in enumerate(fds):
        posix.dup2(NULL if fd is None else fd, place)
    posix.closerange(NULL + 1, 1 << 20)


def fork(work):
    """Start ``work``, which does not return, in a child; come back when it has called exec
    or ended."""
    begun, beginning = posix.pipe()  # closed by the exec
    pid = posix.fork()
    if pid == 0:
        work()
    posix.close(beginning)
    posix.read(begun, 1)
    posix.close(begun)
    return pid


def spawn(argv, cwd, env, groups):
    """Start a command of root's, whose user this process has already: without a fork."""
    try:
        become(0, 0, groups)
        enter(cwd)
        return try_each(argv[0], env, lambda path: posix.posix_spawn(
            path, argv, env, setsid=True, setsigdef=DEFAULT_SIGNALS))  # fmt: skip
    except (Failure, OSError, ValueError) as error:
        raise Refused(explain(argv[0], error)) from None


def run_command(argv, cwd, env, identity):
    """Replace this process by the command; say on stderr why when it cannot."""
    code = 126
    try:
        posix.setsid()
        for number in DEFAULT_SIGNALS:
            _signal.signal(number, 0)
        become(*identity)
        enter(cwd)
        try_each(argv[0], env, lambda path: posix.execve(path, argv, env))
    except (Failure, OSError, ValueError) as error:
        code = explain(argv[0], error)
    finally:
        posix._exit(code)


def enter(cwd):
    try:
        posix.chdir(cwd)
    except OSError as error:
        raise Failure(f"cannot enter {cwd}: {error.strerror}") from None


def try_each(program, env, start):
    """Start the first that can be of the files ``program`` may mean."""
    if "/" in program:
        return start(program)
    last = FileNotFoundError(2, "command not found")
    for folder in env.get("PATH", "/usr/bin:/bin").split(":"):
        try:
            return start(f"{folder or '.'}/{program}")
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            last = error
    raise last


def explain(program, error):
    """Say why a command did not start, and return its exit code."""
    if isinstance(error, Failure):
        complain(str(error))
        return 126
    complain(f"{program}: {error.strerror if isinstance(error, OSError) else error}")
    return 127 if isinstance(error, (FileNotFoundError, ValueError)) else 126


def complain(text):
    posix.write(2, encode(f"benchflow: {text}\n"))


def transfer(work, *arguments):
    try:
        work(*arguments)
        posix._exit(0)
    except OSError as error:
        posix.write(2, encode(str(error)))
    posix._exit(1)
