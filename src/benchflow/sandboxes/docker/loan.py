"""Host settings for a build, on an engine that can mount nothing into one.

The base images get one more layer with what ``lent`` collects; the build runs on these; then
the finished image is taken from the engine, that layer and its variables are cut out of it,
and it is given back. What was lent stays in no image.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import os
import re
import tarfile
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import IO

from benchflow.contracts.errors import ImageBuildError
from benchflow.kernel.storage import dumps
from benchflow.sandboxes.buildlog import BuildLog
from benchflow.sandboxes.docker.build import build, messages
from benchflow.sandboxes.docker.engine import Engine, EngineError
from benchflow.sandboxes.docker.recipe import LABEL, SENT_AS, whole
from benchflow.sandboxes.lent import TARGET, lend
from benchflow.sandboxes.tarstream import CHUNK, END, entries

LOAN = "benchflow.loan"
"""Label of everything that holds lent files."""
_UNREACHED = re.compile(
    r"certificate|SSL|TLS|resolv|onnection|timed out|No matching distribution|Unable to locate package"
    r"|[Ff]ailed to fetch|ENOTFOUND|Network is unreachable",
)
_INDEXES = ("manifest.json", "repositories", "index.json", "oci-layout")


def may_help(error: ImageBuildError) -> bool:
    """True when a build looks as if it failed for want of the host's certificates or indexes."""
    return bool(error.detail) and _UNREACHED.search(error.detail or "") is not None


class Loan:
    """The lent settings of one build. Use as a context: nothing lent is left after it."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.name = os.urandom(8).hex()
        self.images: dict[str, str] = {}
        """By base image, what to build on instead."""
        self.secrets: list[str] = []
        self._variables: dict[str, str] = {}

    async def __aenter__(self) -> Loan:
        return self

    async def __aexit__(self, *exc: object) -> None:
        for tag in self.images.values():
            await self._forget(f"images/{tag}")
        await self._forget(f"images/{self.tag}")
        filters = {"dangling": ["true"], "label": [f"{LOAN}={self.name}"]}
        await self._engine.json("POST", "images/prune", params={"filters": filters})

    @property
    def tag(self) -> str:
        """The name for the image while it still holds what was lent."""
        return f"benchflow/loan:{self.name}"

    async def lend(self, base: str, log: BuildLog) -> None:
        """Make an image like ``base`` with the settings in it."""
        config = (await self._engine.json("GET", f"images/{base}/json")).get("Config") or {}
        if config.get("OnBuild"):
            return  # its triggers would run here, where their files are not
        own = {item.partition("=")[0] for item in config.get("Env") or ()}
        release = await self._os_release(base)
        with tempfile.TemporaryDirectory(prefix="benchflow-lent-") as scratch:
            lent = await asyncio.to_thread(lend, Path(scratch), release)
            files = {
                str(path.relative_to(scratch)): path.read_bytes()
                for path in sorted(Path(scratch).rglob("*"))
                if path.is_file()
            }
        variables = {name: value for name, value in lent.env.items() if name not in own and "\n" not in value}
        set_all = " ".join(f'{name}="{_quoted(value)}"' for name, value in variables.items())
        dockerfile = (
            f"FROM {base}\nLABEL {LABEL}=1 {LOAN}={self.name}\nCOPY lent {TARGET}\n"
            f"ENV BENCHFLOW_LENT={TARGET} {set_all}\n"
        )
        tag = f"{self.tag}-{len(self.images)}"
        self.images[base] = tag
        self.secrets += lent.secrets
        self._variables |= {**variables, "BENCHFLOW_LENT": TARGET}

        def stream() -> Iterator[bytes]:
            yield from whole(SENT_AS, dockerfile.encode())
            for name, data in files.items():
                yield from whole(f"lent/{name}", data)
            yield END

        await build(
            self._engine,
            tag=tag,
            dockerfile=SENT_AS,
            stream=stream(),
            steps=(),
            buildkit=False,
            labels={},
            log=log,
        )

    async def give_back(self, tag: str) -> bool:
        """Put the built image under ``tag``, without what was lent. False when it cannot be
        told apart any more: the build copied it elsewhere."""
        layers = set()
        for name in self.images.values():
            layers.add((await self._engine.json("GET", f"images/{name}/json"))["RootFS"]["Layers"][-1])
        with tempfile.TemporaryFile() as saved:
            async with self._engine.open("GET", f"images/{self.tag}/get") as response:
                async for data in response.content.iter_chunked(CHUNK):
                    await asyncio.to_thread(saved.write, data)
            archive = _Saved(saved, layers, self._variables, tag)
            if not await asyncio.to_thread(archive.read):
                return False
            async with self._engine.open(
                "POST", "images/load", data=archive.stream(), headers={"Content-Type": "application/x-tar"}
            ) as response:
                async for message in messages(response, self._engine):
                    if "error" in message:
                        raise ImageBuildError(
                            f"the docker engine refused the built image: {message['error']}"
                        )
        return True

    async def _os_release(self, base: str) -> str | None:
        body = {"Image": base, "Cmd": ["none"], "Entrypoint": [], "Labels": {LABEL: "1", LOAN: self.name}}
        made = await self._engine.json("POST", "containers/create", body={**body, "NetworkDisabled": True})
        try:
            for path in ("/usr/lib/os-release", "/etc/os-release"):
                try:
                    async with self._engine.open(
                        "GET", f"containers/{made['Id']}/archive", params={"path": path}
                    ) as response:
                        for entry in entries(io.BytesIO(await response.read())):
                            if entry.info.isreg():
                                return entry.read(1 << 16).decode("utf-8", "replace")
                except EngineError as error:
                    if error.status != 404:
                        raise
            return None
        finally:
            await self._forget(f"containers/{made['Id']}")

    async def _forget(self, path: str) -> None:
        try:
            await self._engine.json("DELETE", path, params={"force": True})
        except EngineError as error:
            if error.status not in (404, 409):
                raise


class _Saved:
    """An image as the engine saved it, and the same without some of its layers."""

    def __init__(self, file: IO[bytes], layers: set[str], variables: Mapping[str, str], tag: str) -> None:
        self._file = file
        self._layers = layers
        self._env = {f"{name}={value}" for name, value in variables.items()}
        self._tag = tag
        self._skipped: set[str] = set(_INDEXES)
        self._added: dict[str, bytes] = {}

    def read(self) -> bool:
        """False when what was lent is in a layer that stays."""
        with self._open() as archive:
            manifest = json.loads(self._content(archive, "manifest.json"))[0]
            config = json.loads(self._content(archive, manifest["Config"]))
            ids, files = config["rootfs"]["diff_ids"], manifest["Layers"]
            kept = [index for index, layer in enumerate(ids) if layer not in self._layers]
            if any(self._holds_lent(archive, files[index]) for index in kept):
                return False
            self._skipped |= {manifest["Config"], *(files[i] for i in range(len(ids)) if i not in kept)}
        config["rootfs"]["diff_ids"] = [ids[index] for index in kept]
        config["history"] = [
            item
            for item in config.get("history") or ()
            if TARGET not in item.get("created_by", "") and LOAN not in item.get("created_by", "")
        ]
        for part in ("config", "container_config"):
            settings = config.get(part) or {}
            settings["Env"] = [item for item in settings.get("Env") or () if item not in self._env]
            (settings.get("Labels") or {}).pop(LOAN, None)
        config.pop("parent", None)
        text = dumps(config)
        name = f"{hashlib.sha256(text).hexdigest()}.json"
        self._added = {
            name: text,
            "manifest.json": dumps(
                [{"Config": name, "RepoTags": [self._tag], "Layers": [files[index] for index in kept]}]
            ),
        }
        return True

    async def stream(self) -> AsyncIterator[bytes]:
        found = self._members()
        while data := await asyncio.to_thread(next, found, b""):
            yield data

    def _members(self) -> Iterator[bytes]:
        with self._open() as archive:
            for info in archive:
                if info.name in self._skipped or info.isdir():
                    continue
                yield info.tobuf(tarfile.PAX_FORMAT)
                if info.isreg():
                    data = archive.extractfile(info)
                    assert data is not None
                    while chunk := data.read(CHUNK):
                        yield chunk
                    if info.size % 512:
                        yield b"\0" * (-info.size % 512)
        for name, text in self._added.items():
            yield from whole(name, text)
        yield END

    def _open(self) -> tarfile.TarFile:
        self._file.seek(0)
        return tarfile.open(fileobj=self._file, mode="r:")

    @staticmethod
    def _content(archive: tarfile.TarFile, name: str) -> bytes:
        data = archive.extractfile(name)
        assert data is not None
        return data.read()

    @staticmethod
    def _holds_lent(archive: tarfile.TarFile, name: str) -> bool:
        """Whether a layer has the lent folder in it."""
        with tarfile.open(fileobj=archive.extractfile(name), mode="r:*") as layer:
            return any(info.name.lstrip("./").startswith(TARGET.lstrip("/.")) for info in layer)


def _quoted(value: str) -> str:
    return re.sub(r'(["\\$])', r"\\\1", value)
