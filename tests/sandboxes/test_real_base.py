"""A distribution's own root file system: imported, built on with its package manager, run."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from benchflow.contracts.sandbox import ImageSource, SandboxSpec
from benchflow.sandboxes.local.bases import import_base, remove_base
from benchflow.sandboxes.local.provider import LocalProvider

pytestmark = [
    pytest.mark.slow,
    pytest.mark.root,
    pytest.mark.skipif(
        os.geteuid() != 0 or not shutil.which("debootstrap"), reason="needs root and debootstrap"
    ),
]


@pytest.fixture(scope="module")
def rootfs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A minimal system of this machine's own release, from this machine's mirror."""
    place = tmp_path_factory.mktemp("rootfs")
    texts = [path.read_text() for path in Path("/etc/apt").rglob("*") if path.suffix in (".list", ".sources")]
    found = re.findall(r"^(?:URIs:|deb)\s+(?:\[.*?\]\s+)?(\S+://\S+)", "\n".join(texts), re.MULTILINE)
    mirror = [address for address in found if "security" not in address][:1]
    codename = platform.freedesktop_os_release()["VERSION_CODENAME"]
    argv = [
        "debootstrap",
        "--variant=minbase",
        "--include=python3,ca-certificates",
        codename,
        str(place),
        *mirror,
    ]
    subprocess.run(argv, check=True, capture_output=True)
    return place


async def test_import_build_and_run(rootfs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BENCHFLOW_HOME", str(tmp_path / "home"))
    provider = LocalProvider()
    base = import_base(provider.store, "distribution:1", rootfs)
    context = tmp_path / "environment"
    context.mkdir()
    (context / "data").write_text("data\n")
    (context / "Dockerfile").write_text(
        "FROM distribution:1\n"
        "RUN apt-get update && apt-get install -y --no-install-recommends jq && rm -rf /var/lib/apt/lists/*\n"
        "RUN useradd --create-home worker && chown worker: /srv\n"
        "WORKDIR /usr/src/app\nCOPY --chown=worker data /data/\nUSER worker\n"
    )
    image = await provider.prepare(ImageSource("example", context, context / "Dockerfile"))
    assert image.base == "distribution:1"
    sandbox = await provider.create(image, SandboxSpec("real"))
    result = await sandbox.exec(
        "pwd; jq -n 1+1; stat -c %U /data/data /srv; id -un; python3 -c 'print(6 * 7)'"
    )
    assert result.out.split() == ["/usr/src/app", "2", "worker", "worker", "root", "42"]
    assert (await sandbox.exec("touch /usr/bin/new && ls -d /.benchflow*")).exit_code == 2
    await sandbox.teardown()
    await provider.close()
    remove_base(provider.store, "distribution:1")
    assert provider.store.built(base.layer) is None
    if provider.store.tmpfs_root is not None:
        shutil.rmtree(provider.store.tmpfs_root)
