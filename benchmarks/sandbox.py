"""The local sandbox against bare bubblewrap with the same flags, and forks of a layer.

    python benchmarks/sandbox.py [--rounds N]

Both sides are measured alternately in one run, so that the ratios hold on a busy machine;
absolute times are for orientation only.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import subprocess
import time
from collections.abc import Awaitable, Callable

from benchflow.contracts.sandbox import ImageSource, Limits, Sandbox, SandboxImage, SandboxSpec
from benchflow.sandboxes.local import bwrap, nursery
from benchflow.sandboxes.local.provider import LocalProvider
from benchflow.sandboxes.local.seccomp import filter_fd
from benchflow.sandboxes.local.userns import user_namespace

SMALL = Limits(storage_mb=256, pids=None)
FILES = 10_000


def covers() -> list[str]:
    """What the helper covers of /proc, as flags."""
    args: list[str] = []
    for names, source in ((nursery.READ_ONLY, None), (nursery.MASKED, "/dev/null")):
        for path in (f"/proc/{name}" for name in names):
            args += ["--ro-bind", source or path, path] if os.path.exists(path) else []
    for path in (f"/proc/{name}" for name in nursery.EMPTY):
        args += ["--tmpfs", path, "--remount-ro", path] if os.path.exists(path) else []
    return args


def bare(provider: LocalProvider, image: SandboxImage) -> None:
    """bubblewrap itself: the same root file system and flags, and ``true``."""
    rootfs = provider.store.load_image(image.ref).rootfs
    upper = provider.store.new_upper(tmpfs=True, lowers=rootfs.lowers)
    userns, seccomp = user_namespace(), filter_fd()
    argv = [
        str(bwrap.bwrap_path()),
        *bwrap.jail_args(bwrap.Jail(rootfs, upper), userns, seccomp),
        *covers(),
        "--",
        "true",
    ]
    subprocess.run(argv, pass_fds=(userns.fd, seccomp), stdin=subprocess.DEVNULL, check=True)
    os.close(seccomp)
    provider.store.discard(upper)


async def ours(provider: LocalProvider, image: SandboxImage) -> None:
    sandbox = await provider.create(image, SandboxSpec("bench", limits=SMALL))
    result = await sandbox.exec(["true"])
    await sandbox.teardown()
    assert result.ok


async def timed(work: Callable[[], Awaitable[object]]) -> float:
    began = time.perf_counter()
    await work()
    return (time.perf_counter() - began) * 1e3


def line(name: str, times: list[float], ratio: str = "") -> None:
    print(f"{name:<44} min {min(times):7.2f} ms   median {statistics.median(times):7.2f} ms   {ratio}")


async def starts(provider: LocalProvider, image: SandboxImage, rounds: int) -> None:
    base: list[float] = []
    full: list[float] = []
    for _ in range(rounds):
        base.append(await timed(lambda: asyncio.to_thread(bare, provider, image)))
        full.append(await timed(lambda: ours(provider, image)))
    ratios = (
        f"{min(full) / min(base):.2f} x min, {statistics.median(full) / statistics.median(base):.2f} x median"
    )
    line("bare bubblewrap: start, true, stop", base)
    line("local sandbox: start, true, stop", full, f"{ratios} (budget 2 x)")


async def commands(provider: LocalProvider, image: SandboxImage, rounds: int) -> None:
    sandbox = await provider.create(image, SandboxSpec("bench", limits=SMALL))
    plain = [
        await timed(lambda: asyncio.to_thread(subprocess.run, ["true"], check=True))
        for _ in range(rounds * 5)
    ]
    inside = [await timed(lambda: sandbox.exec(["true"])) for _ in range(rounds * 5)]
    line("true, on the host", plain)
    line("true, by exec", inside, f"+{min(inside) - min(plain):.2f} ms (budget 2 ms)")
    await sandbox.teardown()


async def forks(provider: LocalProvider, image: SandboxImage, rounds: int) -> None:
    parent = await provider.create(image, SandboxSpec("parent", limits=SMALL))
    script = f"mkdir -p /data && cd /data && for i in $(seq {FILES}); do echo $i > f$i; done"
    assert (await parent.exec(script, timeout=300)).ok
    snapshots = [await timed(parent.snapshot)]
    snapshot = await parent.snapshot()
    store = provider.store

    async def layer_only() -> None:
        store.discard(store.new_upper(tmpfs=True, lowers=store.load_image(snapshot.ref).rootfs.lowers))

    async def child(index: int) -> Sandbox:
        made = await provider.create(snapshot, SandboxSpec(f"child{index}", limits=SMALL))
        assert (await made.exec(f"cat /data/f{FILES}")).out.strip() == str(FILES)
        return made

    started: list[float] = []
    stopped: list[float] = []
    for _ in range(rounds):
        began = time.perf_counter()
        running = await asyncio.gather(*map(child, range(4)))
        answered = time.perf_counter()
        await asyncio.gather(*(one.teardown() for one in running))
        started.append((answered - began) * 1e3)
        stopped.append((time.perf_counter() - answered) * 1e3)
    line(f"snapshot of {FILES} new files", snapshots)
    line(
        "fork of the file system, per child",
        [await timed(layer_only) for _ in range(rounds)],
        "(budget 5 ms)",
    )
    line("four children started and answering", started, "(budget 50 ms)")
    line("four children stopped", stopped)
    await parent.teardown()


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=20)
    rounds = parser.parse_args().rounds
    provider = LocalProvider()
    await provider.preflight()
    image = await provider.prepare(ImageSource("bench", None, None, local_base="host"))
    await starts(provider, image, rounds)
    await commands(provider, image, rounds)
    await forks(provider, image, rounds)
    await provider.close()


if __name__ == "__main__":
    asyncio.run(main())
