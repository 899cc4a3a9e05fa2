"""A private, minimal copy of the running interpreter, for the helpers of sandboxes.

Images may have no Python, or another C library, so the helper brings its own: the
executable, the shared objects it needs, a few extension modules and the compiled files of
``inside/``, started through their own dynamic loader. Made once per interpreter and version
of the helper.
"""

from __future__ import annotations

import hashlib
import importlib.machinery
import importlib.util
import os
import platform
import py_compile
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from functools import lru_cache
from pathlib import Path

from benchflow.contracts.errors import HostPressureError, PrerequisiteError
from benchflow.kernel.ownership import state_dir

MACHINE = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())
"""This machine in the words of images."""
_EXTENSIONS = ("_socket", "select", "_ctypes")
_INSIDE = Path(__file__).parent / "inside"
_VERSION = f"python{sys.version_info.major}.{sys.version_info.minor}"


def argv(code: str) -> list[str]:
    """The command that runs ``code``, relative to ``runtime_dir()``: what is inside a
    sandbox can read it, so it names no folder of the host. Run it as ``loader_path()``."""
    start = ["benchflow", "--library-path", "lib", "bin/python3"]
    return [*start, "-I", "-S", "-B", "-X", "utf8", "-c", code]


def loader_path() -> Path:
    return runtime_dir() / "lib" / _loader().name


def runtime_dir() -> Path:
    """The runtime's folder below the state folder, made on first use."""
    return _runtime_in(state_dir())


@lru_cache(maxsize=4)
def _runtime_in(home: Path) -> Path:
    place = home / "runtime" / _fingerprint()
    if not place.is_dir():
        place.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=".making-", dir=place.parent))
        try:
            scratch.chmod(0o755)
            _fill(scratch)
            _prove(scratch)
            os.rename(scratch, place)
        except OSError as error:
            if not place.is_dir():  # else another process was faster
                raise HostPressureError(
                    f"the sandboxes' helper cannot be put in {place.parent}: {error.strerror or error}",
                    fix="free space there, or set BENCHFLOW_HOME=FOLDER",
                ) from error
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return place


def _executable() -> Path:
    return Path(getattr(sys, "_base_executable", None) or sys.executable).resolve()


def _fingerprint() -> str:
    digest = hashlib.sha256(sys.version.encode())
    status = _executable().stat()
    digest.update(f"{_executable()}:{status.st_size}:{status.st_mtime_ns}".encode())
    for source in sorted(_INSIDE.rglob("*.py")):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]


def _fill(place: Path) -> None:
    library = place / "lib" / _VERSION
    (library / "lib-dynload").mkdir(parents=True)
    (place / "bin").mkdir()
    (library / "os.py").touch()  # the landmark by which the interpreter finds its prefix
    shutil.copyfile(_executable(), place / "bin" / "python3")
    (place / "bin" / "python3").chmod(0o755)
    objects = [_executable()]
    for name in _EXTENSIONS:
        spec = importlib.util.find_spec(name)
        if spec and spec.origin and isinstance(spec.loader, importlib.machinery.ExtensionFileLoader):
            origin = Path(spec.origin)
            shutil.copyfile(origin, library / "lib-dynload" / origin.name)
            objects.append(origin)
    for needed in {found for item in objects for found in _needed(item)}:
        shutil.copyfile(needed, place / "lib" / needed.name)
    loader = place / "lib" / _loader().name
    shutil.copyfile(_loader(), loader)
    loader.chmod(0o755)
    for source in _INSIDE.rglob("*.py"):
        target = (library / source.relative_to(_INSIDE)).with_suffix(".pyc")
        if source.parent == _INSIDE and source.name == "__init__.py":
            continue
        target.parent.mkdir(exist_ok=True)
        py_compile.compile(
            str(source),
            str(target),
            dfile=source.name,
            doraise=True,
            invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH,
        )


@lru_cache(maxsize=1)
def _loader() -> Path:
    """The dynamic loader the interpreter names in its ELF header, as the path to copy."""
    data = _executable().read_bytes()
    offset, size, count = (
        int.from_bytes(data[0x20:0x28], "little"),
        int.from_bytes(data[0x36:0x38], "little"),
        int.from_bytes(data[0x38:0x3A], "little"),
    )
    for index in range(count):
        entry = data[offset + index * size :][:size]
        if int.from_bytes(entry[:4], "little") == 3:  # PT_INTERP
            start = int.from_bytes(entry[8:16], "little")
            return Path(os.fsdecode(data[start : data.index(b"\0", start)]))
    raise PrerequisiteError(
        f"{_executable()} is linked statically, which the local sandbox cannot use",
        fix="use a Python that is linked dynamically, or --sandbox docker",
    )


def _needed(binary: Path) -> list[Path]:
    folder = sysconfig.get_config_var("LIBDIR") or "/usr/lib"
    done = subprocess.run(
        [str(_loader()), "--list", str(binary)],
        capture_output=True,
        text=True,
        check=False,
        env={"LD_LIBRARY_PATH": folder},
    )
    found: list[Path] = []
    for line in done.stdout.splitlines():
        _, arrow, rest = line.partition(" => ")
        path = rest.partition(" (")[0].strip()
        if arrow and path.startswith("/") and "ld-musl" not in path:
            found.append(Path(path))
    return found


def _prove(place: Path) -> None:
    """Start the copy once, so that a broken one is never kept."""
    done = subprocess.run(
        argv("import nursery"),
        executable=place / "lib" / _loader().name,
        cwd=place,
        env={},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise PrerequisiteError(
            f"the interpreter {_executable()} does not run from a copy: {done.stderr.strip()[-300:]}",
            fix="use a standard CPython build, or --sandbox docker",
        )
