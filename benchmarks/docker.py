"""Docker rollouts beside what the engine itself needs, measured alternately in one run.

    python benchmarks/docker.py [--rounds 7] [--base IMAGE]

1. One oracle rollout of `hello`, its image ready, against the engine's own create + start +
   2 execs + remove of the same image, asked over the same socket.
2. 8 rollouts at concurrency 8 against 8 such containers at once.

IMAGE (debian:12) stands in for the task's base. No `docker` process is started by either side.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from benchflow.contracts.errors import PrerequisiteError
from benchflow.contracts.sandbox import ImageSource
from benchflow.jobs.config import EvaluationConfig
from benchflow.jobs.evaluation import Evaluation
from benchflow.sandboxes.docker.engine import Engine
from benchflow.sandboxes.docker.provider import DockerProvider

HELLO = Path(__file__).parents[1] / "examples" / "tasks" / "hello"
BUDGET = 1.5


async def bare(engine: Engine, image: str, network: str = "none") -> None:
    """The engine's own life of a container: it idles, two commands run in it, it is removed."""
    body = {
        "Image": image,
        "Entrypoint": ["sleep", "1000"],
        "HostConfig": {"NetworkMode": network, "Init": True, "Memory": 512 << 20, "NanoCpus": 10**9},
    }
    made = (await engine.json("POST", "containers/create", body=body))["Id"]
    await engine.json("POST", f"containers/{made}/start")
    for _ in range(2):
        command = {"Cmd": ["true"], "AttachStdout": True, "AttachStderr": True}
        ident = (await engine.json("POST", f"containers/{made}/exec", body=command))["Id"]
        async with engine.open("POST", f"exec/{ident}/start", data=b'{"Detach": false}') as response:
            await response.read()
        assert (await engine.json("GET", f"exec/{ident}/json"))["ExitCode"] == 0
    await engine.json("DELETE", f"containers/{made}", params={"force": True})


async def rollouts(folder: Path, base: str, trials: int = 1) -> None:
    config = EvaluationConfig(
        agent="oracle",
        sandbox="docker",
        new=True,
        trials=trials,
        concurrency=trials,
        base_image_override=(f"debian:12-slim={base}",),
    )
    ended = await Evaluation(HELLO, folder, config).run()
    assert ended.passed == trials


async def timed(work: Callable[[], Awaitable[object]]) -> float:
    began = time.perf_counter()
    await work()
    return (time.perf_counter() - began) * 1e3


async def compare(
    name: str, rounds: int, engines: Callable[[], Awaitable[object]], ours: Callable[[], Awaitable[object]]
) -> bool:
    await ours()  # image, helper volume and byte code are ready
    theirs, full = [], []
    for _ in range(rounds):
        theirs.append(await timed(engines))
        full.append(await timed(ours))
    ratio = statistics.median(full) / statistics.median(theirs)
    for label, times in (("engine alone", theirs), ("benchflow", full)):
        print(f"{name:<28} {label:<14} min {min(times):7.0f} ms   median {statistics.median(times):7.0f} ms")
    print(f"{name:<28} {ratio:.2f} x (budget {BUDGET} x) {'ok' if ratio <= BUDGET else 'MISSED'}", flush=True)
    return ratio <= BUDGET


async def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--base", default="debian:12")
    args = parser.parse_args()
    provider = DockerProvider()
    try:
        await provider.preflight()
    except PrerequisiteError as error:
        print(f"not measured: {error}")
        return 0
    source = ImageSource("hello", None, None, docker_image=args.base)
    image = (await provider.prepare(source)).ref
    engine = provider.engine
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        one = await compare(
            "one rollout", args.rounds, lambda: bare(engine, image), lambda: rollouts(folder, args.base)
        )
        eight = await compare(
            "8 rollouts at once",
            max(3, args.rounds // 2),
            lambda: asyncio.gather(*(bare(engine, image) for _ in range(8))),
            lambda: rollouts(folder, args.base, 8),
        )
    await provider.close()
    return 0 if one and eight else 1


if __name__ == "__main__":
    raise SystemExit(asyncio.run(main()))
