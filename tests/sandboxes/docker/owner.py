"""A process that makes sandboxes until it is ended, and takes them down as far as it is let.
Arguments: image, name, how many times."""

import asyncio
import sys

from benchflow.contracts.sandbox import ImageSource, SandboxSpec
from benchflow.sandboxes.docker.provider import DockerProvider


async def main() -> None:
    image_name, name, times = sys.argv[1:]
    provider = DockerProvider()
    try:
        image = await provider.prepare(ImageSource("base", None, None, docker_image=image_name))
        await provider.preflight()
        await provider._volumes.helper(image.ref)
        print("ready", flush=True)
        for _ in range(int(times)):
            sandbox = await provider.create(image, SandboxSpec(name))
            await sandbox.exec(["true"])
            print("made", flush=True)
    finally:
        await provider.close()


asyncio.run(main())
