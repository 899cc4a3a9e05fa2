"""Building images: what each instruction does, what is cached, what fails and how it is told."""

from __future__ import annotations

import asyncio
import io
import os
import shutil
import stat
import subprocess
import sys
import tarfile
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchflow.contracts.errors import ImageBuildError, PrerequisiteError
from benchflow.contracts.sandbox import ImageSource, SandboxSpec
from benchflow.sandboxes.context import BuildContext, ignore_matcher
from benchflow.sandboxes.dockerfile import expand, parse, words
from benchflow.sandboxes.local.build import Builder
from benchflow.sandboxes.local.layers import FLATTEN_AT, LayerStore, LocalImage
from benchflow.sandboxes.local.merge import View
from benchflow.sandboxes.local.once import run_once
from benchflow.sandboxes.local.provider import LocalProvider

Build = Callable[..., Awaitable[LocalImage]]


@pytest.fixture(scope="module")
def runtime(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the copies of the interpreter go: made once, not per test."""
    return tmp_path_factory.mktemp("runtime")


@pytest.fixture
async def provider(
    runtime: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[LocalProvider]:
    (tmp_path / "home").mkdir()
    (tmp_path / "home/runtime").symlink_to(runtime)
    monkeypatch.setenv("BENCHFLOW_HOME", str(tmp_path / "home"))
    made = LocalProvider()
    try:
        await made.preflight()
    except PrerequisiteError as error:
        pytest.skip(str(error))
    yield made
    await made.close()
    if made.store.tmpfs_root is not None:
        shutil.rmtree(made.store.tmpfs_root)


@pytest.fixture
def context(tmp_path: Path) -> Path:
    """A build context with an outside neighbour."""
    folder = tmp_path / "environment"
    (folder / "tree/sub").mkdir(parents=True)
    (folder / "counts.csv").write_text("a,b\n")
    (folder / "tree/one.txt").write_text("one")
    (folder / "tree/sub/two.txt").write_text("two")
    (folder / "tree/link").symlink_to("sub/two.txt")
    (folder / "run.sh").write_text("#!/bin/sh\necho ran\n")
    (folder / "run.sh").chmod(0o755)
    (tmp_path / "secret").write_text("secret")
    return folder


@pytest.fixture
def build(provider: LocalProvider, context: Path) -> Build:
    async def build(text: str, **changes: Any) -> LocalImage:
        (context / "Dockerfile").write_text(text)
        source = ImageSource("example", context, context / "Dockerfile", local_base="host")
        return await provider.builder.build(replace(source, **changes))

    return build


@pytest.fixture
def shell(provider: LocalProvider) -> Callable[..., Awaitable[str]]:
    """Run a command in a sandbox made from an image."""

    async def run(image: LocalImage, command: str, **options: Any) -> str:
        sandbox = await provider.create(image.public(), SandboxSpec("built"))
        try:
            result = await sandbox.exec(command, **options)
            assert result.ok, result.err
            return result.out
        finally:
            await sandbox.teardown()

    return run


def text_of(image: LocalImage, path: str) -> str | None:
    return View(image.rootfs.lowers, image.rootfs.binds).read_text(path)


def fails(text: str, *named: str) -> None:
    """The Dockerfile is refused in one line that names all of ``named``."""
    with pytest.raises(ImageBuildError) as caught:
        parse(text.encode())
    message = str(caught.value)
    assert "\n" not in message
    for word in named:
        assert word in message


async def test_the_common_dockerfile_of_a_task(build: Build, shell: Callable[..., Awaitable[str]]) -> None:
    image = await build("FROM python:3.11-slim\nWORKDIR /app\nCOPY counts.csv /app/\n")
    assert (image.base, image.workdir) == ("host", "/app")
    assert await shell(image, "pwd; cat counts.csv") == "/app\na,b\n"


async def test_run_in_both_forms_sees_env_args_directory_and_shell(
    build: Build, shell: Callable[..., Awaitable[str]]
) -> None:
    image = await build(
        "ARG TAG=3.11\nFROM python:${TAG}\nARG TAG\nARG LOCAL=${TAG}-x\n"
        'ENV A=1 B="two words"\nENV C three  words\n'
        "ENV D=\"$B!\" E='$B' F=${MISSING:-default}\nWORKDIR /w\nWORKDIR sub\n"
        'RUN echo "$A|$B|$C|$D|$E|$F|$LOCAL|$HOME|$(pwd)" >/out\n'
        'RUN ["sh", "-c", "echo \\"exec form $0\\" >>/out", "$A"]\n'
        'SHELL ["/bin/bash", "-ec"]\nRUN [[ a == a ]] && \\\n  # a comment between\n\n  echo joined >>/out\n'
    )
    assert await shell(image, "cat /out") == (
        "1|two words|three  words|two words!|$B|default|3.11-x|/root|/w/sub\nexec form $A\njoined\n"
    )
    assert dict(image.env)["D"] == "two words!"
    assert "LOCAL" not in image.env
    assert image.workdir == "/w/sub"


async def test_copy_rules(build: Build) -> None:
    image = await build(
        "FROM x\nWORKDIR /w\nCOPY counts.csv .\nCOPY counts.csv named\nCOPY counts.csv dir/\n"
        "COPY tree /t\nCOPY tree/ /t2/\nCOPY tree/*.txt run.sh globbed/\nCOPY . /all\n"
        'COPY ["counts.csv", "/json form"]\nCOPY --chmod=600 run.sh /mode\nCOPY tree/li?k /followed\n'
    )
    for path in ("/w/counts.csv", "/w/named", "/w/dir/counts.csv", "/json form", "/all/counts.csv"):
        assert text_of(image, path) == "a,b\n"
    view = View(image.rootfs.lowers, image.rootfs.binds)
    for top in ("/t", "/t2", "/all/tree"):
        assert text_of(image, f"{top}/sub/two.txt") == "two"
        assert os.readlink(view.find(f"{top}/link") or "") == "sub/two.txt"
    assert text_of(image, "/w/globbed/one.txt") == "one"
    assert text_of(image, "/followed") == "two"
    script = view.find("/w/globbed/run.sh")
    assert script is not None and stat.S_IMODE(script.stat().st_mode) == 0o755
    secret = view.find("/mode")
    assert secret is not None and stat.S_IMODE(secret.stat().st_mode) == 0o600


async def test_ownership_of_what_is_copied(build: Build, shell: Callable[..., Awaitable[str]]) -> None:
    image = await build(
        "FROM x\nCOPY tree /root-owned\nCOPY --chown=daemon tree /named\n"
        "COPY --chown=1234:users tree /mixed\n"
    )
    listed = await shell(
        image, "stat -c '%u:%g' /root-owned/one.txt /named/one.txt /named/sub /mixed/sub/two.txt"
    )
    assert listed.split() == ["0:0", "1:1", "1:1", "1234:100"]
    with pytest.raises(ImageBuildError, match="no-such-user"):
        await build("FROM x\nCOPY --chown=no-such-user tree /t\n")


async def test_parents_keep_their_permissions(build: Build, shell: Callable[..., Awaitable[str]]) -> None:
    image = await build(
        "FROM x\nCOPY counts.csv /root/c\nCOPY counts.csv /tmp/c\nCOPY counts.csv /var/tmp/c\n"
    )
    assert (await shell(image, "stat -c %a /root /tmp /var/tmp /etc /")).split() == [
        "700",
        "1777",
        "1777",
        "755",
        "755",
    ]


async def test_copy_follows_links_of_the_image_inside_it(
    build: Build, shell: Callable[..., Awaitable[str]], tmp_path: Path
) -> None:
    image = await build(
        f"FROM x\nRUN mkdir /real && ln -s /real /alias && ln -s {tmp_path} /escape\n"
        "COPY counts.csv /alias/\nCOPY tree /alias\nCOPY counts.csv /escape/planted\n"
    )
    assert await shell(image, "cat /real/counts.csv /real/one.txt; readlink /alias") == "a,b\none/real\n"
    assert not (tmp_path / "planted").exists()
    assert text_of(image, f"{tmp_path}/planted") == "a,b\n"


async def test_add_unpacks_local_archives_only(build: Build, context: Path) -> None:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as tar:
        tar.add(context / "tree", "packed")
        absolute = tarfile.TarInfo("absolute")
        absolute.type, absolute.linkname = tarfile.SYMTYPE, "/etc/hostname"
        tar.addfile(absolute)
    (context / "a.tgz").write_bytes(out.getvalue())
    image = await build("FROM x\nADD a.tgz /added\nADD counts.csv /added/\nCOPY a.tgz /copied\n")
    assert text_of(image, "/added/packed/sub/two.txt") == "two"
    assert text_of(image, "/added/counts.csv") == "a,b\n"
    assert text_of(image, "/added/absolute") == "sandbox\n"
    copied = View(image.rootfs.lowers).find("/copied")
    assert copied is not None and copied.read_bytes() == out.getvalue()


@pytest.mark.parametrize("target", ["/etc/passwd", "/", "../../secret", "sub/../../../secret"])
async def test_a_link_that_leaves_the_context_is_refused(build: Build, context: Path, target: str) -> None:
    """C56."""
    (context / "tree/bad").symlink_to(target)
    for text in ("FROM x\nCOPY . /app\n", "FROM x\nCOPY tree/bad /app\n", "FROM x\nCOPY tree/bad/ /app/\n"):
        with pytest.raises(ImageBuildError, match="bad"):
            await build(text)


async def test_loops_and_dangling_links_are_copied_as_links(build: Build, context: Path) -> None:
    (context / "tree/loop").symlink_to("loop")
    (context / "tree/gone").symlink_to("nothing")
    (context / "tree/up").symlink_to("..")
    image = await asyncio.wait_for(build("FROM x\nCOPY tree /t\n"), 60)
    view = View(image.rootfs.lowers)
    links = {name: os.readlink(view.find(f"/t/{name}") or "") for name in ("loop", "gone", "up")}
    assert links == {"loop": "loop", "gone": "nothing", "up": ".."}
    with pytest.raises(ImageBuildError, match="loop"):
        await build("FROM x\nCOPY tree/loop /t\n")


async def test_dockerignore_and_excluded_paths_stay_out(build: Build, context: Path) -> None:
    (context / ".dockerignore").write_text(
        "# comment\n*.csv\ntree/sub\n!tree/sub/two.txt\nDockerfile\n.dockerignore\n"
    )
    image = await build("FROM x\nCOPY . /app\n", exclude=("run.sh",))
    view = View(image.rootfs.lowers)
    assert text_of(image, "/app/tree/sub/two.txt") == "two"
    for name in ("counts.csv", "run.sh", "Dockerfile", ".dockerignore"):
        assert view.find(f"/app/{name}") is None
    with pytest.raises(ImageBuildError, match=r"counts\.csv"):
        await build("FROM x\nCOPY counts.csv /app/\n")


async def test_a_build_borrows_settings_that_no_layer_keeps(
    build: Build, shell: Callable[..., Awaitable[str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "pip.conf").write_text(
        "[global]\nindex-url = https://user:hunter2secret@example.invalid/simple\n"
    )
    monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy.invalid:1")
    monkeypatch.setenv("UNRELATED_SECRET", "do-not-lend")
    image = await build(
        "FROM x\nRUN env >/env && cat $PIP_CONFIG_FILE && test -s $SSL_CERT_FILE\n"
        "USER nobody\nRUN test -r $SSL_CERT_FILE\n"
    )
    env = text_of(image, "/env") or ""
    assert "HTTPS_PROXY=http://proxy.invalid:1" in env
    assert "do-not-lend" not in env
    assert set(image.env) == {"PATH"}
    assert await shell(image, "ls -a / | grep -c benchflow; true", user="root") == "0\n"
    for folder, _, names in (step for layer in image.rootfs.lowers[1:] for step in os.walk(layer)):
        for name in names:
            assert b"hunter2" not in Path(folder, name).read_bytes()
    (log,) = (tmp_path / "home/local/build-logs").iterdir()
    assert "index-url" in log.read_text()
    assert "hunter2" not in log.read_text()


async def test_run_has_a_network_and_user_is_honoured(
    build: Build, shell: Callable[..., Awaitable[str]]
) -> None:
    image = await build(
        "FROM x\nRUN tail -n +3 /proc/net/dev | wc -l >/devices\n"
        "USER daemon\nRUN id -un >/tmp/who; echo $HOME >>/tmp/who\n"
    )
    hosts = len(Path("/proc/net/dev").read_text().splitlines()) - 2
    assert await shell(image, "cat /devices /tmp/who", user="root") == f"{hosts}\ndaemon\n/usr/sbin\n"
    assert image.user == "daemon"


async def test_unchanged_steps_are_taken_from_the_cache(
    build: Build, provider: LocalProvider, context: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[str] = []

    async def counting(rootfs: Any, upper: Any, argv: Any, **options: Any) -> Any:
        ran.append(argv[-1])
        return await run_once(rootfs, upper, argv, **options)

    provider.builder.run = counting  # type: ignore[assignment]
    text = "FROM x\nRUN echo 1 >/one\nCOPY counts.csv /c\nRUN echo 2 >/two\n"
    first = await build(text)
    assert ran == ["echo 1 >/one", "echo 2 >/two"]
    assert await build(text) == first
    again = Builder(LayerStore(provider.store.root), counting)  # as another process would
    source = ImageSource("example", context, context / "Dockerfile", local_base="host")
    assert await again.build(source) == first
    assert len(ran) == 2
    os.utime(context / "counts.csv", (1, 1))
    assert await build(text) == first, "a new date is no new content"
    (context / "counts.csv").write_text("changed")
    assert (await build(text)).digest != first.digest
    assert ran[2:] == ["echo 2 >/two"]
    await build(text.replace("FROM x\n", "FROM x\nENV SEEN=1\n"))
    assert ran[3:] == ["echo 1 >/one", "echo 2 >/two"]


async def test_an_image_whose_layers_were_removed_is_built_anew(
    build: Build, provider: LocalProvider
) -> None:
    text = "FROM x\nRUN echo 1 >/one\n"
    image = await build(text)
    shutil.rmtree(image.rootfs.lowers[-1])
    assert await build(text) == image
    assert text_of(image, "/one") == "1\n"


async def test_concurrent_builders_run_a_step_once(
    build: Build, provider: LocalProvider, context: Path
) -> None:
    text = "FROM x\nRUN echo run >>/count; ls /count.d 2>/dev/null; echo ran\n"
    (context / "Dockerfile").write_text(text)
    source = ImageSource("example", context, context / "Dockerfile", local_base="host")
    ran: list[int] = []

    async def counting(*arguments: Any, **options: Any) -> Any:
        ran.append(1)
        return await run_once(*arguments, **options)

    builders = [Builder(LayerStore(provider.store.root), counting) for _ in range(3)]
    images = await asyncio.gather(*(builder.build(source) for builder in builders for _ in range(4)))
    assert len({image.digest for image in images}) == 1
    assert len(ran) == 1


async def test_the_last_waiter_cancelled_ends_the_build(provider: LocalProvider, context: Path) -> None:
    (context / "Dockerfile").write_text("FROM x\nRUN sleep 300\n")
    source = ImageSource("example", context, context / "Dockerfile", local_base="host")
    started = asyncio.Event()

    async def noticed(*arguments: Any, **options: Any) -> Any:
        started.set()
        return await run_once(*arguments, **options)

    builder = Builder(provider.store, noticed)
    tasks = [asyncio.ensure_future(builder.build(source)) for _ in range(2)]
    await started.wait()
    tasks[0].cancel()
    await asyncio.wait([tasks[0]])
    assert not tasks[1].done()
    tasks[1].cancel()
    await asyncio.wait_for(asyncio.wait(tasks), 60)
    assert all(task.cancelled() for task in tasks)
    assert [path.name for path in (provider.store.root / "layers").glob("b-*")] == []
    assert list((provider.store.root / "uppers").iterdir()) == []


async def test_a_failing_run_tells_line_code_output_and_log(build: Build, provider: LocalProvider) -> None:
    with pytest.raises(ImageBuildError) as caught:
        await build("FROM x\n\nRUN seq 5000; echo the-reason >&2; \\\n    exit 7\n")
    message = str(caught.value)
    assert "Dockerfile line 3" in message
    assert "exited with 7: the-reason (" in message
    assert "\n" not in message
    detail = caught.value.detail or ""
    assert detail.endswith("the-reason\n")
    assert len(detail) <= 2048
    (log,) = (provider.store.root / "build-logs").iterdir()
    assert str(log) in message
    assert "\n1\n2\n3\n" in log.read_text()
    assert [path.name for path in (provider.store.root / "layers").glob("b-*")] == []


async def test_package_managers_on_the_host_base_fail_honestly(build: Build) -> None:
    with pytest.raises(ImageBuildError, match="package manager"):
        await build("FROM debian:12\nRUN apt-get install -y jq\n")


async def test_what_the_host_base_cannot_write_is_named(build: Build) -> None:
    for text in ("COPY counts.csv /usr/lib/x", "COPY tree /lib/x", "WORKDIR /usr/src/app"):
        with pytest.raises(ImageBuildError, match="read-only"):
            await build(f"FROM x\n{text}\n")


async def test_the_build_timeout_ends_the_build(build: Build, provider: LocalProvider) -> None:
    with pytest.raises(ImageBuildError, match="longer than 1 s"):
        await asyncio.wait_for(build("FROM x\nRUN sleep 300\n", build_timeout=1), 60)
    assert [path.name for path in (provider.store.root / "layers").glob("b-*")] == []


def test_a_full_disk_caches_nothing(small_disk: Callable[[int], Path], context: Path, runtime: Path) -> None:
    """C26: neither a RUN nor a COPY that did not fit is ever taken for done. In a process of
    its own, as one that has started sandboxes may not see a disk mounted later."""
    home = small_disk(24 << 20)
    (home / "runtime").symlink_to(runtime)
    (context / "big").write_bytes(b"x" * (40 << 20))
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("full_disk.py")), str(context)],
        capture_output=True,
        text=True,
        env={**os.environ, "BENCHFLOW_HOME": str(home)},
        check=False,
    )
    assert done.stdout.split() == ["ImageBuildError", "HostPressureError", "fits"], done.stderr


async def test_more_steps_than_layers_should_be(build: Build, shell: Callable[..., Awaitable[str]]) -> None:
    lines = [f"WORKDIR /d{index}" for index in range(30)]
    image = await build("\n".join(["FROM x", *lines, "RUN rmdir /d3", ""]))
    assert len(image.rootfs.lowers) <= 1 + FLATTEN_AT
    assert len((await shell(image, "ls -d /d[0-9]*")).split()) == 29


async def test_a_prebuilt_image_needs_no_dockerfile(provider: LocalProvider) -> None:
    image = await provider.prepare(ImageSource("t", None, None, docker_image="debian:12", local_base="host"))
    assert (image.base, image.workdir) == ("host", None)
    with pytest.raises(PrerequisiteError, match="debian:12"):
        await provider.prepare(ImageSource("t", None, None, docker_image="debian:12"))
    with pytest.raises(ImageBuildError, match="neither"):
        await provider.prepare(ImageSource("t", None, None))


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("FROM a\nFROM b\n", ["line 2", "multi-stage"]),
        ("FROM a AS x\nRUN true\nFROM b\nCOPY --from=x /a /b\n", ["line 3", "multi-stage"]),
        ("FROM a\nCOPY --from=b /x /y\n", ["line 2", "--from"]),
        ("FROM a\n\n\nRUN --mount=type=cache,target=/x true\n", ["line 4", "--mount"]),
        ("FROM a\nRUN --network=none true\n", ["line 2", "--network"]),
        ("FROM a\nRUN <<EOF\necho\nEOF\n", ["line 2", "heredoc"]),
        ("FROM a\nCOPY <<-'EOF' /x\nhi\nEOF\n", ["line 2", "heredoc"]),
        ("FROM a\nRUN cat <<EOF >/x\nhi\nEOF\n", ["line 2", "heredoc"]),
        ("FROM a\nONBUILD RUN true\n", ["line 2", "ONBUILD"]),
        ("FROM a\nFETCH x y\n", ["line 2", "FETCH"]),
        ("FROM a\nRUN\n", ["line 2", "no arguments"]),
        ("FROM a\nCOPY --parents a b\n", ["line 2", "--parents"]),
        ("RUN true\nFROM a\n", ["line 1", "before FROM"]),
        ("# nothing\n", ["no FROM"]),
    ],
)
def test_what_is_not_supported_is_refused_by_name_and_line(text: str, named: list[str]) -> None:
    fails(text, *named)
    if "no " not in named[-1] and "before" not in named[-1]:
        fails(text, "docker")


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("FROM x\nADD https://example.invalid/f /f\n", "https://example.invalid/f"),
        ("FROM x\nADD git@example.invalid:r.git /f\n", "git@example.invalid"),
        ("FROM x\nCOPY ../secret /s\n", "outside"),
        ("FROM x\nCOPY missing /s\n", "missing"),
        ("FROM x\nCOPY counts.csv run.sh /s\n", "ends with /"),
        ("FROM x\nCOPY counts.csv\n", "destination"),
        ("FROM x\nCOPY --chmod=u+x run.sh /s\n", "--chmod=u"),
        ("FROM x\nCOPY tree/one.txt /etc\nCOPY tree /etc/one.txt\n", "/etc/one.txt"),
        ("FROM x\nENV A=${B@Q}\n", "B@Q"),
        ('FROM x\nENV A="open\n', "not closed"),
        ("FROM x\nENV A\n", "no value"),
        ("FROM --platform=linux/vax x\n", "vax"),
        ("FROM x\nSHELL /bin/bash\n", "SHELL"),
    ],
)
async def test_a_mistake_in_a_step_names_its_line(build: Build, text: str, named: str) -> None:
    with pytest.raises(ImageBuildError) as caught:
        await build(text)
    assert named in str(caught.value)
    assert "Dockerfile line" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_shifts_and_here_strings_are_no_heredocs() -> None:
    parse(b"FROM a\nRUN echo $((1 << 2)) && bash -c 'cat <<< word' && echo 'a<<b'\n")


def test_directives_continuations_and_windows_lines() -> None:
    lines = [
        "\ufeff# syntax=docker/dockerfile:1",
        "# escape=`",
        "FROM a",
        "RUN one `",
        "  # note",
        "",
        "  two",
    ]
    found = parse("\r\n".join([*lines, "RUN last `"]).encode())
    assert found.escape == "`"
    assert [(item.keyword, item.value.split(), item.line) for item in found.instructions] == [
        ("FROM", ["a"], 3), ("RUN", ["one", "two"], 4), ("RUN", ["last"], 8),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "result"),
    [
        ("a b", ["a", "b"]),
        (
            "$V ${V}x ${V:-d} ${N:-d} ${N:+e} ${V:+e} ${E-d} ${E:-d}",
            ["v w", "v wx", "v w", "d", "", "e", "", "d"],
        ),
        (r"\$V '$V' \"$V\" a\ b", ["$V", "$V", '"v', 'w"', "a b"]),
        (r'"a b" c"d e"f "x\"y" "\n"', ["a b", "cd ef", 'x"y', r"\n"]),
        ("${N:-${V}}", ["v w"]),
        ("$ 5$", ["$", "5$"]),
    ],
)
def test_words_are_split_and_expanded(text: str, result: list[str]) -> None:
    values = {"V": "v w", "E": ""}
    if '\\"' in text and "'" in text:  # an expansion is never split again
        result = ["$V", "$V", '"v w"', "a b"]
    assert words(text, values) == result


@given(
    st.lists(
        st.text(alphabet=st.characters(exclude_characters="\\'\"$", exclude_categories=["Cs"]), min_size=1)
    )
)
def test_quoted_words_come_back_whole(parts: list[str]) -> None:
    assert words(" ".join(f"'{part}'" for part in parts), {}) == parts


@given(st.text(max_size=60))
def test_expansion_ends_with_text_or_a_clear_error(text: str) -> None:
    try:
        expand(text, {"A": "1"})
    except ValueError as error:
        assert str(error)


@given(st.binary(max_size=200))
def test_any_bytes_parse_or_are_refused(data: bytes) -> None:
    try:
        assert parse(b"FROM a\n" + data).instructions
    except ImageBuildError as error:
        assert error.message


@pytest.mark.parametrize(
    ("lines", "left_out", "kept"),
    [
        (["*.log"], ["a.log"], ["d/a.log", "a.logs"]),
        (["**/*.log"], ["a.log", "d/e/a.log"], ["a.txt"]),
        (["d"], ["d", "d/e/f"], ["dd", "e/d"]),
        (["/d/*"], ["d/x", "d/x/y"], ["d"]),
        (["**"], ["a", "b/c"], []),
        (["*", "!keep", "!d/deep"], ["a", "d", "d/x"], ["keep", "d/deep"]),
        (["!a", "a"], ["a"], []),
        (["a?c", "[xy]z"], ["abc", "xz"], ["ac", "zz", "a/c"]),
        (["# note", "", "  pad  "], ["pad"], ["# note"]),
        (["d/**/f"], ["d/f", "d/a/b/f"], ["f"]),
        (["./d/../e"], ["e"], ["d"]),
    ],
)
def test_ignore_patterns(lines: list[str], left_out: list[str], kept: list[str]) -> None:
    ignored = ignore_matcher(lines)
    assert [name for name in left_out if not ignored(name)] == []
    assert [name for name in kept if ignored(name)] == []


def test_special_files_of_a_context_are_left_out(context: Path) -> None:
    os.mkfifo(context / "pipe")
    assert "pipe" not in BuildContext(context).items
