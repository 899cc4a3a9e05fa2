"""Builds that do not fit on the disk of the state folder. Argument: the build context."""

import asyncio
import sys
from pathlib import Path

from benchflow.contracts.errors import HostPressureError, ImageBuildError
from benchflow.contracts.sandbox import ImageSource
from benchflow.sandboxes.local.provider import LocalProvider

context = Path(sys.argv[1])
source = ImageSource("example", context, context / "Dockerfile", local_base="host")


async def main():
    provider = LocalProvider()
    for text, expected in (
        ("RUN head -c 60000000 /dev/zero >/big", ImageBuildError),
        ("COPY big /big", HostPressureError),
    ):
        (context / "Dockerfile").write_text(f"FROM x\n{text}\n")
        try:
            await provider.builder.build(source)
        except expected:
            print(expected.__name__)
        assert not list((provider.store.root / "layers").glob("b-*"))
        assert not list((provider.store.root / "uppers").iterdir())
    (context / "big").write_bytes(b"fits")
    image = await provider.builder.build(source)
    print((image.rootfs.lowers[-1] / "big").read_text())
    await provider.close()


asyncio.run(main())
