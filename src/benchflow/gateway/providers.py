"""Which upstream a model string ``provider/name`` means, and what it needs from the environment."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from benchflow.contracts.errors import PrerequisiteError, UsageError
from benchflow.contracts.gateway import ModelSpec

SCRIPTED = "scripted"
_LATER = {"sglang": "the SGLang wire format is not supported yet; serve the policy with vLLM"}
_NAME = re.compile(r"[a-z][a-z0-9_-]*\Z")


@dataclass(frozen=True, slots=True)
class Provider:
    """How one OpenAI-compatible provider is reached. ``base_url=None``: the user must say where.
    A ``policy`` is a model server of the user's own: exact tokens are asked from it."""

    base_url: str | None = None
    base_vars: tuple[str, ...] = ()
    key_vars: tuple[str, ...] = ()
    key_required: bool = True
    policy: bool = False


PROVIDERS: Mapping[str, Provider] = {
    "vllm": Provider(
        base_vars=("BENCHFLOW_PROVIDER_BASE_URL",),
        key_vars=("VLLM_API_KEY", "BENCHFLOW_PROVIDER_API_KEY"),
        key_required=False,
        policy=True,
    ),
    "openai": Provider("https://api.openai.com/v1"),
    "openrouter": Provider("https://openrouter.ai/api/v1"),
    "groq": Provider("https://api.groq.com/openai/v1"),
    "mistral": Provider("https://api.mistral.ai/v1"),
    "together": Provider("https://api.together.xyz/v1"),
    "fireworks": Provider("https://api.fireworks.ai/inference/v1"),
    "xai": Provider("https://api.x.ai/v1"),
    "zai": Provider("https://api.z.ai/api/paas/v4"),
    "deepseek": Provider(),
    "glm": Provider(),
    "kimi": Provider(),
    "minimax": Provider(),
    "hunyuan": Provider(),
    "qwen": Provider(),
}
"""Any other name works too once ``<NAME>_BASE_URL`` is set."""


@dataclass(frozen=True, slots=True)
class Target:
    """A resolved model: where it is, what it is called there, and the key to use."""

    provider: str
    name: str
    base_url: str | None
    key: str | None
    policy: bool


def split(model: str) -> tuple[str, str]:
    """``provider/name``; raises ``UsageError`` when either is missing."""
    provider, slash, name = model.partition("/")
    if not slash or not provider or not name:
        raise UsageError(
            f"model {model!r} is not provider/name",
            fix="for example vllm/my-policy, openai/gpt-5 or scripted/policy.yaml",
        )
    return provider, name


def resolve(spec: ModelSpec, env: Mapping[str, str] | None = None) -> Target:
    """Raises ``UsageError`` for an unknown provider and ``PrerequisiteError`` for a missing
    variable."""
    env = os.environ if env is None else env
    provider, name = split(spec.model)
    if provider == SCRIPTED:
        return Target(provider, name, None, None, policy=True)
    if provider in _LATER:
        raise UsageError(f"provider {provider!r}: {_LATER[provider]}", fix=f"known: {_known()}")
    known = PROVIDERS.get(provider)
    prefix = provider.upper().replace("-", "_")
    if known is None:
        if not _NAME.match(provider) or not env.get(f"{prefix}_BASE_URL"):
            raise UsageError(
                f"unknown provider {provider!r} in model {spec.model!r}",
                fix=f"known: {_known()}; or set {prefix}_BASE_URL for another OpenAI-compatible one",
            )
        known = Provider()
    base_url = _base_url(spec, known, provider, prefix, env)
    key = next((env[var] for var in known.key_vars or (f"{prefix}_API_KEY",) if env.get(var)), None)
    if key is None and known.key_required:
        raise PrerequisiteError(
            f"provider {provider!r} for model {spec.model!r} needs a key",
            fix=f"export {prefix}_API_KEY=…",
        )
    return Target(provider, name, base_url, key, known.policy)


def _base_url(spec: ModelSpec, known: Provider, provider: str, prefix: str, env: Mapping[str, str]) -> str:
    variables = known.base_vars or (f"{prefix}_BASE_URL",)
    url = spec.policy_url or next((env[var] for var in variables if env.get(var)), None) or known.base_url
    if url is None:
        raise PrerequisiteError(
            f"provider {provider!r} for model {spec.model!r} needs its base URL",
            fix=f"export {variables[0]}=…" + (" or pass --policy-url" if known.policy else ""),
        )
    url = url.rstrip("/")
    return url if _path(url) else f"{url}/v1"


def _path(url: str) -> str:
    """The path of an http(s) URL; raises ``UsageError`` for what is none."""
    example = "for example http://127.0.0.1:8000/v1"
    try:
        parts = urlsplit(url)
        sound = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError as error:  # a port that is no port, an address cut short
        raise UsageError(f"{url!r} is not an http(s) URL: {error}", fix=example) from None
    if not sound or re.search(r"\s", url):
        raise UsageError(f"{url!r} is not an http(s) URL", fix=example)
    return parts.path


def _known() -> str:
    return ", ".join(sorted([*PROVIDERS, SCRIPTED]))
