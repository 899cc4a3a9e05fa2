"""The ``host`` base: an allowlist of the machine's own programs and a made-up ``/etc``.

Shown read-only: ``/usr`` and the root's ``bin``, ``sbin``, ``lib*``. Not shown, ever:
home directories, ``/root``, ``/run``, ``/var``, ``/opt``, the working directory, sockets,
and the machine's ``/etc``, of which only files that programs cannot do without and that
hold nothing private are copied (library cache, alternatives, public certificates).

``/usr/local`` is what somebody put on this machine by hand. Its program folders are shown
because container images keep their interpreters there, but only while root alone can
write them; ``/usr/local/etc``, where settings and secrets live, never is.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import stat
from pathlib import Path

from benchflow.contracts.errors import PrerequisiteError
from benchflow.sandboxes.local.layers import LayerStore, LocalImage, Rootfs

DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
READ_ONLY = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
"""Paths of the host base that nothing can write, a build included."""
MOUNT_POINTS = ("proc", "sys", "dev", "run", "tmp", "var/tmp", "root", "home", "etc")
_VERSION = 1
"""Counts changes of the skeleton below, so that an old one is not reused."""
_LOCAL_PARTS = ("bin", "sbin", "lib", "lib64", "libexec", "include", "share")
_WATCHED = ("/etc/ld.so.cache", "/etc/os-release", "/etc/alternatives", "/var/lib/dpkg/status",
            "/var/lib/rpm/rpmdb.sqlite", "/lib/apk/db/installed", "/usr/local/bin", "/usr/local/lib",
            "/etc/ssl/certs/ca-certificates.crt")  # fmt: skip
"""A change of one of these means that the machine's programs changed."""
_COPIED = ("ld.so.cache", "ld.so.conf", "os-release", "debian_version", "services", "protocols",
           "mime.types", "ssl/openssl.cnf", "pki/tls/openssl.cnf")  # fmt: skip
_CERTIFICATES = ("ssl/certs", "pki/ca-trust/extracted", "pki/tls/certs", "ca-certificates/extracted")
_ACCOUNTS = (("root", 0, "/root", "/bin/bash"), ("daemon", 1, "/usr/sbin", ""), ("bin", 2, "/bin", ""),
             ("sys", 3, "/dev", ""), ("mail", 8, "/var/mail", ""), ("www-data", 33, "/var/www", ""),
             ("nobody", 65534, "/nonexistent", ""))  # fmt: skip
_GROUPS = (("tty", 5), ("adm", 4), ("disk", 6), ("shadow", 42), ("utmp", 43), ("staff", 50),
           ("users", 100), ("nogroup", 65534))  # fmt: skip
_TEXTS = {
    "hosts": "127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n",
    "hostname": "sandbox\n",
    "resolv.conf": "",
    "nsswitch.conf": "passwd: files\ngroup: files\nshadow: files\nhosts: files dns\n"
    "protocols: files\nservices: files\n",
    "shells": "/bin/sh\n/bin/bash\n",
    "login.defs": "UID_MIN 1000\nUID_MAX 60000\nGID_MIN 1000\nGID_MAX 60000\nENCRYPT_METHOD SHA512\n"
    "USERGROUPS_ENAB yes\nCREATE_HOME no\n",
    "pam.d/other": "auth sufficient pam_rootok.so\nauth required pam_deny.so\n"
    "account required pam_permit.so\npassword required pam_deny.so\nsession required pam_permit.so\n",
}


def host_base(store: LayerStore) -> LocalImage:
    """The base made of this machine, its skeleton written once per state of the machine.

    Raises ``PrerequisiteError`` on a machine without ``/usr/bin``.
    """
    if not Path("/usr/bin").is_dir():
        raise PrerequisiteError("this machine has no /usr/bin to use as the host base", fix="import a base")
    binds = _binds()
    digest = _signature(binds)
    name = f"host-{digest[:32]}"
    skeleton = store.built(name) or _make_skeleton(store, name, binds)
    empty = skeleton / "usr/local"  # in the skeleton it lies hidden below the bind of /usr
    ro = tuple((empty if source is None else source, target) for source, target in binds)
    return LocalImage(
        digest=f"sha256:{digest}",
        base="host",
        rootfs=Rootfs("host", (skeleton,), ro),
        env={"PATH": DEFAULT_PATH},
        notes=("base: this machine's own programs (host), read-only",),
    )


def _binds() -> tuple[tuple[Path | None, str], ...]:
    """Host paths and where they are shown, in mount order; ``None`` is an empty directory."""
    found: list[tuple[Path | None, str]] = []
    for target in READ_ONLY:
        path = Path(target)
        if path.is_dir() and not path.is_symlink():
            found.append((path, target))
    found.append((None, "/usr/local"))
    local = Path("/usr/local")
    if _only_root_writes(local):
        for part in _LOCAL_PARTS:
            path = local / part
            if path.is_dir() and not path.is_symlink() and _only_root_writes(path):
                found.append((path, str(path)))
    return tuple(found)


def _only_root_writes(path: Path) -> bool:
    try:
        status = path.stat()
    except OSError:
        return False
    return status.st_uid == 0 and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def machine_state() -> tuple[tuple[str, int, int], ...]:
    """Tells one state of this machine's programs from another, without reading them."""
    found: list[tuple[str, int, int]] = []
    for path in _WATCHED:
        try:
            status = os.stat(path)
        except OSError:
            continue
        found.append((path, status.st_size, status.st_mtime_ns))
    return tuple(found)


def _signature(binds: tuple[tuple[Path | None, str], ...]) -> str:
    material = (_VERSION, platform.machine(), binds, machine_state())
    return hashlib.sha256(repr(material).encode()).hexdigest()


def _make_skeleton(store: LayerStore, name: str, binds: tuple[tuple[Path | None, str], ...]) -> Path:
    upper = store.new_upper()
    top = upper.upper
    make_mount_points(top)
    for _, target in binds:
        (top / target.lstrip("/")).mkdir(parents=True, exist_ok=True)
    for path in map(Path, READ_ONLY):
        if path.is_symlink():
            (top / path.name).symlink_to(os.readlink(path))
    _write_etc(top / "etc")
    return store.freeze(upper, name=name, owned=False)


def make_mount_points(top: Path) -> None:
    """Give a root file system the directories every sandbox mounts on or expects."""
    for name in MOUNT_POINTS:
        folder = top / name
        if not os.path.lexists(folder):
            folder.mkdir(parents=True)
    for name, mode in (("tmp", 0o1777), ("var/tmp", 0o1777), ("root", 0o700)):
        folder = top / name
        if folder.is_dir() and not folder.is_symlink():
            folder.chmod(mode)


def _write_etc(etc: Path) -> None:
    for name, text in _TEXTS.items():
        path = etc / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    nologin = "/usr/sbin/nologin"
    etc.joinpath("passwd").write_text(
        "".join(f"{n}:x:{uid}:{uid}:{n}:{home}:{shell or nologin}\n" for n, uid, home, shell in _ACCOUNTS)
    )
    groups = [(n, uid) for n, uid, *_ in _ACCOUNTS if n != "nobody"] + list(_GROUPS)
    etc.joinpath("group").write_text("".join(f"{n}:x:{gid}:\n" for n, gid in groups))
    for table, names in (("shadow", [n for n, *_ in _ACCOUNTS]), ("gshadow", [n for n, _ in groups])):
        tail = ":*:19000:0:99999:7:::\n" if table == "shadow" else ":*::\n"
        path = etc / table
        path.write_text("".join(n + tail for n in names))
        path.chmod(0o640)
    etc.joinpath("localtime").symlink_to("/usr/share/zoneinfo/Etc/UTC")
    etc.joinpath("mtab").symlink_to("/proc/self/mounts")
    for name in _COPIED:
        _copy_public(Path("/etc") / name, etc / name)
    for name in ("ld.so.conf.d", "alternatives", *_CERTIFICATES):
        _copy_public_dir(Path("/etc") / name, etc / name)


def _copy_public_dir(source: Path, target: Path) -> None:
    """Copy links to programs as links, and world-readable files; leave out the rest."""
    if not source.is_dir():
        return
    target.mkdir(parents=True, exist_ok=True)
    for item in sorted(os.scandir(source), key=lambda entry: entry.name):
        inside = target / item.name
        if item.is_symlink() and _shown(os.path.realpath(item.path)):
            inside.symlink_to(os.readlink(item.path))
        elif item.is_dir(follow_symlinks=False):
            _copy_public_dir(Path(item.path), inside)
        else:
            _copy_public(Path(item.path), inside)


def _shown(path: str) -> bool:
    return path.startswith("/usr/") and not path.startswith("/usr/local/")


def _copy_public(source: Path, target: Path) -> None:
    try:
        status = source.stat()
        if not stat.S_ISREG(status.st_mode) or not status.st_mode & stat.S_IROTH:
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)
        target.chmod(0o644)
    except FileNotFoundError:
        return
