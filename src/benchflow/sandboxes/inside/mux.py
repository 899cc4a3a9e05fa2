"""Many streams over one connection: the same code at both of its ends.

A frame is the length of its data (4 bytes), a kind (1), a number (8) and the data. Each end
copies descriptors of its own to streams of the other. Bytes go only as far as the other end
has given credit, so that a stream nobody reads holds up no other. Streams belong to a request:
its number and a place make the stream's.
"""

import posix

REQUEST, REPLY, DATA, END, DROP, CREDIT = range(1, 7)
HEAD, PLACES = 13, 8
WINDOW, CHUNK, LARGEST = 1 << 20, 1 << 16, 1 << 26
PIPE = 1 << 16
"""What a pipe may hold when its last writer of interest has ended."""


class Broken(Exception):
    """The other end does not keep to the rules."""


def frame(kind, number, data=b""):
    return len(data).to_bytes(4, "little") + bytes((kind,)) + number.to_bytes(8, "little") + data


class Mux:
    """``send(bytes)`` queues for the other end; ``watch(fd, on_readable, on_writable)`` and
    ``unwatch(fd)`` are the event loop's; ``on_frame(kind, number, data)`` gets requests and
    replies. What a request has said is told (``tell``) when its streams have been copied that
    far: at the end that reads a command's output its sources, at the other one the sinks."""

    def __init__(self, send, watch, unwatch, on_frame, reads_output):
        self.send, self.watch, self.unwatch, self.on_frame = send, watch, unwatch, on_frame
        self.sources, self.sinks, self.waiting = {}, {}, {}
        self.slow = self.sources if reads_output else self.sinks
        self.buffer = bytearray()

    def feed(self, data):
        self.buffer += data
        at, whole = 0, self.buffer
        while len(whole) - at >= HEAD:
            size = int.from_bytes(whole[at : at + 4], "little")
            if size > LARGEST:
                raise Broken(f"a frame of {size} bytes")
            end = at + HEAD + size
            if len(whole) < end:
                break
            number = int.from_bytes(whole[at + 5 : at + HEAD], "little")
            self.take(whole[at + 4], number, bytes(whole[at + HEAD : end]))
            at = end
        del whole[:at]

    def take(self, kind, number, data):
        source, sink = self.sources.get(number), self.sinks.get(number)
        if kind == DATA and sink:
            sink.put(data)
        elif kind == END and sink:
            sink.finish()
        elif kind == DROP and source:
            source.close()
        elif kind == CREDIT and source:
            source.allow(int.from_bytes(data, "little"))
        elif kind in (REQUEST, REPLY):
            self.on_frame(kind, number, data)

    def tell(self, request, what, last=True):
        """Call ``what()`` once nothing of the request is on its way any more; ``last`` is False
        for what may overtake its output."""
        if request in self.waiting:
            self.waiting[request].append(what)
        elif last and any([stream.hurry() for stream in self.slow_ones(request)]):
            self.waiting[request] = [what]
        else:
            what()

    def slow_ones(self, request):
        first = request * PLACES
        return [self.slow[number] for number in range(first, first + PLACES) if number in self.slow]

    def settled(self, number):
        """A stream has no more to do with what its request is waiting to say."""
        request = number // PLACES
        if request in self.waiting and not any(stream.busy() for stream in self.slow_ones(request)):
            for what in self.waiting.pop(request):
                what()

    def close(self):
        self.waiting.clear()
        for stream in [*self.sources.values(), *self.sinks.values()]:
            stream.close()


class Source:
    """Reads a descriptor that does not block, and sends what comes."""

    def __init__(self, mux, number, fd):
        self.mux, self.number, self.fd = mux, number, fd
        self.credit, self.owed = WINDOW, 0
        mux.sources[number] = self
        mux.watch(fd, self.read, None)

    def read(self):
        """Copy one chunk; False when there is none now."""
        try:
            data = posix.read(self.fd, min(CHUNK, self.credit))
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if not data:
            self.close()
            self.mux.send(frame(END, self.number))
            return False
        self.mux.send(frame(DATA, self.number, data))
        self.credit -= len(data)
        if not self.credit:
            self.mux.unwatch(self.fd)
        if self.owed:
            self.owed = max(0, self.owed - len(data))
            self.mux.settled(self.number)
        return True

    def hurry(self):
        """Copy what is there now; whether some of it must wait for credit."""
        self.owed = PIPE
        self.catch_up()
        return self.busy()

    def catch_up(self):
        while self.owed and self.credit and self.fd >= 0:
            if not self.read():
                self.owed = 0

    def busy(self):
        return self.fd >= 0 and self.owed > 0

    def allow(self, size):
        if not self.credit:
            self.mux.watch(self.fd, self.read, None)
        self.credit += size
        if self.owed:
            self.catch_up()
            self.mux.settled(self.number)

    def close(self):
        if self.fd >= 0:
            if self.credit:
                self.mux.unwatch(self.fd)
            posix.close(self.fd)
            self.fd = -1
            del self.mux.sources[self.number]
            self.mux.settled(self.number)


class Sink:
    """Writes to a descriptor that does not block; ``shut()`` comes before it is closed."""

    def __init__(self, mux, number, fd, shut=None):
        self.mux, self.number, self.fd, self.shut = mux, number, fd, shut
        self.pending, self.taken, self.ending = bytearray(), 0, False
        mux.sinks[number] = self

    def put(self, data):
        if len(self.pending) > WINDOW:
            raise Broken("more than there was credit for")
        waited = bool(self.pending)
        self.pending += data
        if not waited:
            self.write()
            if self.pending:
                self.mux.watch(self.fd, None, self.on_writable)

    def on_writable(self):
        self.write()
        if not self.pending and self.fd >= 0:
            self.mux.unwatch(self.fd)
            if self.ending:
                self.close()
        self.mux.settled(self.number)

    def write(self):
        try:
            while self.pending:
                size = posix.write(self.fd, self.pending[:CHUNK])
                del self.pending[:size]
                self.taken += size
        except BlockingIOError:
            pass
        except OSError:  # nobody reads it any more
            self.mux.send(frame(DROP, self.number))
            self.close()
            return
        if self.taken >= WINDOW // 2:
            self.mux.send(frame(CREDIT, self.number, self.taken.to_bytes(8, "little")))
            self.taken = 0

    def hurry(self):
        return self.busy()

    def busy(self):
        return bool(self.pending)

    def finish(self):
        self.ending = True
        if not self.pending:
            self.close()

    def close(self):
        if self.fd >= 0:
            if self.pending:
                self.mux.unwatch(self.fd)
                self.pending.clear()
            if self.shut:
                self.shut()
            posix.close(self.fd)
            self.fd = -1
            del self.mux.sinks[self.number]
            self.mux.settled(self.number)
