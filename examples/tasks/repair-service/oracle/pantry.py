"""A pantry over HTTP. See API.md for what it promises."""

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock

PANTRY = {}
LOCK = Lock()


class Pantry(BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path == "/health":
            self.answer(200, {"status": "ok"})
        elif self.path == "/items":
            self.answer(200, dict(sorted(PANTRY.items())))
        elif self.path.startswith("/items/"):
            name = self.path.removeprefix("/items/")
            if name in PANTRY:
                self.answer(200, {"name": name, "count": PANTRY[name]})
            else:
                self.answer(404, {"error": f"no {name}"})
        else:
            self.answer(404, {"error": "no such path"})

    def do_POST(self):
        if not self.path.startswith("/items/"):
            return self.answer(404, {"error": "no such path"})
        name = self.path.removeprefix("/items/")
        order = self.read_order()
        if order is None:
            return self.answer(400, {"error": 'send {"add": N} or {"take": N}'})
        verb, amount = order
        with LOCK:
            count = PANTRY.get(name, 0)
            if verb == "take" and amount > count:
                return self.answer(409, {"error": f"only {count} left"})
            count += amount if verb == "add" else -amount
            PANTRY[name] = count
            if count == 0:
                del PANTRY[name]
        self.answer(200, {"name": name, "count": count})

    def read_order(self):
        """The verb and the amount of the body, or None when it is not a valid order."""
        try:
            order = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))))
        except ValueError:
            return None
        if not isinstance(order, dict) or len(order) != 1:
            return None
        ((verb, amount),) = order.items()
        if verb in ("add", "take") and type(amount) is int and amount >= 1:
            return verb, amount
        return None

    def answer(self, status, body):
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format, *args):
        pass


if __name__ == "__main__":
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Pantry).serve_forever()
