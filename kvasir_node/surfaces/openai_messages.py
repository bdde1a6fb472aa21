"""The messages of a chat request, checked and in the shape that chat templates expect.

It does not know templates or the request's other parameters. Arguments of tool calls become objects on the way, as
templates expect them (OpenAI's API has them as JSON text).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from kvasir_node.base.errors import UsageError
from kvasir_node.surfaces import fields

MESSAGES_MAX = 2048
TOOL_CALLS_MAX = 128  # of one message
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_KEYS_OF_ROLE: Mapping[str, tuple[str, ...]] = {
    "assistant": ("role", "content", "name", "tool_calls", "reasoning_content"),
    "tool": ("role", "content", "name", "tool_call_id"),
}
_KEYS = ("role", "content", "name")


def read_messages(value: Any) -> tuple[Mapping[str, Any], ...]:
    """Raises UsageError that names the message and field at fault."""
    if not isinstance(value, list) or not 1 <= len(value) <= MESSAGES_MAX:
        got = f"{len(value)} of them" if isinstance(value, list) else "none" if value is None else fields.kind(value)
        raise UsageError(f"messages must be a list of 1 to {MESSAGES_MAX} messages; got {got}", param="messages")
    return tuple(_message(message, f"messages[{index}]") for index, message in enumerate(value))


def _message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise UsageError(f"{where} must be an object with role and content, got {fields.kind(message)}", param=where)
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise UsageError(f"{where}.role must be one of {', '.join(ROLES)}", param=f"{where}.role")
    given = fields.object_of(message, _KEYS_OF_ROLE.get(role, _KEYS), where)
    checked: dict[str, Any] = {"role": ROLES[role]}
    if given.get("tool_calls"):
        checked["content"] = _content(given.get("content", ""), f"{where}.content")
        checked["tool_calls"] = _tool_calls(given["tool_calls"], f"{where}.tool_calls")
    else:
        checked["content"] = _content(given.get("content"), f"{where}.content")
    if role == "tool" and not fields.text(given, "tool_call_id", None, f"{where}.tool_call_id"):
        raise UsageError(f"{where} needs the tool_call_id that it answers", param=f"{where}.tool_call_id")
    for key in ("name", "tool_call_id", "reasoning_content"):
        if key in given:
            checked[key] = fields.text(given, key, "", f"{where}.{key}")
    return checked


def _content(content: Any, where: str) -> str:
    """Text, or text parts joined by line breaks (as vLLM does for templates that want one string)."""
    if isinstance(content, str):
        return fields.unicode(content, where)
    if not isinstance(content, list) or not content:
        raise UsageError(f"{where} must be text or a list of text parts, got {fields.kind(content)}", param=where)
    texts = []
    for index, part in enumerate(content):
        at = f"{where}[{index}]"
        if not isinstance(part, dict) or part.get("type") != "text" or set(part) - {"type", "text"}:
            raise UsageError(f'{at} must be {{"type": "text", "text": ...}}; other parts are not supported', param=at)
        texts.append(fields.text(part, "text", "", f"{at}.text"))
    return "\n".join(texts)


def _tool_calls(value: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(value, list) or len(value) > TOOL_CALLS_MAX:
        raise UsageError(f"{where} must be a list of at most {TOOL_CALLS_MAX} calls", param=where)
    return [_tool_call(call, f"{where}[{index}]") for index, call in enumerate(value)]


def _tool_call(value: Any, where: str) -> dict[str, Any]:
    call = fields.object_of(value, ("id", "type", "function", "index"), where)
    if call.get("type", "function") != "function":
        raise UsageError(f'{where}.type must be "function"', param=f"{where}.type")
    function = fields.object_of(call.get("function"), ("name", "arguments"), f"{where}.function")
    name = fields.text(function, "name", None, f"{where}.function.name")
    call_id = fields.text(call, "id", None, f"{where}.id")
    if not name or not call_id:
        raise UsageError(f"{where} needs an id and the function's name", param=where)
    arguments = _arguments(function, f"{where}.function.arguments")
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _arguments(function: Mapping[str, Any], where: str) -> dict[str, Any]:
    try:
        arguments = json.loads(fields.text(function, "arguments", "", where) or "{}")
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{where} must be a JSON object as text", param=where) from error
    if not isinstance(arguments, dict):
        raise UsageError(f"{where} must be a JSON object as text, got {fields.kind(arguments)}", param=where)
    return arguments
