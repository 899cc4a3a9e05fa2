"""Process 1 of a container: its helper, spoken to over stdin and stdout.

It is the same helper as a jail's, with the differences that come with its place. Requests,
replies and the commands' pipes all travel as frames (``mux.py``). Being process 1, no signal
from inside reaches it, it buries every orphan, and when it ends the whole container does; it
ends when stdin does, that is when the engine is gone. As it is not dumpable, nothing inside
without CAP_SYS_PTRACE can look into it or at its descriptors, not even root.
"""

import _signal  # pyright: ignore[reportMissingImports]
import _socket
import marshal
import posix
import select
import time

from helper import Helper
from mux import REPLY, REQUEST, Broken, Mux, Sink, Source, frame
from trees import KILL_DEADLINE, signal, targets
from users import find_user
from wire import (
    CHANNEL,
    DONE,
    ERROR,
    EXIT,
    FATAL,
    GONE,
    MESSAGE,
    PR_SET_DUMPABLE,
    SIGCONT,
    SIGINT,
    SIGKILL,
    SIGSTOP,
    SOCKET,
    encode,
    pack_reply,
    prctl,
)

INLINE = 1 << 15
"""Bytes of a request that fit into one message; a longer one goes on in a memory file."""
SPARE_PLACE = 7
"""Place of the stream of a connection, which is none of a command's three."""
FIRST_HANDED = 1 << 40
"""Connections that nobody asked for are counted from here, as requests are from 1."""


class ContainerHelper(Helper):
    def __init__(self, source, sink, replies):
        super().__init__()
        self.source, self.sink, self.replies = source, sink, replies
        self.out = bytearray()
        self.mux = Mux(self.queue, self.watch, self.unwatch, self.on_frame, reads_output=True)
        self.watched = set()
        self.handed = 0
        self.watch(source, self.on_input, None)
        self.watch(replies.fileno(), self.on_replies, None)

    # --- the connection ---------------------------------------------------------------

    def watch(self, fd, read, write):
        self.unwatch(fd)
        self.watched.add(fd)
        self.handlers[fd] = lambda *_: (read or write)()
        self.poll.register(fd, select.EPOLLIN if read else select.EPOLLOUT)

    def unwatch(self, fd):
        if fd in self.watched:
            self.watched.discard(fd)
            del self.handlers[fd]
            self.poll.unregister(fd)

    def on_input(self):
        data = posix.read(self.source, 1 << 18)
        if not data:
            posix._exit(0)  # the engine is gone
        self.mux.feed(data)

    def queue(self, data):
        waited = bool(self.out)
        self.out += data
        if not waited:
            self.flush()
            if self.out:
                self.watch(self.sink, None, self.on_output)

    def on_output(self):
        self.flush()
        if not self.out:
            self.unwatch(self.sink)

    def flush(self):
        try:
            while self.out:
                del self.out[: posix.write(self.sink, self.out[: 1 << 16])]
        except BlockingIOError:
            pass
        except OSError:
            posix._exit(0)

    # --- replies ----------------------------------------------------------------------

    def on_replies(self):
        """Pass on what supervisors have said."""
        while True:
            try:
                data = self.replies.recv(MESSAGE)
            except BlockingIOError:
                return
            kind, ident = data[0], int.from_bytes(data[1:9], "little")
            self.pass_on(kind, ident, data)

    def pass_on(self, kind, ident, data):
        last = kind in (EXIT, DONE, ERROR, GONE)
        self.mux.tell(ident, lambda: self.queue(frame(REPLY, ident, data)), last)

    def say(self, kind, ident, a=0, b=0, text=b""):
        self.on_replies()  # what others said before
        self.pass_on(kind, ident, pack_reply(kind, ident, a, b, text))

    # --- requests ---------------------------------------------------------------------

    def on_frame(self, kind, number, data):
        if kind != REQUEST:
            raise Broken("a reply")
        if number == 0:
            self.set_up(marshal.loads(data))
            return
        count = data[0]
        ways, message = data[1 : 1 + count], data[1 + count :]
        fds = []
        try:
            for place in range(count):
                fds.append(self.make_pipe(number * 8 + place, ways[place : place + 1] == b"r"))
            if len(message) > INLINE:
                memory = posix.memfd_create("request", 1)
                left = memoryview(message)
                while left:
                    left = left[posix.write(memory, left) :]
                posix.lseek(memory, 0, 0)
                fds.insert(0, memory)
                message = b"M"
        except OSError as error:
            self.say(ERROR, number, text=encode(f"no descriptors are left: {error.strerror}"))
            for fd in fds:
                posix.close(fd)
            return
        self.carry_out(message, fds)

    def make_pipe(self, number, read_inside):
        """The command's end of a pipe whose other end is the stream ``number``."""
        read, write = posix.pipe()
        ours, theirs = (write, read) if read_inside else (read, write)
        posix.set_blocking(ours, False)
        if read_inside:
            Sink(self.mux, number, ours)
        else:
            Source(self.mux, number, ours)
        return theirs

    def hand_out(self, peer, port, ident=0):
        self.handed += 1
        number = ident or FIRST_HANDED + self.handed
        own = _socket.socket(fileno=posix.dup(peer.fileno()))
        own.setblocking(False)
        Sink(self.mux, number * 8 + SPARE_PLACE, posix.dup(own.fileno()), lambda: shut(own))
        Source(self.mux, number * 8 + SPARE_PLACE, posix.dup(own.fileno()))
        self.queue(frame(REPLY, number, pack_reply(SOCKET, ident, port)))

    # --- everything at once -----------------------------------------------------------

    def do_killall(self, ident, user):
        """Without a fork, which a sandbox full of processes would not allow: process 1 can
        stop all others in one step that none can race."""
        uid = None if user is None else find_user(user)[0]
        seen, deadline = set(), time.monotonic() + KILL_DEADLINE
        while left := self.stop_and_find(uid):
            for pid in left:
                signal(pid, SIGKILL)
            signal(-1, SIGCONT)
            seen.update(left)
            if time.monotonic() > deadline:
                self.say(ERROR, ident, text=b"processes are left that cannot be killed")
                return
            time.sleep(0.001)
        signal(-1, SIGCONT)
        self.say(DONE, ident, len(seen))

    def stop_and_find(self, uid):
        signal(-1, SIGSTOP)
        return targets(uid, self.own)

    def do_count(self, ident):
        self.say(DONE, ident, len(targets(None, self.own)))


def shut(peer):
    try:
        peer.shutdown(_socket.SHUT_WR)
    except OSError:
        pass
    peer.close()


def main():
    prctl(PR_SET_DUMPABLE, 0)
    _signal.signal(SIGINT, 0)  # whose handler, the interpreter's own, would let it through
    for place in (3, 4, 5):  # those that helper and supervisors give a meaning
        posix.dup2(0, place, False)
    source, sink = posix.dup(0), posix.dup(1)
    channel, replies = _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
    posix.dup2(channel.fileno(), CHANNEL, False)
    channel.close()
    replies.setblocking(False)
    null = posix.open("/dev/null", posix.O_RDWR)
    for place in (0, 1, 2):
        posix.dup2(null, place)
    posix.close(null)
    for fd in (source, sink):
        posix.set_blocking(fd, False)
    posix.umask(0o022)
    helper = ContainerHelper(source, sink, replies)
    try:
        helper.run()
    except Exception as error:  # the last words of a defect, which the engine shows
        helper.say(FATAL, 0, text=encode(repr(error)))
    posix.set_blocking(sink, True)
    helper.flush()
    posix._exit(1)
