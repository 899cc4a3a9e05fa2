"""What a bundle costs: an agent's cold start in a sandbox against its start on the host.

    python benchmarks/agents.py [--agent opencode] [--sandbox local] [--rounds 3]

A start is a new process in a new home that answers ACP's ``initialize`` and ``session/new``. The
two sides take turns in one run, so that the ratio holds on a busy machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time

from benchflow.agents import bundle, catalog
from benchflow.agents.declaration import Declaration
from benchflow.contracts.sandbox import ImageSource, Mount, SandboxImage, SandboxProvider, SandboxSpec
from benchflow.kernel.registry import resolve

START_BUDGET = 1.1
CREATE_BUDGET = 1.1
SOURCE = ImageSource("agents", None, None, docker_image="debian:bookworm-slim", local_base="host")


def environment(declared: Declaration) -> dict[str, str]:
    given = {"{base_url}": "http://127.0.0.1:9", "{api_key}": "none", "{model}": "m"}
    filled: dict[str, str] = {}
    for name, text in declared.env.items():
        for key, value in given.items():
            text = text.replace(key, value)
        filled[name] = text
    return filled


async def handshake(stdin: asyncio.StreamWriter, stdout: asyncio.StreamReader, workspace: str) -> None:
    hello = {"protocolVersion": 1, "clientCapabilities": {}}
    for number, (method, params) in enumerate(
        {"initialize": hello, "session/new": {"cwd": workspace, "mcpServers": []}}.items()
    ):
        frame = {"jsonrpc": "2.0", "id": number, "method": method, "params": params}
        stdin.write(json.dumps(frame).encode() + b"\n")
        while line := await stdout.readline():
            if json.loads(line).get("id") == number:
                break


async def on_host(installed: bundle.Bundle, declared: Declaration) -> float:
    with tempfile.TemporaryDirectory() as home:
        began = time.perf_counter()
        process = await asyncio.create_subprocess_exec(
            *declared.prepared(bundle.command(declared, str(installed.folder), loader=False)),
            cwd=home,
            env={**environment(declared), "HOME": home, "PATH": "/usr/bin:/bin"},
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            limit=1 << 24,
        )
        assert process.stdin and process.stdout
        await handshake(process.stdin, process.stdout, home)
        took = time.perf_counter() - began
        process.kill()
        await process.wait()
        return took


async def inside(
    provider: SandboxProvider, image: SandboxImage, installed: bundle.Bundle, declared: Declaration
) -> float:
    spec = SandboxSpec("agents", workdir="/app", mounts=(installed.mount,))
    sandbox = await provider.create(image, spec)
    began = time.perf_counter()
    argv = installed.argv(declared, installed.mount.target)
    process = await sandbox.spawn(argv, user="agent", cwd="/app", env=environment(declared))
    await handshake(process.stdin, process.stdout, "/app")
    took = time.perf_counter() - began
    await process.kill()
    await sandbox.teardown()
    return took


async def creation(provider: SandboxProvider, image: SandboxImage, mounts: tuple[Mount, ...]) -> float:
    began = time.perf_counter()
    sandbox = await provider.create(image, SandboxSpec("agents", mounts=mounts))
    await sandbox.exec(["true"])
    took = time.perf_counter() - began
    await sandbox.teardown()
    return took


def report(name: str, ours: list[float], base: list[float], budget: float) -> bool:
    """Ratio of the best of each side: what the machine's other work adds is in neither."""
    ratio = min(ours) / min(base)
    times = f"{statistics.median(ours):7.3f} s against {statistics.median(base):7.3f} s"
    print(f"{name:<46} {times}   ratio of the best {ratio:5.2f}   budget <= {budget}")
    return ratio <= budget


async def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--agent", default="opencode")
    parser.add_argument("--sandbox", default="local")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    declared = catalog.find(options.agent)
    assert declared is not None
    installed = await bundle.ensure(declared, print)
    provider: SandboxProvider = resolve("sandboxes", options.sandbox)()
    image = await provider.prepare(SOURCE)

    began = time.perf_counter()
    await bundle.ensure(declared)
    print(f"{'asking for an installed bundle':<46} {(time.perf_counter() - began) * 1e3:7.3f} ms")
    bare, mounted, host, sandboxed = [], [], [], []
    await creation(provider, image, (installed.mount,))
    for _ in range(options.rounds * 5):
        bare.append(await creation(provider, image, ()))
        mounted.append(await creation(provider, image, (installed.mount,)))
    for _ in range(options.rounds):
        host.append(await on_host(installed, declared))
        sandboxed.append(await inside(provider, image, installed, declared))
    await provider.close()
    kept = [
        report(f"a {options.sandbox} sandbox with the bundle, without", mounted, bare, CREATE_BUDGET),
        report(f"{options.agent} in a {options.sandbox} sandbox, on the host", sandboxed, host, START_BUDGET),
    ]
    return 0 if all(kept) else 1


if __name__ == "__main__":
    raise SystemExit(asyncio.run(main()))
