"""Starts the pantry as an ordinary user and walks through its API; all or nothing."""

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

REWARD = Path("/logs/verifier/reward.txt")
NOBODY = 65534

STEPS = [
    # method, path, body, status, answer (None: any error object)
    ("GET", "/health", None, 200, {"status": "ok"}),
    ("GET", "/items", None, 200, {}),
    ("GET", "/items/rice", None, 404, None),
    ("POST", "/items/rice", {"add": 3}, 200, {"name": "rice", "count": 3}),
    ("POST", "/items/lentils", {"add": 2}, 200, {"name": "lentils", "count": 2}),
    ("POST", "/items/rice", {"add": 4}, 200, {"name": "rice", "count": 7}),
    ("GET", "/items/rice", None, 200, {"name": "rice", "count": 7}),
    ("GET", "/items", None, 200, {"lentils": 2, "rice": 7}),
    ("POST", "/items/rice", {"take": 8}, 409, None),
    ("GET", "/items/rice", None, 200, {"name": "rice", "count": 7}),
    ("POST", "/items/rice", {"take": 2}, 200, {"name": "rice", "count": 5}),
    ("POST", "/items/rice", {"take": 5}, 200, {"name": "rice", "count": 0}),
    ("GET", "/items/rice", None, 404, None),
    ("GET", "/items", None, 200, {"lentils": 2}),
    ("POST", "/items/rice", {"add": 0}, 400, None),
    ("POST", "/items/rice", {"add": "two"}, 400, None),
    ("POST", "/items/rice", {"burn": 1}, 400, None),
    ("POST", "/items/rice", [1], 400, None),
    ("POST", "/items/rice", "{", 400, None),
    ("POST", "/shelves", {"add": 1}, 404, None),
    ("GET", "/cellar", None, 404, None),
    ("GET", "/health", None, 200, {"status": "ok"}),
]


def main():
    port = free_port()
    service = start(port)
    try:
        fault = wait_until_up(service, port) or walk(port)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(service.pid, signal.SIGKILL)
        service.wait()
    print(f"reward {int(not fault)}: {fault or 'every promise kept'}")
    REWARD.write_text(f"{int(not fault)}\n")


def start(port):
    """The service runs what the agent wrote: not as root, and in a group of its own."""
    return subprocess.Popen(
        [sys.executable, "/app/pantry.py", str(port)],
        cwd="/app",
        user=NOBODY,
        group=NOBODY,
        extra_groups=[],
        start_new_session=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    )


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_until_up(service, port):
    """None once the port answers, else what went wrong; gives up after 10 seconds."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        if service.poll() is not None:
            return f"the service ended with exit code {service.returncode}"
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return None
        except OSError:
            time.sleep(0.02)
    return "the service does not listen"


def walk(port):
    """None when every step is answered as promised, else the first that is not."""
    for method, path, body, status, expected in STEPS:
        try:
            got_status, got = request(port, method, path, body)
        except (OSError, ValueError, http.client.HTTPException) as error:
            return f"{method} {path} {body}: {type(error).__name__}: {error}"
        if got_status != status:
            return f"{method} {path} {body}: status {got_status}, expected {status}"
        if expected is None and not (isinstance(got, dict) and isinstance(got.get("error"), str)):
            return f"{method} {path} {body}: {got!r} is no error object"
        if expected is not None and (got != expected or list(got) != list(expected)):
            return f"{method} {path} {body}: {got!r}, expected {expected!r}"
    return None


def request(port, method, path, body):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        data = None if body is None else body if isinstance(body, str) else json.dumps(body)
        connection.request(method, path, data, {"Content-Type": "application/json"})
        response = connection.getresponse()
        return response.status, json.loads(response.read(1 << 20))
    finally:
        connection.close()


main()
