"""Loopback ports inside a sandbox whose connections travel over this process's stdin and stdout.

The arguments are the ports, ``streams.py`` tells the frames. It ends with its stdin. It needs
nothing but builtin modules, so that the helper's own interpreter can run it in any image.
"""

import _socket
import posix
import select
import sys

HEAD, CHUNK, WINDOW, MOST = 9, 1 << 15, 1 << 18, 256
IN, OUT = select.EPOLLIN, select.EPOLLOUT

poll = select.epoll()
listeners = {}
by_fd = {}
by_number = {}
changed = set()


def send(kind, number=0, value=0, data=b""):
    left = memoryview(kind + number.to_bytes(4, "big") + value.to_bytes(4, "big") + data)
    while left:
        left = left[posix.write(1, left) :]  # blocks: the engine always reads


class Connection:
    """One client. A server may leave before it has heard everything, and its answer still
    arrives; a client that breaks off ends it all."""

    count = 0

    def __init__(self, client, port):
        Connection.count += 1
        self.number, self.client, self.fd = Connection.count, client, client.fileno()
        self.out = bytearray()
        self.credit, self.taken, self.events = WINDOW, 0, 0
        self.reading, self.ending, self.ended = True, False, False
        by_fd[self.fd] = by_number[self.number] = self
        changed.add(self)
        send(b"O", self.number, port)

    def on_event(self, events):
        changed.add(self)
        try:
            if events & OUT:
                self.write()
            if events & ~OUT and self.reading and self.credit > 0:
                self.read()
        except OSError:
            self.drop(b"X")

    def read(self):
        try:
            data = self.client.recv(min(CHUNK, self.credit))
        except BlockingIOError:
            return
        if data:
            self.credit -= len(data)
            send(b"D", self.number, len(data), data)
        else:
            self.reading = False
            send(b"E", self.number)

    def write(self):
        try:
            while self.out:
                size = self.client.send(self.out)
                del self.out[:size]
                self.taken += size
            if self.ending and not self.ended:
                self.ended = True
                self.client.shutdown(_socket.SHUT_WR)
        except BlockingIOError:
            pass
        if self.taken >= WINDOW // 2:
            send(b"W", self.number, self.taken)
            self.taken = 0

    def hear(self, kind, value, data):
        changed.add(self)
        if kind == b"X":
            self.drop()
        elif kind == b"W":
            self.credit += value
        else:
            self.out += data
            self.ending = kind == b"E"
            try:
                self.write()
            except OSError:
                self.drop(b"X")

    def settle(self):
        """Listen for what is of use now, and for nothing else."""
        if not self.reading and self.ended:
            self.drop()
        if self.fd not in by_fd:
            return
        events = (IN if self.reading and self.credit > 0 else 0) | (OUT if self.out else 0)
        if events and self.events:
            poll.modify(self.fd, events)
        elif events:
            poll.register(self.fd, events)
        elif self.events:
            poll.unregister(self.fd)  # or a hang-up would be reported for ever
        self.events = events

    def drop(self, last_word=None):
        if by_number.pop(self.number, None) is None:
            return
        if last_word:
            send(last_word, self.number)
        del by_fd[self.fd]
        self.client.close()  # which takes it out of the poll as well


def accept(fd):
    listener, port = listeners[fd]
    try:
        client = _socket.socket(fileno=listener._accept()[0])
    except OSError:
        return
    client.setblocking(False)
    client.setsockopt(_socket.IPPROTO_TCP, _socket.TCP_NODELAY, 1)
    Connection(client, port)


def take(read):
    """Carry out the whole frames of what was read; return the rest."""
    start = 0
    while len(read) - start >= HEAD:
        kind = bytes(read[start : start + 1])
        number = int.from_bytes(read[start + 1 : start + 5], "big")
        value = int.from_bytes(read[start + 5 : start + HEAD], "big")
        body = start + HEAD
        end = body + value if kind == b"D" else body
        if end > len(read):
            break
        if number in by_number:
            by_number[number].hear(kind, value, read[body:end])
        start = end
    return read[start:]


def main():
    for port in map(int, sys.argv[1:]):
        listener = _socket.socket(_socket.AF_INET, _socket.SOCK_STREAM | _socket.SOCK_NONBLOCK)
        listener.setsockopt(_socket.SOL_SOCKET, _socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        listener.listen(MOST)
        listeners[listener.fileno()] = listener, port
    poll.register(0, IN)
    send(b"R")
    read, accepting = bytearray(), False
    while True:
        if accepting != (len(by_fd) < MOST):
            accepting = not accepting
            for fd in listeners:
                poll.register(fd, IN) if accepting else poll.unregister(fd)
        for fd, events in poll.poll():
            if fd == 0:
                data = posix.read(0, 1 << 16)
                if not data:
                    return
                read = take(read + data)
            elif fd in listeners:
                accept(fd)
            elif fd in by_fd:
                by_fd[fd].on_event(events)
        while changed:
            changed.pop().settle()


if __name__ == "__main__":
    main()
