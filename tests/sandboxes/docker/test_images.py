"""Task images on a Docker engine: what is built, found again, refused, and left behind."""

from __future__ import annotations

import asyncio
import io
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from benchflow.contracts.errors import (
    BenchflowError,
    HostPressureError,
    ImageBuildError,
    PrerequisiteError,
    UsageError,
)
from benchflow.contracts.sandbox import ImageSource, SandboxImage
from benchflow.sandboxes.docker.engine import Engine
from benchflow.sandboxes.docker.images import Images
from benchflow.sandboxes.docker.recipe import LABEL, Recipe, tar

BASE = "debian:bookworm-slim"
Make = Callable[..., ImageSource]
Run = Callable[..., Awaitable[str]]


@pytest.fixture
async def images(engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Images]:
    """With a state folder of its own; what it built is removed again."""
    monkeypatch.setenv("BENCHFLOW_HOME", str(tmp_path / "home"))
    made = Images(engine)
    before = {item["Id"] for item in await task_images(engine)}
    yield made
    for item in await task_images(engine):
        if item["Id"] not in before and str(tmp_path) in json.dumps(item["Labels"]):
            await engine.json("DELETE", f"images/{item['Id']}", params={"force": True})


async def task_images(engine: Engine) -> list[dict[str, Any]]:
    return await engine.json("GET", "images/json", params={"filters": {"label": [LABEL]}})


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """A source from a Dockerfile's text and files of its context. A label that no other test
    has keeps the engine's cache out of it, and names what is to be removed."""
    folder = tmp_path / "environment"

    def make(text: str, files: dict[str, str] | None = None, **more: Any) -> ImageSource:
        folder.mkdir(exist_ok=True)
        for name, content in (files or {}).items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(content)
        text = text.replace("LABEL test", f'LABEL test="{tmp_path}"')
        (folder / "Dockerfile").write_text(text)
        return ImageSource("example", folder, folder / "Dockerfile", **more)

    return make


@pytest.fixture
def run(engine: Engine) -> Run:
    """The output of a command in a container without a network."""

    async def run(image: SandboxImage, *argv: str) -> str:
        body = {"Image": image.ref, "Entrypoint": [argv[0]], "Cmd": list(argv[1:]), "Tty": True}
        made = await engine.json("POST", "containers/create", body={**body, "NetworkDisabled": True})
        try:
            await engine.json("POST", f"containers/{made['Id']}/start")
            await engine.json("POST", f"containers/{made['Id']}/wait")
            async with engine.open(
                "GET", f"containers/{made['Id']}/logs", params={"stdout": True}
            ) as response:
                return (await response.text()).replace("\r\n", "\n")
        finally:
            await engine.json("DELETE", f"containers/{made['Id']}", params={"force": True})

    return run


def logs(tmp_path: Path) -> list[Path]:
    return list((tmp_path / "home/docker/build-logs").glob("*.log"))


async def test_a_task_is_built_once_and_its_facts_are_told(
    images: Images, engine: Engine, make: Make, run: Run, tmp_path: Path
) -> None:
    source = make(
        f'FROM {BASE}\nLABEL test\nENV A=1 B="two words"\nWORKDIR /w\nCOPY . .\n'
        'RUN echo "$B" >out\nUSER 1234\n',
        {"counts.csv": "a,b\n", "skipped/x": "x", ".dockerignore": "skipped\n.dockerignore\n"},
    )
    await images.check(source)
    first, second = await asyncio.gather(images.prepare(source), Images(engine).prepare(source))
    assert first == second == await images.prepare(source)
    assert len(logs(tmp_path)) == 1
    assert "$B" in logs(tmp_path)[0].read_text()
    assert (first.base, first.workdir, first.user, first.env["B"]) == (BASE, "/w", "1234", "two words")
    listed = await run(first, "sh", "-c", "ls -A1; cat out counts.csv; stat -c '%u %Y' counts.csv")
    assert listed == "Dockerfile\ncounts.csv\nout\ntwo words\na,b\n0 1577836800\n"


async def test_another_process_takes_the_image_that_is_there(
    images: Images, make: Make, tmp_path: Path
) -> None:
    """Two processes at once build once."""
    source = make(f"FROM {BASE}\nLABEL test\nRUN sleep 1\n")
    running = [build_process(source) for _ in range(2)]
    refs = {(await asyncio.to_thread(process.communicate))[0] for process in running}
    assert len(refs) == 1
    assert len(logs(tmp_path)) == 1
    assert (await images.prepare(source)).ref == refs.pop().strip()
    assert len(logs(tmp_path)) == 1


def build_process(source: ImageSource) -> subprocess.Popen[str]:
    code = (
        "import asyncio, sys; from pathlib import Path\n"
        "from benchflow.contracts.sandbox import ImageSource\n"
        "from benchflow.sandboxes.docker.engine import Engine\n"
        "from benchflow.sandboxes.docker.images import Images\n"
        "async def main():\n"
        "    engine, folder = Engine(), Path(sys.argv[1])\n"
        "    print((await Images(engine).prepare(ImageSource('x', folder, folder / 'Dockerfile'))).ref)\n"
        "    await engine.close()\n"
        "asyncio.run(main())\n"
    )
    argv = [sys.executable, "-c", code, str(source.context)]
    return subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)


async def test_a_change_of_what_is_copied_builds_anew(images: Images, make: Make, run: Run) -> None:
    text = f"FROM {BASE}\nLABEL test\nCOPY data /data\n"
    first = await images.prepare(make(text, {"data": "one"}))
    second = await images.prepare(make(text, {"data": "two"}))
    assert (await run(first, "cat", "/data"), await run(second, "cat", "/data")) == ("one", "two")
    assert await images.prepare(make(text, {"data": "one"})) == first


async def test_a_base_with_new_content_under_its_name_builds_anew(
    images: Images, engine: Engine, make: Make, run: Run, tmp_path: Path
) -> None:
    base = f"benchflow/test:{tmp_path.name.lower()}-{os.getpid()}"
    for word in ("old", "new"):
        made = await images.prepare(make(f"FROM {BASE}\nLABEL test\nRUN echo {word} >/word\n"))
        repository, _, tag = base.partition(":")
        await engine.json("POST", f"images/{made.ref}/tag", params={"repo": repository, "tag": tag})
        built = await images.prepare(make(f"FROM {base}\nRUN cat /word >/seen\n"))
        assert await run(built, "cat", "/seen") == f"{word}\n"
    await engine.json("DELETE", f"images/{base}")


async def test_stages_and_an_image_with_nothing_but_sh(images: Images, make: Make, run: Run) -> None:
    """Several stages; no WORKDIR, no bash, no certificates; an entrypoint that never returns."""
    image = await images.prepare(
        make(
            f"ARG FIRST={BASE}\nFROM ${{FIRST}} AS Tools\nLABEL test\n"
            "RUN mkdir -p /out/bin && cp -L --parents /lib/*/libc.so.6 /lib64/ld-linux* /out/ 2>/dev/null;"
            " cp /bin/dash /out/bin/sh\n"
            "FROM scratch\nCOPY --from=tools /out /\nLABEL test\nENTRYPOINT while :; do :; done\n"
        )
    )
    assert (image.base, image.workdir, image.user) == ("scratch", None, None)
    assert await run(image, "sh", "-c", "echo fine") == "fine\n"


async def test_docker_image_without_a_folder(images: Images, make: Make) -> None:
    source = ImageSource("example", None, None, docker_image=BASE)
    await images.check(source)
    assert (await images.prepare(source)).base == BASE
    missing = make(f"FROM {BASE}\nLABEL test\n", docker_image="example.invalid/none:1")
    await images.check(missing)
    built = await images.prepare(missing)
    assert built.base == BASE
    assert "example.invalid/none:1" in built.notes[0]


async def test_a_base_of_the_users_choice(images: Images, make: Make, run: Run) -> None:
    text = "FROM nowhere:1 AS tools\nLABEL test\nRUN echo tools >/tools\n"
    text += "FROM missing:2\nCOPY --from=tools /tools /\n"
    source = make(text, base_override=("nowhere:1=debian:bookworm-slim", "benchflow/base:bookworm"))
    await images.check(source)
    image = await images.prepare(source)
    assert image.base == "benchflow/base:bookworm"
    assert await run(image, "cat", "/tools") == "tools\n"
    other = ImageSource("x", None, None, docker_image="missing:2", base_override=(BASE,))
    assert (await images.prepare(other)).base == BASE


async def test_a_cache_mount_is_built_by_buildkit(images: Images, make: Make, tmp_path: Path) -> None:
    text = f"FROM {BASE}\nLABEL test\n"
    text += f"RUN --mount=type=cache,target=/c echo said-$((40 + 2)) {os.urandom(4).hex()}\n"
    await images.prepare(make(text))
    assert "said-42" in logs(tmp_path)[0].read_text()
    with pytest.raises(
        ImageBuildError, match="Dockerfile line 4: RUN echo why >&2; exit 9 exited with 9"
    ) as caught:
        await images.prepare(make(text + "RUN echo why >&2; exit 9\n"))
    assert caught.value.detail == "why\n"


WRONG: list[tuple[str, type[BenchflowError], str]] = [
    ("FROM {base}\nLABLE x=y\n", UsageError, "line 2: LABLE is not supported"),
    ("RUN true\n", UsageError, "no FROM"),
    ("FROM {base} AS\n", UsageError, "line 1: FROM"),
    ("FROM Bad_Name:!\n", UsageError, "'Bad_Name:!' is not an image name"),
    (
        "FROM example.invalid/none:1\n",
        PrerequisiteError,
        "'example.invalid/none:1' is not on this docker engine",
    ),
]


@pytest.mark.parametrize(("text", "kind", "said"), WRONG)
async def test_what_cannot_be_built_is_said_before(
    images: Images, make: Make, text: str, kind: type[BenchflowError], said: str
) -> None:
    with pytest.raises(kind) as caught:
        await images.check(make(text.format(base=BASE)))
    assert said in caught.value.message
    assert "\n" not in str(caught.value)


async def test_heredocs_are_refused_by_name_where_the_engine_cannot(make: Make) -> None:
    recipe = Recipe(
        make(f"FROM {BASE}\nRUN <<'END' && true\nFROM not-an-instruction\nEND\nCOPY x /\nRUN true\n")
    )
    assert [item.keyword for item in recipe.dockerfile.instructions] == ["FROM", "RUN", "COPY", "RUN"]
    assert recipe.needs_buildkit("1.42")
    with pytest.raises(ImageBuildError, match="line 2: RUN with a heredoc cannot be built") as caught:
        recipe.needs_buildkit("1.41")
    assert caught.value.fix
    assert not Recipe(make(f"FROM {BASE}\nRUN cat <<< word; echo '<<EOF'\n")).needs_buildkit("1.41")


async def test_an_engine_too_old_for_a_dockerfile_is_a_prerequisite(
    images: Images, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Recipe, api: str) -> bool:
        raise ImageBuildError("line 2: RUN with a heredoc cannot be built", fix="use Docker 23")

    monkeypatch.setattr(Recipe, "needs_buildkit", refuse)
    with pytest.raises(PrerequisiteError, match="heredoc cannot be built") as caught:
        await images.check(make(f"FROM {BASE}\nRUN <<END\ntrue\nEND\n"))
    assert caught.value.fix == "use Docker 23"


@pytest.mark.parametrize(
    ("text", "said", "detail"),
    [
        (
            "FROM {base}\n\nRUN echo out && \\\n  exit 3\n",
            "Dockerfile line 3: RUN echo out && exit 3 exited with 3: out",
            "out\n",
        ),
        ("FROM {base}\nCOPY missing /x\n", "Dockerfile line 2: COPY missing /x: ", ""),
        ("FROM {base}\nCOPY leaving /x\n", "Dockerfile line 2: COPY leaving /x: ", ""),
    ],
)
async def test_a_failure_names_the_line(
    images: Images, make: Make, tmp_path: Path, text: str, said: str, detail: str
) -> None:
    source = make(text.format(base=BASE), {"x": ""})
    (tmp_path / "environment/leaving").symlink_to("/etc/hostname")
    with pytest.raises(ImageBuildError) as caught:
        await images.prepare(source)
    assert caught.value.message.startswith(said)
    assert "\n" not in caught.value.message
    assert str(logs(tmp_path)[0]) in (caught.value.fix or "")
    assert (caught.value.detail or "") == detail


async def test_an_image_for_another_machine(images: Images, engine: Engine) -> None:
    name = f"benchflow/other-machine:{os.getpid()}"
    config = {
        "architecture": "s390x",
        "os": "linux",
        "config": {},
        "rootfs": {"type": "layers", "diff_ids": []},
    }
    manifest = [{"Config": "config.json", "RepoTags": [name], "Layers": []}]
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as archive:
        for file, content in (("config.json", config), ("manifest.json", manifest)):
            info = tarfile.TarInfo(file)
            data = json.dumps(content).encode()
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    async with engine.open("POST", "images/load", data=made.getvalue()) as response:
        assert "Loaded" in await response.text()
    try:
        with pytest.raises(PrerequisiteError, match=r"is for s390x, and .* is needed"):
            await images.check(ImageSource("x", None, None, docker_image=name))
    finally:
        await engine.json("DELETE", f"images/{name}")


async def test_proxies_reach_a_build_and_stay_out_of_the_image(
    images: Images, engine: Engine, make: Make, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy.invalid:1")
    image = await images.prepare(make(f"FROM {BASE}\nLABEL test\nRUN echo $https_proxy >/seen\n"))
    assert await run(image, "cat", "/seen") == "http://proxy.invalid:1\n"
    history = json.dumps(await engine.json("GET", f"images/{image.ref}/history"))
    assert "proxy.invalid" not in history + json.dumps(dict(image.env))


@pytest.mark.slow
async def test_the_hosts_certificates_are_lent_and_leave_no_trace(
    images: Images, engine: Engine, make: Make, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A RUN that fails for want of a certificate is tried again with the host's own."""
    bundle = tmp_path / "bundle.pem"
    bundle.write_text("the host's own certificates")
    monkeypatch.setenv("SSL_CERT_FILE", str(bundle))
    monkeypatch.setenv("PIP_INDEX_URL", "https://me:hidden-word@index.invalid/simple")
    image = await images.prepare(
        make(
            f"FROM {BASE} AS base\nLABEL test\nENV OWN=1\nFROM base\n"
            'RUN cp "$SSL_CERT_FILE" /copied || { echo "certificate verify failed"; exit 1; }\n'
            "RUN echo $PIP_INDEX_URL\nWORKDIR /w\n"
        )
    )
    assert await run(image, "cat", "/copied") == "the host's own certificates"
    assert (image.base, image.workdir) == (BASE, "/w")
    assert set(image.env) == {"PATH", "OWN"}
    assert image.notes == (
        "built with the host's certificates and package indexes, which are not in the image",
    )
    told = json.dumps(
        [await engine.json("GET", f"images/{image.ref}/{part}") for part in ("json", "history")]
    )
    for word in ("hidden-word", "own certificates", "benchflow.loan"):
        assert word not in told
    assert "ca.crt" not in await run(image, "find", "/", "-xdev", "-name", "ca.crt")
    assert "hidden-word" not in "".join(path.read_text() for path in logs(tmp_path))
    lent = await engine.json(
        "GET", "images/json", params={"all": True, "filters": {"label": ["benchflow.loan"]}}
    )
    assert lent == []
    again = await Images(engine).prepare(
        ImageSource("x", tmp_path / "environment", tmp_path / "environment/Dockerfile")
    )
    assert again == image


async def test_a_build_that_takes_too_long(images: Images, engine: Engine, make: Make) -> None:
    with pytest.raises(ImageBuildError, match="took longer than 2 s"):
        await images.prepare(make(f"FROM {BASE}\nLABEL test\nRUN sleep 300\n", build_timeout=2))
    await nothing_left(images, engine, "sleep 300")


async def test_an_interrupted_build_leaves_nothing(images: Images, engine: Engine, make: Make) -> None:
    task = asyncio.ensure_future(images.prepare(make(f"FROM {BASE}\nLABEL test\nRUN sleep 301\n")))
    await until(lambda: building(engine, "sleep 301"))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await nothing_left(images, engine, "sleep 301")


async def test_a_killed_builder_leaves_nothing_after_cleanup(
    images: Images, engine: Engine, make: Make, tmp_path: Path
) -> None:
    process = build_process(make(f"FROM {BASE}\nLABEL test\nRUN true\nRUN sleep 302\n"))
    try:
        await until(lambda: building(engine, "sleep 302"))
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    await nothing_left(images, engine, "sleep 302")
    found = await engine.json("GET", "images/json", params={"filters": {"label": [f"test={tmp_path}"]}})
    assert found == []


async def building(engine: Engine, command: str) -> bool:
    found = await engine.json("GET", "containers/json", params={"all": True, "filters": {"label": [LABEL]}})
    return any(command in item["Command"] for item in found)


async def nothing_left(images: Images, engine: Engine, command: str) -> None:
    """Builds of other tests, which run now, put the clean-up off."""

    async def clean() -> bool:
        await images.reap()
        marks = await engine.json("GET", "volumes", params={"filters": {"label": ["benchflow.builder"]}})
        mine = [
            mark for mark in marks["Volumes"] or [] if str(os.getpid()) in mark["Labels"]["benchflow.builder"]
        ]
        return not mine and not await building(engine, command)

    await until(clean)


async def until(true: Callable[[], Awaitable[bool]], limit: float = 60) -> None:
    end = time.monotonic() + limit
    while not await true():
        assert time.monotonic() < end
        await asyncio.sleep(0.1)


def test_the_context_is_the_same_anywhere_and_hostile_files_do_no_harm(make: Make, tmp_path: Path) -> None:
    """Special files are left out, links stay links, times and owners are fixed."""
    source = make("FROM scratch\n", {"a/b": "data", "run.sh": "#!/bin/sh\n"})
    folder = tmp_path / "environment"
    (folder / "run.sh").chmod(0o755)
    (folder / "leaving").symlink_to("/etc/passwd")
    (folder / "inner").symlink_to(folder / "a")
    os.mkfifo(folder / "fifo")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(os.path.relpath(folder / "socket"))
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy, symlinks=True, ignore=shutil.ignore_patterns("fifo", "socket", "inner"))
    (copy / "inner").symlink_to("a")
    os.utime(copy / "a/b", (1, 1))
    streams = []
    for place in (folder, copy):
        recipe = Recipe(ImageSource("x", place, source.dockerfile))
        streams.append(b"".join(tar(recipe.context(), b"FROM scratch\n")))
        with tarfile.open(fileobj=io.BytesIO(streams[-1])) as archive:
            found = {info.name: info for info in archive.getmembers()}
        assert {"a/b", "run.sh", "leaving", "inner"} <= found.keys()
        assert not {"fifo", "socket"} & found.keys()
        assert found["leaving"].issym()
        assert found["run.sh"].mode == 0o755
        assert {(info.uid, info.gid) for info in found.values()} == {(0, 0)}
    assert streams[0] == streams[1]


@pytest.fixture
def small_engine(
    small_disk: Callable[[int], Path], require: Callable[[object, str], None], tmp_path: Path
) -> Iterator[str]:
    """An engine of our own whose storage is a disk of 128 MB. It has a network namespace of its
    own: without, it would take the bridge of the machine's engine away."""
    require(shutil.which("dockerd") and shutil.which("unshare"), "no dockerd to start")
    place = small_disk(128 << 20)
    run = Path("/tmp") / f"bf-engine-{os.getpid()}"
    host = f"unix://{run}/docker.sock"
    run.mkdir()
    argv = [
        "unshare",
        "--net",
        "dockerd",
        "--host",
        host,
        "--data-root",
        str(place),
        "--exec-root",
        str(run / "exec"),
    ]
    argv += ["--pidfile", str(run / "pid"), "--bridge=none", "--iptables=false"]
    with (run / "log").open("wb") as log:
        process = subprocess.Popen(argv, stdout=log, stderr=log)
        try:
            yield host
        finally:
            process.terminate()
            process.wait()
            shutil.rmtree(run, ignore_errors=True)


async def test_a_full_disk_in_the_middle_of_a_build(
    small_engine: str, make: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("BENCHFLOW_HOME", str(tmp_path / "home"))
    engine = Engine(small_engine)

    async def answers() -> bool:
        try:
            return bool(await engine.connect())
        except PrerequisiteError:
            return False

    await until(answers)
    source = make("FROM scratch\n" + "".join(f"COPY big /{number}\n" for number in range(8)))
    (tmp_path / "environment/big").write_bytes(os.urandom(24 << 20))
    with pytest.raises(HostPressureError, match=r"Dockerfile line \d: COPY big /\d did not fit") as caught:
        await Images(engine).prepare(source)
    assert "\n" not in str(caught.value)
    (tmp_path / "environment/big").write_bytes(b"fits")
    assert (await Images(engine).prepare(source)).base == "scratch"
    await engine.close()
