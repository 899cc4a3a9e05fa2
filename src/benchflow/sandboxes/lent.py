"""What a build borrows from the host: the package indexes' settings and the certificates.

Copies are shown read-only in one directory while a RUN runs, found by programs through
environment variables, and appear in no layer and no image. Credentials of their own
(``auth.conf``, ``netrc``) are not lent; a password inside an index address is, as pip
needs it, and is masked in logs.
"""

from __future__ import annotations

import configparser
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

TARGET = "/dev/.benchflow-build"
"""Where the directory appears inside: below /dev, so that no layer has a place for it."""
_VARIABLES = ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_TRUSTED_HOST", "PIP_DEFAULT_TIMEOUT",
              "PIP_RETRIES", "UV_INDEX_URL", "UV_DEFAULT_INDEX", "UV_INDEX", "NPM_CONFIG_REGISTRY", "GOPROXY",
              "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy")  # fmt: skip
_BUNDLES = ("/etc/ssl/certs/ca-certificates.crt", "/etc/pki/tls/certs/ca-bundle.crt", "/etc/ssl/cert.pem")
_BUNDLE_VARIABLES = ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "PIP_CERT", "GIT_SSL_CAINFO",
                     "NODE_EXTRA_CA_CERTS")  # fmt: skip
_APT_KEYS = ("Acquire::http", "Acquire::Retries", "Acquire::Check-", "Acquire::ForceIPv")
PASSWORD = re.compile(r"://[^/\s:@]*:([^/\s@]+)@")


@dataclass(frozen=True, slots=True)
class Lent:
    """A host directory to show at ``TARGET``, the variables that point into it, and the
    secrets among them."""

    directory: Path
    env: dict[str, str]
    secrets: tuple[str, ...]


def lend(directory: Path, os_release: str | None) -> Lent:
    """Fill an empty ``directory``. apt's source list is lent only to an image of the same
    distribution release, told by its ``os-release`` text."""
    env = {name: os.environ[name] for name in _VARIABLES if os.environ.get(name)}
    texts = list(env.values())
    bundle = _bundle()
    if bundle is not None:
        shutil.copyfile(bundle, directory / "ca.crt")
        env |= dict.fromkeys(_BUNDLE_VARIABLES, f"{TARGET}/ca.crt")
    pip = _pip_settings()
    if pip:
        (directory / "pip.conf").write_text(pip)
        env["PIP_CONFIG_FILE"] = f"{TARGET}/pip.conf"
        texts.append(pip)
    env["PIP_DISABLE_PIP_VERSION_CHECK"] = "1"
    apt = _apt_settings(directory, os_release, bundle is not None)
    if apt:
        (directory / "apt.conf").write_text(apt)
        env["APT_CONFIG"] = f"{TARGET}/apt.conf"
        texts.append(apt)
    for path in [directory, *directory.rglob("*")]:
        path.chmod(0o755 if path.is_dir() else 0o644)  # RUN may be another user
    return Lent(directory, env, tuple(match for text in texts for match in PASSWORD.findall(text)))


def _bundle() -> Path | None:
    candidates = [os.environ.get("SSL_CERT_FILE", ""), *_BUNDLES]
    return next((Path(path) for path in candidates if path and os.path.isfile(path)), None)


def _pip_settings() -> str:
    """The system's and the user's settings merged, without paths of this machine."""
    config_home = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
    places = ["/etc/pip.conf", os.path.expanduser("~/.pip/pip.conf"), f"{config_home}/pip/pip.conf"]
    places.append(os.environ.get("PIP_CONFIG_FILE", ""))
    merged = configparser.RawConfigParser()
    try:
        merged.read([place for place in places if place])
    except configparser.Error:
        return ""  # pip itself would refuse it too
    lines: list[str] = []
    for section in merged.sections():
        kept = [(key, value) for key, value in merged.items(section) if not _is_local(value)]
        lines += [f"[{section}]", *(f"{key} = {_indented(value)}" for key, value in kept)]
    return "\n".join(lines) + "\n" if lines else ""


def _is_local(value: str) -> bool:
    return any(line.startswith(("/", "~", "file:")) for line in value.split())


def _indented(value: str) -> str:
    return value.replace("\n", "\n    ")


def _apt_settings(directory: Path, os_release: str | None, has_bundle: bool) -> str:
    try:
        dump = subprocess.run(
            ["apt-config", "dump"], capture_output=True, text=True, timeout=30, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
    lines = [line for line in dump.splitlines() if line.startswith(_APT_KEYS) and not _is_local(_value(line))]
    if has_bundle:
        lines.append(f'Acquire::https::CaInfo "{TARGET}/ca.crt";')
    if os_release is not None and _release(os_release) == _release(_read("/etc/os-release")):
        lines += _apt_sources(directory)
    return "\n".join(lines) + "\n"


def _apt_sources(directory: Path) -> list[str]:
    apt = Path("/etc/apt")
    lists = directory / "apt"
    (lists / "sources.list.d").mkdir(parents=True)
    found = [
        path for path in (apt / "sources.list", *sorted((apt / "sources.list.d").glob("*"))) if path.is_file()
    ]
    for path in found:
        shutil.copyfile(path, lists / path.relative_to(apt))
    if not found:
        return []
    return [
        f'Dir::Etc::sourcelist "{TARGET}/apt/sources.list";',
        f'Dir::Etc::sourceparts "{TARGET}/apt/sources.list.d";',
    ]


def _release(text: str) -> tuple[str, ...]:
    lines = (line for line in text.splitlines() if line.startswith(("ID=", "VERSION_CODENAME=")))
    return tuple(sorted(line.replace('"', "") for line in lines))


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def _value(line: str) -> str:
    return line.partition('"')[2].rpartition('"')[0]
