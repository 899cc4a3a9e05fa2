"""A process that owns a sandbox until it is killed. Argument: JSON [provider, context, word, name]."""

import asyncio
import json
import sys
from pathlib import Path

from benchflow.contracts.sandbox import ImageSource, SandboxSpec
from benchflow.kernel.registry import resolve


async def main() -> None:
    name, context, word, label = json.loads(sys.argv[1])
    provider = resolve("sandboxes", name)()
    folder = Path(context)
    image = await provider.prepare(
        ImageSource("conformance", folder, folder / "Dockerfile", local_base="host")
    )
    sandbox = await provider.create(image, SandboxSpec(name=f"{label}doomed"))
    await sandbox.spawn(["sleep", word])
    await sandbox.exec("echo data >file")
    await sandbox.exec(f"setsid sh -c 'trap \"\" TERM HUP; while :; do sleep {word}; done' >/dev/null 2>&1 &")
    print("running", flush=True)
    await asyncio.Event().wait()


asyncio.run(main())
