"""What a registry knows of an image, and the user's own logins there (``docker login``)."""

from __future__ import annotations

import base64
import json
import os
from pathlib import Path

_HUB = "https://index.docker.io/v1/"


def registry_config() -> dict[str, str]:
    """The header that lets a build use every login; empty without one."""
    logins = _logins()
    return {"X-Registry-Config": _encoded(logins)} if logins else {}


def registry_auth(image: str) -> dict[str, str]:
    """The header for one image; empty when there is no login for its registry."""
    first, slash, _ = image.partition("/")
    is_host = bool(slash) and ("." in first or ":" in first or first == "localhost")
    login = _logins().get(first if is_host else _HUB)
    return {"X-Registry-Auth": _encoded(login)} if login else {}


def _encoded(value: object) -> str:
    return base64.urlsafe_b64encode(json.dumps(value).encode()).decode()


def _logins() -> dict[str, dict[str, str]]:
    """Logins kept in docker's own file. Those in a system keyring are passed over."""
    place = Path(os.environ.get("DOCKER_CONFIG") or os.path.expanduser("~/.docker"))
    found: dict[str, dict[str, str]] = {}
    try:
        for host, entry in json.loads((place / "config.json").read_bytes()).get("auths", {}).items():
            name, _, password = base64.b64decode(entry.get("auth", "")).decode().partition(":")
            if name:
                found[host] = {"username": name, "password": password, "serveraddress": host}
    except (OSError, ValueError, AttributeError):
        pass  # no logins, or none that can be read: the registry says if it wants one
    return found
