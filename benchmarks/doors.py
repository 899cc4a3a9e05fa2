"""What each way from inside a sandbox to the gateway adds to a call, in one run.

    python benchmarks/doors.py [--calls 300]

A server on a unix socket answers 1 kB to 4 kB; a client inside calls it on one kept connection,
then on a new one each time. ``direct`` is the same client on the host, at the socket itself. The
doors live in this process, as in a job. Ways that this machine does not have are left out.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from pathlib import Path

import uvloop

from benchflow.contracts.errors import BenchflowError
from benchflow.contracts.sandbox import ImageSource, ModelDoor, NetworkPolicy, SandboxProvider, SandboxSpec
from benchflow.kernel.registry import resolve

PORT = 4567
WAYS = {
    "local": [("none", "socket"), ("none", "stream"), ("open", "bridge")],
    "docker": [("none", "namespace"), ("none", "socket"), ("none", "stream"), ("open", "bridge")],
}
REQUEST, REPLY = 4096, 1024
CLIENT = f"""
import json, socket, statistics, sys, time
def dial():
    if sys.argv[1].isdigit():
        s = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
        s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return s
    s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]); return s
def call(s):
    s.sendall(bytes({REQUEST})); s.recv({REPLY}, socket.MSG_WAITALL)
def once():
    with dial() as s: call(s)
def took(what, *arguments):
    times = []
    for _ in range(int(sys.argv[2])):
        began = time.perf_counter(); what(*arguments); times.append((time.perf_counter() - began) * 1000)
    return statistics.median(times), sorted(times)[int(len(times) * 0.99)]
kept = dial()
for _ in range(20): call(kept)
print(json.dumps([*took(call, kept), *took(once)]))
"""


class Server(asyncio.Protocol):
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.transport, self.heard = transport, 0

    def data_received(self, data: bytes) -> None:
        self.heard += len(data)
        if self.heard == REQUEST:
            self.heard = 0
            self.transport.write(bytes(REPLY))


def tell(what: str, took: list[float]) -> None:
    kept, kept_99, new, new_99 = took
    print(f"{what:18} kept p50 {kept:.3f} p99 {kept_99:.3f} ms   new p50 {new:.3f} p99 {new_99:.3f} ms")


async def measure(provider: SandboxProvider, path: Path, calls: int) -> None:
    image = await provider.prepare(
        ImageSource("doors", None, None, docker_image="debian:bookworm-slim", local_base="host")
    )
    for mode, via in WAYS[provider.name]:
        spec = SandboxSpec(
            "doors",
            network=NetworkPolicy(mode),  # type: ignore[arg-type]
            model_door=ModelDoor(path, PORT, via),  # type: ignore[arg-type]
        )
        try:
            sandbox = await provider.create(image, spec)
        except BenchflowError as error:
            print(f"{provider.name} {via}: {error}")
            continue
        done = await sandbox.exec(["python3", "-c", CLIENT, str(PORT), str(calls)], user="agent")
        tell(f"{provider.name} {via}", json.loads(done.out))
        await sandbox.teardown()


async def run(calls: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "server.sock"
        server = await asyncio.get_running_loop().create_unix_server(Server, str(path))
        path.chmod(0o666)
        client = await asyncio.create_subprocess_exec(
            sys.executable, "-c", CLIENT, str(path), str(calls), stdout=asyncio.subprocess.PIPE
        )
        tell("direct", json.loads((await client.communicate())[0]))
        for name in WAYS:
            provider: SandboxProvider = resolve("sandboxes", name)()
            try:
                await provider.preflight()
                await measure(provider, path, calls)
            except BenchflowError as error:
                print(f"{name}: {error}")
            finally:
                await provider.close()
        server.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=300)
    uvloop.run(run(parser.parse_args().calls))


if __name__ == "__main__":
    main()
