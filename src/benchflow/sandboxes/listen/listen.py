"""Listens on loopback ports inside a sandbox. Runs there, with whatever Python there is.

Arguments are ``PORT=TARGET``: a unix socket's path, ``IP:PORT``, or ``-`` for connections that
travel over stdin and stdout (frames as in ``streams.py``). It ends with its stdin.
"""

import os
import select
import socket
import struct
import sys

HEAD = struct.Struct(">cII")
CHUNK, WINDOW, MOST = 1 << 15, 1 << 18, 256
IN, OUT = select.POLLIN, select.POLLOUT

poll = select.poll()
ends = {}
remotes = {}
listeners = {}
changed = set()


def send(kind, number=0, value=0, data=b""):
    left = memoryview(HEAD.pack(kind, number, value) + data)
    while left:
        left = left[os.write(1, left) :]  # blocks: the engine always reads


class Remote:
    """The far side of a connection that travels over stdin and stdout."""

    gone = True  # nothing of it keeps the near side open
    count = 0

    def __init__(self, near, port):
        Remote.count += 1
        self.number, self.near, self.credit, self.taken = Remote.count, near, WINDOW, 0
        remotes[self.number] = self
        send(b"O", self.number, port)

    def room(self):
        return min(CHUNK, self.credit)

    def feed(self, data):
        self.credit -= len(data)
        send(b"D", self.number, len(data), data)

    def finish(self):
        send(b"E", self.number)

    def took(self, size):
        self.taken += size
        if self.taken >= WINDOW // 2:
            send(b"W", self.number, self.taken)
            self.taken = 0

    def drop(self, failed):
        if remotes.pop(self.number, None) and failed:
            send(b"X", self.number)


class End:
    """One socket of a connection; what it reads goes to ``other``. A server may leave before it
    has heard everything, and its answer still arrives; a client that breaks off ends it all."""

    def __init__(self, sock, server=False):
        sock.setblocking(False)
        self.server = server
        self.sock, self.fd, self.events = sock, sock.fileno(), 0
        self.out = bytearray()
        self.reading, self.ending, self.ended, self.gone = True, False, False, False
        ends[self.fd] = self
        changed.add(self)

    def room(self):
        return CHUNK if len(self.out) < WINDOW else 0

    def took(self, size):
        changed.add(self)

    def feed(self, data):
        if not self.ended:
            self.out += data
            self.flush()

    def finish(self):
        self.ending = True
        self.flush()

    def flush(self):
        changed.add(self)
        try:
            while self.out and not self.ended:
                size = self.sock.send(self.out)
                del self.out[:size]
                self.other.took(size)
            if self.ending and not self.ended:
                self.ended = True
                self.sock.shutdown(socket.SHUT_WR)
        except BlockingIOError:
            pass
        except OSError:
            if not self.server:
                self.drop(True)
            self.ended = True
            self.out.clear()

    def on(self, events):
        changed.add(self)
        if events & OUT:
            self.flush()
        room = self.other.room()
        if self.reading and room and events & ~OUT:
            try:
                data = self.sock.recv(room)
            except BlockingIOError:
                return
            except OSError:
                if not self.server:
                    self.drop(True)
                    return
                data = b""
            if data:
                self.other.feed(data)
            else:
                self.reading = False
                self.other.finish()

    def settle(self):
        if self.gone:
            return
        if not self.reading and self.ended:
            self.drop(False)
            return
        events = (IN if self.reading and self.other.room() else 0) | (OUT if self.out else 0)
        if events != self.events:
            if events:
                poll.register(self.fd, events)
            else:
                poll.unregister(self.fd)  # or a hang-up would be reported for ever
            self.events = events

    def drop(self, failed):
        if self.gone:
            return
        self.gone = True
        if self.events:
            poll.unregister(self.fd)
        del ends[self.fd]
        self.sock.close()
        if failed or self.other.gone:
            self.other.drop(failed)


def accept(fd):
    listener, port, target = listeners[fd]
    try:
        client = listener.accept()[0]
    except OSError:
        return
    client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if target == "-":
        near = End(client)
        near.other = Remote(near, port)
        return
    try:
        if target.startswith("/"):
            far = socket.socket(socket.AF_UNIX)
            far.connect(target)
        else:
            host, _, far_port = target.rpartition(":")
            far = socket.create_connection((host, int(far_port)), 10)
    except OSError:
        client.close()
        return
    near, other = End(client), End(far, server=True)
    near.other, other.other = other, near


def take(read):
    """Carry out the whole frames of what was read; return the rest."""
    start = 0
    while len(read) - start >= HEAD.size:
        kind, number, value = HEAD.unpack_from(read, start)
        body = start + HEAD.size
        end = body + value if kind == b"D" else body
        if end > len(read):
            break
        remote = remotes.get(number)
        start = end
        if remote is None:
            continue
        if kind == b"D":
            remote.near.feed(bytes(read[body:end]))
        elif kind == b"E":
            remote.near.finish()
        elif kind == b"W":
            remote.credit += value
            changed.add(remote.near)
        else:
            remotes.pop(number)
            remote.near.drop(False)
    return read[start:]


def main():
    for argument in sys.argv[1:]:
        port, _, target = argument.partition("=")
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", int(port)))
        listener.listen(MOST)
        listener.setblocking(False)
        listeners[listener.fileno()] = listener, int(port), target
    poll.register(0, IN)
    send(b"R")
    read, accepting = bytearray(), False
    while True:
        if accepting != (len(ends) < MOST):
            accepting = not accepting
            for fd in listeners:
                poll.register(fd, IN) if accepting else poll.unregister(fd)
        for fd, events in poll.poll():
            if fd == 0:
                data = os.read(0, 1 << 16)
                if not data:
                    return
                read = take(read + data)
            elif fd in listeners:
                accept(fd)
            elif fd in ends:
                ends[fd].on(events)
        while changed:
            changed.pop().settle()


main()
