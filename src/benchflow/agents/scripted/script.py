"""The file of actions that the scripted agent plays: read, checked, made ready to send.

    seed: 7                 optional; ``choose`` draws from it, the job's seed and the trial
    actions: […]            played at every prompt
    turns: [[…], […]]       or: one list per prompt; later prompts do nothing
    handshake: {…}          version: N, actions: […] before the first reply

An action is a mapping with one key. Honest ones:

    say: text | think: text | plan: [entries]
    run: command            really run with /bin/sh; or {command, title}
    write: {path, content}
    ask: {question, options: [{id, name, kind}], then: {id: […], cancelled: […]}}
    model: {prompt}         one model call through the gateway, said as a message; or ``model: true``
    choose: [{weight, actions}]
    usage: {used, size, cost} | reply_usage: {inputTokens, outputTokens, totalTokens}
    sleep: seconds | end: stop reason | late: […] after the reply | save_prompt: path

Broken ones, to test what a harness does about them:

    crash: exit code (negative: signal) | hang: true | on_cancel: ignore | stream: {text, every, times}
    raw: text | raw_hex: [bytes…] | send: any JSON | big: size of one frame in bytes
    stderr: {text, times} | close_stdout: true | fail: {code, message}
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from benchflow.contracts.errors import UsageError
from benchflow.kernel.documents import YamlProblem, parse_yaml

Action = dict[str, Any]

_PLAIN = {
    **dict.fromkeys(("say", "think", "end", "save_prompt", "raw", "on_cancel"), str),
    **dict.fromkeys(("sleep", "crash", "big"), (int, float)),
    **dict.fromkeys(("hang", "close_stdout"), bool),
    **dict.fromkeys(("plan", "usage", "reply_usage", "raw_hex", "send", "fail"), object),
}
"""Actions with a single value, and of which kind it is."""
_TABLE = {
    "run": {"command"},
    "write": {"path", "content"},
    "ask": {"question", "options"},
    "stream": {"text"},
    "stderr": {"text"},
    "model": set[str](),
}
"""Actions that are mappings, with the keys they cannot do without."""
_NAMES = sorted({*_PLAIN, *_TABLE, "late", "choose"})
_SHORT = {"run": "command", "stderr": "text"}
"""Mappings that may be written as just this key's value."""
_TOP = {"seed", "actions", "turns", "handshake"}


def load(path: Path) -> dict[str, Any]:
    """Read a YAML or JSON script. Raises ``UsageError`` naming the file and the place in it."""
    try:
        data, _ = parse_yaml(path.read_text("utf-8"))
    except FileNotFoundError as error:
        raise UsageError(f"no script {path}", fix="give the path of a file of actions") from error
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: {' '.join(str(error).split())}", fix="make it a text file") from error
    except YamlProblem as error:
        raise UsageError(f"{path}:{error.line}: {error.message}", fix="make it valid YAML") from error
    return check(data, str(path))


def check(data: Any, source: str) -> dict[str, Any]:
    """Return the script in the form the program plays: ``turns``, ``repeat``, ``seed``, ``handshake``."""
    if not isinstance(data, dict) or not ("actions" in data) ^ ("turns" in data):
        raise UsageError(f"{source}: a script has either actions: […] or turns: [[…], …]")
    unknown = set(data) - _TOP
    if unknown:
        raise UsageError(
            f"{source}: unknown key {min(map(str, unknown))}", fix=f"known: {', '.join(sorted(_TOP))}"
        )
    repeat = "actions" in data
    if not repeat and not isinstance(data["turns"], list):
        raise UsageError(f"{source}: turns is not a list")
    handshake = dict(data.get("handshake") or {})
    if "actions" in handshake:
        handshake["actions"] = _actions(handshake["actions"], source, "handshake.actions")
    lists = [("actions", data["actions"])] if repeat else _numbered("turns", data["turns"])
    turns = [_actions(actions, source, where) for where, actions in lists]
    return {"turns": turns, "repeat": repeat, "seed": data.get("seed", 0), "handshake": handshake}


def _actions(value: Any, source: str, where: str) -> list[Action]:
    if not isinstance(value, list):
        raise UsageError(f"{source}: {where} is not a list of actions")
    return [_action(item, source, at) for at, item in _numbered(where, value)]


def _numbered(where: str, items: list[Any]) -> list[tuple[str, Any]]:
    return [(f"{where}[{index}]", item) for index, item in enumerate(items)]


def _action(item: Any, source: str, where: str) -> Action:
    if not isinstance(item, dict) or len(item) != 1:
        raise UsageError(f"{source}: {where} is not a mapping with one key", fix="as in `- say: hello`")
    ((name, value),) = cast("dict[str, Any]", item).items()
    where = f"{where}.{name}"
    if name in _TABLE:
        return {name: _table(name, value, source, where)}
    if name == "choose":
        return {name: _branches(value, source, where)}
    if name == "late":
        return {name: _actions(value, source, where)}
    if name not in _PLAIN:
        raise UsageError(f"{source}: unknown action {where}", fix=f"known: {', '.join(_NAMES)}")
    if not isinstance(value, _PLAIN[name]):
        raise UsageError(f"{source}: {where} has the wrong type: {value!r}")
    return {name: value}


def _table(name: str, value: Any, source: str, where: str) -> dict[str, Any]:
    if name in _SHORT and isinstance(value, str):
        value = {_SHORT[name]: value}
    if name == "model" and value is True:
        value = {}
    if not isinstance(value, Mapping):
        raise UsageError(f"{source}: {where} is not a mapping")
    missing = _TABLE[name] - set(value)
    if missing:
        raise UsageError(f"{source}: {where} lacks {', '.join(sorted(missing))}")
    table = dict(value)
    if name == "run":
        table.setdefault("title", table["command"].strip().split("\n")[0][:200])
    if name == "ask":
        table["options"] = [_option(option, source, f"{where}.options") for option in table["options"]]
        then = (table.get("then") or {}).items()
        table["then"] = {str(key): _actions(value, source, f"{where}.then.{key}") for key, value in then}
    return table


def _option(option: Any, source: str, where: str) -> dict[str, str]:
    if not isinstance(option, Mapping) or "id" not in option:
        raise UsageError(f"{source}: {where}: an option is {{id, name, kind}}")
    name, kind = option.get("name", option["id"]), option.get("kind", "allow_once")
    return {"optionId": str(option["id"]), "name": str(name), "kind": str(kind)}


def _branches(value: Any, source: str, where: str) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not value:
        raise UsageError(f"{source}: {where} is not a list of {{weight, actions}}")
    branches: list[dict[str, Any]] = []
    for place, branch in _numbered(where, value):
        weight = branch.get("weight", 1) if isinstance(branch, dict) else None
        if not isinstance(weight, (int, float)) or isinstance(weight, bool) or weight <= 0:
            raise UsageError(f"{source}: {place}: weight is not a positive number")
        actions = _actions(branch.get("actions"), source, f"{place}.actions")
        branches.append({"weight": weight, "actions": actions})
    return branches
