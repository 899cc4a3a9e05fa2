"""Environment templates of tasks and users, and which of their values are secret."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from benchflow.contracts.errors import UsageError

_REFERENCE = re.compile(r"\$\{(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?::-(?P<default>[^}]*))?\}")
_SECRET_NAME = re.compile(r"KEY|TOKEN|SECRET|PASS|CREDENTIAL|AUTH|COOKIE|PRIVATE|SESSION", re.IGNORECASE)


_ORDINARY = re.compile(
    r"[A-Za-z]{1,15}|[-+.\d]{1,11}|.{1,7}"  # a word, a number, anything short
    r"|(?:~|\.{1,2})?/[\w.@/-]*|https?://[^@\s?]*",  # a path, a URL without userinfo or query
    re.DOTALL,
)


def resolve_env(
    template: Mapping[str, str], where: str, host: Mapping[str, str] | None = None, *, given: bool = False
) -> tuple[dict[str, str], list[str]]:
    """Fill ``${VAR}`` and ``${VAR:-default}`` from the host's environment.

    Returns the values and those among them that must be masked in every file: what came
    from the host, and what has a name or a look of a credential; with ``given``, for values
    that the user handed over, all but ordinary words, numbers and places. Raises
    ``UsageError`` naming each variable that is not set.
    """
    source = os.environ if host is None else host
    values: dict[str, str] = {}
    secrets: list[str] = []
    missing: list[str] = []

    for key, text in template.items():
        from_host: list[str] = []

        def fill(match: re.Match[str], found: list[str] = from_host) -> str:
            name, default = match["name"], match["default"]
            if source.get(name):
                found.append(source[name])
                return source[name]
            if default is not None:
                return default
            missing.append(name)
            return ""

        values[key] = _REFERENCE.sub(fill, text)
        secrets.extend(from_host)
        if looks_secret(key, values[key]) or (given and not _ORDINARY.fullmatch(values[key])):
            secrets.append(values[key])
    if missing:
        names = ", ".join(sorted(set(missing)))
        raise UsageError(f"{where} needs the environment variable {names}", fix=f"export {names}")
    return values, secrets


def looks_secret(name: str, value: str) -> bool:
    """A credential by its name, or by its look: long, without spaces, letters and digits mixed."""
    if _SECRET_NAME.search(name):
        return True
    mixed = any(c.isdigit() for c in value) and any(c.isalpha() for c in value)
    return len(value) >= 16 and mixed and not re.search(r"[\s/]", value)
