"""tools, tool_choice and response_format: what an answer may be, as a request asks for it.

It does not know grammars or how models write calls; whether a schema can be followed is found out further in.
Source: OpenAI API reference, "Create chat completion" (2025).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from kvasir_node.base.errors import UsageError
from kvasir_node.base.generation import JsonFormat, Tool, Tools, ToolUse
from kvasir_node.surfaces import fields

TOOLS_MAX = 128
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}\Z", re.ASCII)
_ANY_OBJECT: Mapping[str, Any] = {"type": "object"}


def read_format(value: Any) -> JsonFormat | None:
    """response_format; None = any text. Raises UsageError."""
    if value is None:
        return None
    given = fields.object_of(value, ("type", "json_schema"), "response_format")
    kind = given.get("type")
    if kind == "json_schema":
        return JsonFormat(_schema_of(given.get("json_schema")))
    if kind not in ("text", "json_object") or "json_schema" in given:
        raise UsageError(
            'response_format.type must be "text", "json_object", or "json_schema" with a json_schema',
            param="response_format",
        )
    return JsonFormat(_ANY_OBJECT) if kind == "json_object" else None


def _schema_of(value: Any) -> Mapping[str, Any]:
    where = "response_format.json_schema"
    given = fields.object_of(value, ("name", "description", "schema", "strict"), where)
    if not _NAME.match(fields.text(given, "name", None, f"{where}.name")):
        raise UsageError(f"{where} needs a name of 1 to 64 letters, digits, - and _", param=f"{where}.name")
    fields.text(given, "description", None, f"{where}.description")
    fields.flag(given, "strict", f"{where}.strict")  # a schema is always followed to the letter
    return _schema(given.get("schema", _ANY_OBJECT), f"{where}.schema")


def read_tools(given: Mapping[str, Any]) -> Tools | None:
    """tools, tool_choice and parallel_tool_calls; None = the model is told of no tool. Raises UsageError."""
    offered = _offered(given.get("tools", []))
    choice = given.get("tool_choice", "auto" if offered else "none")
    parallel = fields.flag(given, "parallel_tool_calls") or "parallel_tool_calls" not in given
    if choice == "none":
        return None
    if not offered:
        raise UsageError("tool_choice is allowed only with tools", param="tool_choice")
    if choice == "required":
        return Tools(offered, ToolUse.REQUIRED)
    if choice == "auto":
        if not parallel:
            message = "parallel_tool_calls: false is supported only where tool_choice requires a call"
            raise UsageError(message, param="parallel_tool_calls")
        return Tools(offered)
    return Tools(offered, ToolUse.REQUIRED, _only(choice, offered))


def _offered(value: Any) -> tuple[Tool, ...]:
    if not isinstance(value, list) or len(value) > TOOLS_MAX:
        raise UsageError(f"tools must be a list of at most {TOOLS_MAX} tools", param="tools")
    offered = tuple(_tool(tool, f"tools[{index}]") for index, tool in enumerate(value))
    if len({tool.name for tool in offered}) != len(offered):
        raise UsageError("two tools have the same name", param="tools")
    return offered


def _tool(value: Any, where: str) -> Tool:
    given = fields.object_of(value, ("type", "function"), where)
    if given.get("type") != "function":
        raise UsageError(f'{where}.type must be "function"; other tools are not supported', param=f"{where}.type")
    at = f"{where}.function"
    function = fields.object_of(given.get("function"), ("name", "description", "parameters", "strict"), at)
    name = fields.text(function, "name", None, f"{at}.name")
    if not _NAME.match(name):
        raise UsageError(f"{at}.name must have 1 to 64 letters, digits, -, _ and .", param=f"{at}.name")
    description = fields.text(function, "description", None, f"{at}.description") or None
    parameters = _schema(function.get("parameters", _ANY_OBJECT), f"{at}.parameters")
    return Tool(name, description, parameters, fields.flag(function, "strict", f"{at}.strict"))


def _only(choice: Any, offered: tuple[Tool, ...]) -> str:
    name = None
    if isinstance(choice, dict) and choice.get("type") == "function" and set(choice) == {"type", "function"}:
        function = choice["function"]
        name = function.get("name") if isinstance(function, dict) and set(function) == {"name"} else None
    if not isinstance(name, str):
        raise UsageError(
            'tool_choice must be "none", "auto", "required" or {"type": "function", "function": {"name": ...}}',
            param="tool_choice",
        )
    if name not in {tool.name for tool in offered}:
        raise UsageError(f"tool_choice names {fields.printable(name)!r}, which is not in tools", param="tool_choice")
    return name


def _schema(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise UsageError(f"{where} must be a JSON schema as an object, got {fields.kind(value)}", param=where)
    return value
