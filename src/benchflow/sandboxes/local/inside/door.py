"""Loopback ports inside the sandbox that lead to unix sockets bound in from the host."""

import _socket
import select

CHUNK = 1 << 16
HIGH_WATER = 1 << 20
IN, OUT, HANGUP = select.EPOLLIN, select.EPOLLOUT, select.EPOLLHUP | select.EPOLLERR


class Door:
    """Listens on ``127.0.0.1`` and joins each connection to its unix socket, in the helper's
    own event loop."""

    def __init__(self, poll, handlers, doors):
        self.poll = poll
        self.handlers = handlers
        self.targets = {}
        for port, path in doors:
            listener = _socket.socket(_socket.AF_INET, _socket.SOCK_STREAM | _socket.SOCK_NONBLOCK)
            listener.setsockopt(_socket.SOL_SOCKET, _socket.SO_REUSEADDR, 1)
            listener.bind(("127.0.0.1", port))
            listener.listen(256)
            self.targets[listener.fileno()] = (listener, path)
            handlers[listener.fileno()] = self.on_connection
            poll.register(listener.fileno(), IN)

    def on_connection(self, fd, _events):
        listener, path = self.targets[fd]
        try:
            accepted, _ = listener._accept()
        except OSError:
            return
        inner = _socket.socket(fileno=accepted)
        inner.setblocking(False)
        inner.setsockopt(_socket.IPPROTO_TCP, _socket.TCP_NODELAY, 1)
        outer = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
        try:
            outer.connect(path)
        except OSError:
            inner.close()
            outer.close()
            return
        outer.setblocking(False)
        Joint(self.poll, self.handlers, inner, outer)


class End:
    """One side of a joint: what waits to be written to it and what it still listens for."""

    def __init__(self, socket):
        self.socket = socket
        self.fd = socket.fileno()
        self.pending = bytearray()
        self.reading = True
        self.finishing = False  # shut down writing once ``pending`` is out
        self.events = IN


class Joint:
    """Two sockets copying to each other, with half-close and bounded buffers."""

    def __init__(self, poll, handlers, inner, outer):
        self.poll = poll
        self.handlers = handlers
        first, second = End(inner), End(outer)
        self.other = {first.fd: second, second.fd: first}
        self.ends = {first.fd: first, second.fd: second}
        for end in (first, second):
            handlers[end.fd] = self.on_event
            poll.register(end.fd, IN)

    def on_event(self, fd, events):
        if fd not in self.ends:
            return
        try:
            if events & OUT:
                self.flush(self.ends[fd])
            if events & (IN | HANGUP) and self.ends[fd].reading:
                self.copy(self.ends[fd], self.other[fd])
            elif events & HANGUP:
                self.close()
                return
        except OSError:
            self.close()
            return
        if not any(end.reading or end.pending for end in self.ends.values()):
            self.close()
            return
        for end in self.ends.values():
            self.listen(end)

    def copy(self, source, sink):
        try:
            data = source.socket.recv(CHUNK)
        except BlockingIOError:
            return
        if data:
            sink.pending += data
        else:
            source.reading = False
            sink.finishing = True
        self.flush(sink)

    def flush(self, end):
        while end.pending:
            try:
                sent = end.socket.send(end.pending)
            except BlockingIOError:
                return
            del end.pending[:sent]
        if end.finishing:
            end.finishing = False
            end.socket.shutdown(_socket.SHUT_WR)

    def listen(self, end):
        full = len(self.other[end.fd].pending) > HIGH_WATER
        events = (IN if end.reading and not full else 0) | (OUT if end.pending else 0)
        if events != end.events:
            self.poll.modify(end.fd, events)
            end.events = events

    def close(self):
        for end in self.ends.values():
            self.handlers.pop(end.fd, None)
            self.poll.unregister(end.fd)
            end.socket.close()
        self.ends = {}
