"""Choosing, among the tools an agent offers, the one that runs a command or writes a file."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from benchflow.gateway import wire
from benchflow.gateway.scripted.policy import ToolUse

_SHELL_NAMES = ("bash", "shell", "exec", "execute", "terminal", "run", "command", "cmd")
_COMMAND_KEYS = ("command", "cmd", "script", "commands", "input")
_WRITE_NAMES = ("write", "create", "edit", "save")
_PATH_KEYS = ("path", "file_path", "filepath", "filename", "target_file", "absolute_path")
_CONTENT_KEYS = ("content", "contents", "file_text", "text", "new_content")
_END_OF_FILE = "BENCHFLOW_END_OF_FILE"


class NoTool(ValueError):
    """The agent offers no tool that could do it; the message names those it offers."""


def calls(uses: tuple[ToolUse, ...], offered: Any, note: str, identity: str) -> list[dict[str, Any]]:
    """The ``tool_calls`` of a reply. ``note`` fills a description the tool asks for; ``identity``
    makes the ids. Raises ``NoTool``."""
    schemas = list(_schemas(offered))
    made = []
    for position, use in enumerate(uses):
        name, arguments = _call(use, schemas, note)
        function = {"name": name, "arguments": wire.dumps(arguments).decode()}
        made.append({"id": f"call_{identity}{position}", "type": "function", "function": function})
    return made


def _schemas(offered: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """``(name, parameters)`` of each function offered."""
    for tool in offered if isinstance(offered, list) else ():
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if isinstance(function, Mapping) and isinstance(function.get("name"), str):
            parameters = function.get("parameters")
            yield function["name"], parameters if isinstance(parameters, Mapping) else {}


def _call(
    use: ToolUse, schemas: list[tuple[str, Mapping[str, Any]]], note: str
) -> tuple[str, dict[str, Any]]:
    names = ", ".join(name for name, _ in schemas) or "none"
    if use.kind == "call":
        if use.name not in (name for name, _ in schemas):
            raise NoTool(f"the script calls the tool {use.name!r}; the agent offers {names}")
        return use.name, dict(use.arguments)
    if use.kind == "write":
        found = _find(schemas, _WRITE_NAMES, _PATH_KEYS, _CONTENT_KEYS)
        if found:
            name, schema, keys = found
            values = {keys[0]: use.arguments["path"], keys[1]: use.arguments["content"]}
            return name, _complete(schema, values, note)
        use = ToolUse("run", arguments={"command": _heredoc(**use.arguments)})
    found = _find(schemas, _SHELL_NAMES, _COMMAND_KEYS)
    if found is None:
        raise NoTool(f"the script wants to run a command, but no tool looks like a shell; offered: {names}")
    name, schema, (key,) = found
    command: Any = use.arguments["command"]
    if _properties(schema).get(key, {}).get("type") == "array":
        command = ["bash", "-lc", command]
    return name, _complete(schema, {key: command}, note)


def _find(
    schemas: list[tuple[str, Mapping[str, Any]]], words: tuple[str, ...], *wanted: tuple[str, ...]
) -> tuple[str, Mapping[str, Any], tuple[str, ...]] | None:
    """The tool with one parameter of each wanted kind whose name says it best."""
    best: tuple[int, str, Mapping[str, Any], tuple[str, ...]] | None = None
    for name, schema in schemas:
        keys = tuple(key for keys in wanted if (key := _pick(schema, keys)) is not None)
        rank = _rank(name, words)
        if len(keys) == len(wanted) and rank is not None and (best is None or rank < best[0]):
            best = (rank, name, schema, keys)
    return best[1:] if best else None


def _rank(name: str, words: tuple[str, ...]) -> int | None:
    parts = re.findall(r"[A-Z]?[a-z]+|[A-Z]+", name)
    lowered = [part.lower() for part in parts]
    return next((position for position, word in enumerate(words) if word in lowered), None)


def _pick(schema: Mapping[str, Any], keys: tuple[str, ...]) -> str | None:
    by_name = {name.lower().replace("-", "_"): name for name in _properties(schema)}
    squeezed = {name.replace("_", ""): original for name, original in by_name.items()}
    return next((squeezed[key.replace("_", "")] for key in keys if key.replace("_", "") in squeezed), None)


def _properties(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    properties = schema.get("properties")
    return properties if isinstance(properties, Mapping) else {}


def _complete(schema: Mapping[str, Any], values: dict[str, Any], note: str) -> dict[str, Any]:
    """``values`` and something acceptable for every other required parameter."""
    for key in schema.get("required") or ():
        if key not in values:
            values[key] = _filler(_properties(schema).get(key, {}), note)
    return values


def _filler(schema: Mapping[str, Any], note: str) -> Any:
    if "default" in schema:
        return schema["default"]
    options = schema.get("enum")
    if options:
        return "create" if "create" in options else options[0]
    kind = schema.get("type")
    by_type = {"boolean": False, "array": [], "object": {}, "null": None}
    if kind in ("integer", "number"):
        return schema.get("minimum", 0)
    return by_type.get(kind, note) if isinstance(kind, str) else note


def _heredoc(path: str, content: str) -> str:
    folder = shlex.quote(path.rpartition("/")[0] or ("/" if path.startswith("/") else "."))
    body = content if content.endswith("\n") or not content else f"{content}\n"
    return f"mkdir -p {folder} && cat > {shlex.quote(path)} <<'{_END_OF_FILE}'\n{body}{_END_OF_FILE}"
