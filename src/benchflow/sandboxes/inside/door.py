"""Loopback ports inside the sandbox that lead to unix sockets bound in from the host, to an
address of the host, or to the engine itself, which is handed their connections."""

import _socket
import select

CHUNK = 1 << 16
HIGH_WATER = 1 << 20
MOST = 256
IN, OUT = select.EPOLLIN, select.EPOLLOUT


class Door:
    """Listens on ``127.0.0.1`` and joins each connection to its target (the path of a unix
    socket, or ``IP:port``), in the helper's own event loop; without a target it goes to
    ``hand_out(socket, port)``."""

    def __init__(self, poll, handlers, doors, hand_out):
        self.poll = poll
        self.hand_out = hand_out
        self.handlers = handlers
        self.targets = {}
        for port, target in doors:
            listener = _socket.socket(_socket.AF_INET, _socket.SOCK_STREAM | _socket.SOCK_NONBLOCK)
            listener.setsockopt(_socket.SOL_SOCKET, _socket.SO_REUSEADDR, 1)
            listener.bind(("127.0.0.1", port))
            listener.listen(256)
            self.targets[listener.fileno()] = (listener, port, target)
            handlers[listener.fileno()] = self.on_connection
            poll.register(listener.fileno(), IN)

    def on_connection(self, fd, _events):
        listener, port, target = self.targets[fd]
        try:
            accepted, _ = listener._accept()
        except OSError:
            return
        if Joint.count >= MOST:  # each is a descriptor of the engine too
            _socket.socket(fileno=accepted).close()
            return
        inner = _socket.socket(fileno=accepted)
        inner.setblocking(False)
        inner.setsockopt(_socket.IPPROTO_TCP, _socket.TCP_NODELAY, 1)
        try:
            if not target:
                self.hand_out(inner, port)
                inner.close()
                return
            outer = dial(target)
        except OSError:
            inner.close()
            return
        outer.setblocking(False)
        Joint(self.poll, self.handlers, inner, outer)


def dial(target):
    if target.startswith("/"):
        family, address = _socket.AF_UNIX, target
    else:
        host, port = target.split(":")
        family, address = _socket.AF_INET, (host, int(port))
    made = _socket.socket(family, _socket.SOCK_STREAM)
    try:
        made.settimeout(2.0)  # the helper must not hang on a host that does not answer
        made.connect(address)
    except BaseException:
        made.close()
        raise
    return made


class End:
    """One side of a joint: what waits to be written to it and what it still listens for."""

    def __init__(self, socket, server):
        self.socket = socket
        self.fd = socket.fileno()
        self.server = server
        self.pending = bytearray()
        self.reading = True
        self.ending = False  # shut down writing once ``pending`` is out
        self.ended = False
        self.events = 0


class Joint:
    """Two sockets copying to each other, with half-close and bounded buffers. A server may leave
    before it has heard everything, and its answer still arrives; a client that breaks off ends
    it all."""

    count = 0

    def __init__(self, poll, handlers, client, server):
        Joint.count += 1
        self.poll = poll
        self.handlers = handlers
        first, second = End(client, False), End(server, True)
        self.other = {first.fd: second, second.fd: first}
        self.ends = {first.fd: first, second.fd: second}
        for end in (first, second):
            handlers[end.fd] = self.on_event
            self.listen(end)

    def on_event(self, fd, events):
        if fd not in self.ends:
            return
        end = self.ends[fd]
        try:
            if events & OUT:
                self.flush(end)
            if events & ~OUT and end.reading:
                self.copy(end, self.other[fd])
        except OSError:  # the client broke off
            self.close()
            return
        if not any(end.reading or not end.ended for end in self.ends.values()):
            self.close()
            return
        for end in self.ends.values():
            self.listen(end)

    def copy(self, source, sink):
        try:
            data = source.socket.recv(CHUNK)
        except BlockingIOError:
            return
        except OSError:
            if not source.server:
                raise
            data = b""
        if not data:
            source.reading = False
            sink.ending = True
        elif not sink.ended:
            sink.pending += data
        self.flush(sink)

    def flush(self, end):
        try:
            while end.pending:
                del end.pending[: end.socket.send(end.pending)]
            if end.ending and not end.ended:
                end.ended = True
                end.socket.shutdown(_socket.SHUT_WR)
        except BlockingIOError:
            pass
        except OSError:
            if not end.server:
                raise
            end.ended = True
            end.pending.clear()

    def listen(self, end):
        full = len(self.other[end.fd].pending) > HIGH_WATER
        events = (IN if end.reading and not full else 0) | (OUT if end.pending else 0)
        if events == end.events:
            return
        if not events:
            self.poll.unregister(end.fd)  # or a hang-up would be reported for ever
        elif end.events:
            self.poll.modify(end.fd, events)
        else:
            self.poll.register(end.fd, events)
        end.events = events

    def close(self):
        Joint.count -= 1
        for end in self.ends.values():
            self.handlers.pop(end.fd, None)
            if end.events:
                self.poll.unregister(end.fd)
            end.socket.close()
        self.ends = {}
