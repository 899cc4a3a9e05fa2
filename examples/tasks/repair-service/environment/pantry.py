"""A pantry over HTTP. See API.md for what it promises."""

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

PANTRY = {}


class Pantry(BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path == "/health":
            self.answer(200, {"status": "ok"})
        elif self.path == "/items":
            self.answer(200, PANTRY)
        elif self.path.startswith("/items/"):
            name = self.path.removeprefix("/items/")
            self.answer(200, {"name": name, "count": PANTRY[name]})
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
        count = PANTRY.get(name, 0)
        if verb == "add":
            count += amount
        elif amount >= count:
            return self.answer(409, {"error": f"only {count} left"})
        else:
            count -= amount
        PANTRY[name] = count
        self.answer(200, {"name": name, "count": count})

    def read_order(self):
        """The verb and the amount of the body, or None when it is not a valid order."""
        order = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        for verb in ("add", "take"):
            if verb in order and order[verb] >= 0:
                return verb, order[verb]

    def answer(self, status, body):
        text = json.dumps(body)
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, format, *args):
        pass


if __name__ == "__main__":
    ThreadingHTTPServer(("127.0.0.1", sys.argv[1]), Pantry).serve_forever()
