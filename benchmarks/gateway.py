"""What the gateway costs, against the same calls without it, in one run.

    python benchmarks/gateway.py [--calls 2000]

Three processes: a bare HTTP upstream, the gateway with capture on, and a client. Requests of 4 kB,
replies of 1 kB, connections kept alive. Budgets: at most 1 ms added at the median and 3 ms at the
99th percentile, at least 1,000 calls per CPU second of the gateway.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import statistics
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path

import aiohttp
import orjson
import uvloop

REQUEST = orjson.dumps({"model": "m", "messages": [{"role": "user", "content": "x" * 4000}]})
REPLY = orjson.dumps(
    {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1,
        "model": "m",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "y" * 750},
                "finish_reason": "stop",
            }
        ],
        "usage": {"prompt_tokens": 1000, "completion_tokens": 200, "total_tokens": 1200},
    }
)
ROUTES = 16


class Upstream(asyncio.Protocol):
    """Reads a request by its content length and writes the same reply: as cheap as a server gets."""

    HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(REPLY)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.transport = transport
        self.buffer = b""

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        while (end := self.buffer.find(b"\r\n\r\n")) >= 0:
            head = self.buffer[:end].lower()
            length = int(head.partition(b"content-length:")[2].split(b"\r\n")[0])
            if len(self.buffer) < end + 4 + length:
                return
            self.buffer = self.buffer[end + 4 + length :]
            self.transport.write(self.HEAD + REPLY)


def run_upstream(pipe: Connection) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        server = await loop.create_server(Upstream, "127.0.0.1", 0)
        pipe.send(server.sockets[0].getsockname()[1])
        await loop.run_in_executor(None, pipe.recv)

    uvloop.run(main())


def run_gateway(pipe: Connection, folder: str, url: str) -> None:
    from benchflow.contracts.gateway import ModelSpec
    from benchflow.gateway.server import GatewayServer
    from benchflow.kernel.storage import Redactor

    os.environ["OPENAI_API_KEY"], os.environ["OPENAI_BASE_URL"] = "secret-key-of-the-provider", url

    async def main() -> None:
        loop = asyncio.get_running_loop()
        gateway = GatewayServer(Path(folder) / "g.sock", redact=Redactor())
        await gateway.start()
        paths = []
        for number in range(ROUTES):
            file = Path(folder) / f"{number}.jsonl"
            route = await gateway.open_route(
                f"r{number}", ModelSpec("openai/m"), trajectory=file, task="t", seed=0, trial=number
            )
            paths.append(route.host_path)
        pipe.send(paths)
        while await loop.run_in_executor(None, pipe.recv):
            pipe.send(time.process_time())
        await gateway.stop()

    uvloop.run(main())


async def one_by_one(client: aiohttp.ClientSession, urls: list[str], calls: int) -> list[float]:
    """Milliseconds of each of ``calls`` calls, one after another."""
    took = []
    for number in range(calls):
        began = time.perf_counter()
        async with client.post(urls[number % len(urls)], data=REQUEST) as reply:
            await reply.read()
            assert reply.status == 200
        took.append((time.perf_counter() - began) * 1000)
    return took


async def all_at_once(client: aiohttp.ClientSession, urls: list[str], calls: int) -> float:
    """Seconds for ``calls`` calls by as many workers as there are routes."""

    async def worker(url: str) -> None:
        for _ in range(calls // len(urls)):
            async with client.post(url, data=REQUEST) as reply:
                await reply.read()
                assert reply.status == 200

    began = time.perf_counter()
    await asyncio.gather(*(worker(url) for url in urls))
    return time.perf_counter() - began


async def measure(folder: str, port: int, pipe: Connection, paths: list[str], calls: int) -> None:
    direct_urls = [f"http://127.0.0.1:{port}/v1/chat/completions"] * ROUTES
    gateway_urls = [f"http://gateway{path}/v1/chat/completions" for path in paths]
    headers = {"content-type": "application/json"}
    connector = aiohttp.UnixConnector(f"{folder}/g.sock", limit=0)
    async with (
        aiohttp.ClientSession(headers=headers) as direct,
        aiohttp.ClientSession(connector=connector, headers=headers) as through,
    ):
        plain: list[float] = []
        longer: list[float] = []
        for turn in range(21):  # in turns, so that both meet the same machine; the first is warm-up
            once = await one_by_one(direct, direct_urls, calls // 40)
            more = await one_by_one(through, gateway_urls, calls // 40)
            if turn:
                plain += once
                longer += more
        plain.sort()
        longer.sort()
        own = time.process_time()
        direct_sec = await all_at_once(direct, direct_urls, calls)
        own = time.process_time() - own
        pipe.send(True)
        before = pipe.recv()
        through_sec = await all_at_once(through, gateway_urls, calls)
        pipe.send(True)
        cpu = pipe.recv() - before
    added = [after - before for before, after in zip(plain, longer, strict=True)]
    tell("direct", plain)
    tell("through gateway", longer)
    tell("added", added, " (budget 1)", " (budget 3)")
    rates = f"direct {calls / direct_sec:.0f} calls/s, through gateway {calls / through_sec:.0f}"
    print(f"{ROUTES} at once         {rates}")
    print(f"per CPU second     client alone {calls / own:.0f} calls, gateway {calls / cpu:.0f} (budget 1000)")


def tell(what: str, took: list[float], median: str = "", late: str = "") -> None:
    """``took`` is in ascending order."""
    p99 = took[int(len(took) * 0.99)]
    print(f"{what:18} p50 {statistics.median(took):.3f} ms{median}   p99 {p99:.3f} ms{late}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=4000)
    calls = parser.parse_args().calls
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        upstream_pipe, upstream_end = spawn.Pipe()
        upstream = spawn.Process(target=run_upstream, args=(upstream_end,), daemon=True)
        upstream.start()
        port = upstream_pipe.recv()
        gateway_pipe, gateway_end = spawn.Pipe()
        arguments = (gateway_end, folder, f"http://127.0.0.1:{port}/v1")
        gateway = spawn.Process(target=run_gateway, args=arguments, daemon=True)
        gateway.start()
        uvloop.run(measure(folder, port, gateway_pipe, gateway_pipe.recv(), calls))
        gateway_pipe.send(False)
        upstream_pipe.send(False)
        gateway.join()
        upstream.join()


if __name__ == "__main__":
    main()
