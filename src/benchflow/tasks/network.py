"""The network of each phase: what the agent gets, and what the verifier gets."""

from __future__ import annotations

from dataclasses import dataclass

from benchflow.contracts.sandbox import NetworkMode, NetworkPolicy
from benchflow.tasks.section import Section

_MODES: dict[str, NetworkMode] = {"no-network": "none", "allowlist": "allowlist", "public": "open"}


@dataclass(frozen=True, slots=True)
class Phases:
    """``environment`` is the baseline; the other two are what is in force in each phase."""

    environment: NetworkPolicy
    agent: NetworkPolicy
    verifier: NetworkPolicy


def network_phases(environment: Section, agent: Section, verifier: Section) -> Phases:
    """Each phase's own mode, else the environment's, else the older ``allow_internet``, else open."""
    own = _policy(environment)
    allowed = environment.flag("allow_internet")
    if allowed is not None and environment.source.strict:
        mode = "public" if allowed else "no-network"
        environment.warn("allow_internet", f"is the older spelling of network_mode: {mode}")
    if own and allowed is not None and own.mode != ("open" if allowed else "none"):
        environment.problem("allow_internet", f"{str(allowed).lower()} contradicts the network mode")
    baseline = own or NetworkPolicy("none" if allowed is False else "open")
    phases: list[NetworkPolicy] = []
    for section in (agent, verifier):
        policy = _policy(section)
        if policy and allowed is False and policy.mode != "none":
            key = "network_mode" if section.value("network_mode") else "network"
            section.problem(key, "opens a network that environment.allow_internet = false closes")
        phases.append(policy or baseline)
    return Phases(baseline, phases[0], phases[1])


def _policy(section: Section) -> NetworkPolicy | None:
    """``network_mode`` and ``allowed_hosts``, or ``mode`` and ``allowed_hosts`` in a ``network`` table."""
    nested = section.value("network") is not None
    if nested and section.value("network_mode") is not None:
        section.problem("network_mode", "network is given too; keep one of them")
    table, key = (section.table("network"), "mode") if nested else (section, "network_mode")
    word, hosts = table.text(key), table.names("allowed_hosts")
    if nested:
        table.close()
    if word is not None and word not in _MODES:
        table.problem(key, f"must be one of {', '.join(_MODES)}, not {word!r}")
        return None
    if hosts and word != "allowlist":
        table.problem("allowed_hosts", f"needs {key} = allowlist")
    return NetworkPolicy(_MODES[word], hosts) if word else None
