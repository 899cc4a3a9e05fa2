"""The process that every helper is forked from: one per engine, started on the host.

Starting an interpreter costs more than all of a sandbox. So one is started, with nothing
of the engine in it, and each sandbox's helper is a fork of it that moves into the
namespaces bubblewrap has made and then gives up the same things bubblewrap gives up:
capabilities (bounding set included), the right to gain new ones, and the system calls the
filter denies. It is not dumpable, and its executable is a sealed memory file, so that
nothing inside can reach the host through it.
"""

import _ctypes
import _signal  # pyright: ignore[reportMissingImports]
import _socket
import gc
import marshal
import posix
import sys

import helper  # and all its parts now: inside a sandbox nothing can be imported any more
import wire

SIGCHLD, SIG_IGN = 17, 1
PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_CAPBSET_DROP = 4, 22, 24
PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS, PR_CAP_AMBIENT = 36, 38, 47
PR_CAP_AMBIENT_CLEAR_ALL, SECCOMP_MODE_FILTER = 4, 2
CAPABILITY_VERSION = 0x20080522
LAST_CAPABILITY = 63
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT = 1, 2, 4, 8, 32
MS_NOATIME, MS_NODIRATIME, MS_BIND, MS_REC = 1024, 2048, 4096, 16384
MS_CLOSED = MS_NOSUID | MS_NODEV | MS_NOEXEC

_libc = _ctypes.dlopen(None, 2)  # pyright: ignore[reportArgumentType]


class _Byte(_ctypes._SimpleCData):
    _type_ = "c"


def call(name, *arguments):
    """A C function that answers 0 or is an error; bytes are passed by address."""
    if _ctypes.call_function(_ctypes.dlsym(_libc, name), arguments) != 0:
        raise OSError(f"{name}{arguments[:2]!r} failed")


def word(value):
    return value.to_bytes(4, sys.byteorder)


def cover(read_only, masked, empty):
    """Cover parts of /proc: the first stay to be read, the others show nothing."""
    for path in read_only:
        bind(path, path)
    for path in masked:
        bind("/dev/null", path)
    for path in empty:
        call("mount", b"tmpfs", wire.encode(path), b"tmpfs", MS_RDONLY | MS_CLOSED, b"size=4k")


def bind(source, path):
    """A read-only mount. What the flags of the file system are already, they must stay."""
    source, path = wire.encode(source), wire.encode(path)
    call("mount", source, path, None, MS_BIND | MS_REC, None)
    kept = posix.statvfs(path).f_flag & (MS_CLOSED | MS_NOATIME | MS_NODIRATIME)
    call("mount", None, path, None, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV | kept, None)


def give_up_privileges(kept):
    """Keep only the capabilities in the bit mask ``kept``, and none that could be inherited."""
    for number in range(LAST_CAPABILITY + 1):
        if not kept >> number & 1:
            try:
                call("prctl", PR_CAPBSET_DROP, number, 0, 0, 0)
            except OSError:
                break  # the kernel knows no higher one
    call("prctl", PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)
    halves = [word(kept & 0xFFFFFFFF), word(kept >> 32)]
    data = b"".join(half + half + word(0) for half in halves)  # effective, permitted, inheritable
    call("capset", word(CAPABILITY_VERSION) + word(0), data)
    call("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)


def filter_calls(program):
    code = (_Byte * len(program)).from_buffer_copy(program)
    address = _ctypes.addressof(code).to_bytes(8, sys.byteorder)
    header = (len(program) // 8).to_bytes(2, sys.byteorder) + bytes(6) + address
    call("prctl", PR_SET_SECCOMP, SECCOMP_MODE_FILTER, header, 0, 0)


def enter(channel, namespaces, groups, plan, kept, program, covers):
    """Become the helper of a sandbox. Joining the pid namespace concerns children only."""
    for path in groups:
        fd = posix.open(path, posix.O_WRONLY)
        posix.write(fd, b"0")
        posix.close(fd)
    for fd in namespaces:
        call("setns", fd, 0)
    cover(*covers)
    posix.setsid()
    try:
        posix.setgroups([])
    except PermissionError:
        pass  # a single mapped uid
    posix.setresgid(0, 0, 0)
    posix.setresuid(0, 0, 0)
    posix.chdir("/")
    give_up_privileges(kept)
    filter_calls(program)
    _signal.signal(SIGCHLD, 0)
    helper.main(channel, plan)


def serve_one(socket, taken, *limits):
    """Wait for a request, let the nursery go on, and become the helper that was asked for."""
    data, fds = wire.receive(socket)
    posix.write(taken, b"1" if data else b"0")
    if not data:
        posix._exit(0)
    try:
        groups, plan = marshal.loads(data)
        enter(fds[0], fds[1:], groups, plan, *limits)
    except BaseException as error:  # it ends here; the engine reads why
        posix.write(fds[0], wire.pack_reply(wire.FATAL, 0, text=wire.encode(repr(error))))
    posix._exit(1)


def main(channel):
    """Keep one child ready for the next request until the engine is gone."""
    call("prctl", PR_SET_DUMPABLE, 0, 0, 0, 0)
    # A namespace ends only when the last of its dead is buried. Those whose helper has died
    # come here, and the kernel buries the children of who ignores them.
    call("prctl", PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    _signal.signal(SIGCHLD, SIG_IGN)
    socket = _socket.socket(fileno=channel)
    kept, program, covers, *files = marshal.loads(socket.recv(1 << 16))
    wire.divide_files(*files)
    gc.disable()
    gc.freeze()  # collections would touch, and so copy, the pages that helpers share
    socket.send(b"ready")
    while True:
        news, taken = posix.pipe()
        if posix.fork() == 0:
            posix.close(news)
            serve_one(socket, taken, kept, program, covers)
        posix.close(taken)
        if posix.read(news, 1) == b"0":
            posix._exit(0)
        posix.close(news)
