"""Reaching the engine: every way there, and one line with its fix for whatever is in the way."""

from __future__ import annotations

import asyncio
import errno
import gc
import os
import re
import shutil
import stat
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import uvloop

from benchflow.contracts.errors import PrerequisiteError, SandboxLostError
from benchflow.contracts.sandbox import SandboxImage, SandboxSpec
from benchflow.sandboxes.docker import engine as module
from benchflow.sandboxes.docker.engine import Engine, EngineError
from benchflow.sandboxes.docker.provider import DockerProvider

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def answering(body: bytes, status: str = "200 OK") -> Serve:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 %s\r\nContent-Length: %d\r\n\r\n%s" % (status.encode(), len(body), body))
        await writer.drain()
        writer.close()

    return serve


async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read()
    writer.close()


@asynccontextmanager
async def serving(serve: Serve, path: Path) -> AsyncIterator[None]:
    """Every connection is served to its end."""
    tasks: list[asyncio.Task[None]] = []

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks.append(asyncio.ensure_future(serve(reader, writer)))

    async with await asyncio.start_unix_server(accept, path):
        yield
        await asyncio.gather(*tasks)


async def said(host: str) -> str:
    engine = Engine(host)
    try:
        with pytest.raises(PrerequisiteError) as caught:
            await engine.connect()
    finally:
        await engine.close()
    assert caught.value.exit_code == 3
    assert caught.value.fix
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("host", "words"),
    [
        ("unix:///no/such/docker.sock", "there is no /no/such/docker.sock"),
        ("tcp://127.0.0.1:1", "no docker engine at tcp://127.0.0.1:1: Connection refused"),
        ("localhost:2375", "no address of a docker engine"),
        ("fd://", "no address of a docker engine"),
        ("ssh://", "no address of a docker engine"),
        ("ssh://-oProxyCommand=x", "names no host"),
    ],
)
async def test_an_address_with_no_engine_behind_it(host: str, words: str) -> None:
    assert words in await said(host)


@pytest.mark.parametrize(
    ("serve", "words"),
    [
        (answering(b'{"ApiVersion": "1.30", "Version": "17.06"}'), "too old: 17.06"),
        (answering(b"<html>hello</html>"), "what answers at .* is no docker engine: <html>hello</html>"),
        (answering(b"\xff"), "what answers at .* is no docker engine"),
        (answering(b'{"name": "other"}'), "what answers at .* is no docker engine"),
        (answering(b"denied", "403 Forbidden"), "no docker engine: denied"),
        (silent, "does not answer"),
    ],
)
async def test_something_else_at_the_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, serve: Serve, words: str
) -> None:
    monkeypatch.setattr(module, "_ANSWER_SEC", 0.5)
    async with serving(serve, tmp_path / "sock"):
        text = await said(f"unix://{tmp_path}/sock")
    assert re.search(words, text), text


async def test_a_socket_left_by_a_dead_engine(tmp_path: Path) -> None:
    server = await asyncio.start_unix_server(silent, tmp_path / "sock")
    server.close()
    await server.wait_closed()
    if not (tmp_path / "sock").exists():
        os.mknod(tmp_path / "sock", stat.S_IFSOCK | 0o600)
    assert "nothing answers at" in await said(f"unix://{tmp_path}/sock")


async def test_no_permission_on_the_socket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system's refusal is put in place by hand: root is never refused."""

    async def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(asyncio.get_running_loop(), "create_unix_connection", refuse, raising=False)
    async with serving(silent, tmp_path / "sock"):
        text = await said(f"unix://{tmp_path}/sock")
    assert "no permission on the docker socket" in text
    assert "usermod -aG docker" in text


async def test_certificates_that_are_not_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DOCKER_TLS_VERIFY", "1")
    monkeypatch.setenv("DOCKER_CERT_PATH", str(tmp_path))
    assert "DOCKER_CERT_PATH" in await said("tcp://127.0.0.1:2376")


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_ssh_that_is_refused_says_only_what_ssh_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    script = tmp_path / "ssh"
    script.write_text("#!/bin/sh\necho 'user@host: Permission denied (publickey).' >&2\nexit 255\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with asyncio.Runner(loop_factory=loop) as runner:
        complaints: list[object] = []
        runner.get_loop().set_exception_handler(lambda _, context: complaints.append(context))
        text = runner.run(said("ssh://user@host"))
        gc.collect()
    assert not complaints
    assert "Permission denied (publickey)" in text
    assert "ssh user@host docker version" in text


@pytest.fixture
async def tcp(provider: DockerProvider) -> AsyncIterator[str]:
    """The engine's socket behind a port."""

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
        except ConnectionError:
            pass
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner = await asyncio.open_unix_connection(provider.engine.host.removeprefix("unix://"))
        await asyncio.gather(copy(reader, inner[1]), copy(inner[0], writer))

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        yield f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}"


@pytest.fixture
def ssh(provider: DockerProvider, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """An ``ssh`` that runs the command here, as a host with this engine would."""
    if shutil.which("docker") is None:
        pytest.skip("needs the docker program on the other side")
    script = tmp_path / "ssh"
    script.write_text(
        '#!/bin/sh\nwhile [ "$1" != -- ]; do shift; done\nshift; echo "$1" >"$0.target"; shift\n'
        f'DOCKER_HOST={provider.engine.host} exec "$@"\n'
    )
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return "ssh://somebody@elsewhere:2222"


@pytest.mark.parametrize("way", ["tcp", "ssh"])
async def test_a_sandbox_on_an_engine_elsewhere(
    request: pytest.FixtureRequest, image: SandboxImage, tcp: str, ssh: str, tmp_path: Path, way: str
) -> None:
    far = DockerProvider(host={"tcp": tcp, "ssh": ssh}[way])
    try:
        sandbox = await far.create(image, SandboxSpec("far"))
        assert (await sandbox.exec("cat; id -un", stdin=b"in ", user="agent")).out == "in agent\n"
        (tmp_path / "file").write_bytes(bytes(range(256)) * 4096)
        await sandbox.upload(tmp_path / "file", "/data/file")
        await sandbox.download("/data/file", tmp_path / "back")
        assert (tmp_path / "back").read_bytes() == (tmp_path / "file").read_bytes()
        await sandbox.teardown()
    finally:
        await far.close()
    if way == "ssh":
        assert (tmp_path / "ssh.target").read_text() == "somebody@elsewhere\n"


async def test_a_refusal_and_a_loss_are_told_apart(provider: DockerProvider, tmp_path: Path) -> None:
    with pytest.raises(EngineError) as refused:
        await provider.engine.json("GET", "containers/no-such-container/json")
    assert refused.value.status == 404
    answer = answering(b'{"ApiVersion": "1.41", "Version": "20.10"}')
    server = await asyncio.start_unix_server(answer, tmp_path / "sock")
    engine = Engine(f"unix://{tmp_path}/sock")
    await engine.connect()
    server.close()
    (tmp_path / "sock").unlink(missing_ok=True)
    with pytest.raises(SandboxLostError, match="went away"):
        await engine.json("GET", "info")
    with pytest.raises(SandboxLostError):
        await engine.back(patience=0.3)
    await engine.close()
