"""OpenAI's request bodies, checked field by field, as GenerationRequests.

It does not know HTTP, nodes or tokens. A parameter is known and right, or it is an error that names it; nothing
is dropped silently. Source: OpenAI API reference, "Create chat completion" and "Create completion" (2025).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kvasir_node.base.errors import UsageError
from kvasir_node.base.generation import GenerationRequest, SamplingOptions

MESSAGES_MAX = 2048
STOPS_MAX = 4
STOP_CHARACTERS_MAX = 512
TOKENS_MAX = 2**31 - 1
TEXT_MAX_TOKENS_DEFAULT = 16  # OpenAI's default of /v1/completions; a chat may go on to the context's end
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}

_COMMON = frozenset(
    "model stream stream_options max_tokens temperature top_p top_k min_p seed stop n user".split()  # noqa: SIM905
)
CHAT_PARAMETERS = _COMMON | {"messages", "max_completion_tokens"}
TEXT_PARAMETERS = _COMMON | {"prompt"}

NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "tools": ([],),
    "tool_choice": ("none",),
    "response_format": ({"type": "text"},),
    "best_of": (1,),
}
"""Parameters we do not support yet, with the values that ask for nothing: clients send those as a matter of course."""
_NEUTRAL_FLAGS = frozenset({"logprobs", "echo", "store"})  # neutral when literally false


@dataclass(frozen=True, slots=True)
class ApiRequest:
    """A checked body. `model` is a name or an id as the caller wrote it."""

    model: str
    stream: bool
    include_usage: bool
    generation: GenerationRequest


def parse_json_object(body: bytes) -> dict[str, Any]:
    """Strict JSON in UTF-8 whose top is an object; raises UsageError."""
    try:
        document = json.loads(body.decode("utf-8"), parse_constant=_no_constant)
    except RecursionError as error:
        raise UsageError("the request body is nested too deeply") from error
    except ValueError as error:  # UnicodeDecodeError and JSONDecodeError are ValueErrors
        raise UsageError(f"the request body is not JSON in UTF-8: {error}", code="invalid_json") from error
    if not isinstance(document, dict):
        raise UsageError(f"the request body must be a JSON object, got {_kind(document)}", code="invalid_json")
    return document


def parse_chat(body: Mapping[str, Any]) -> ApiRequest:
    """The body of POST /v1/chat/completions; raises UsageError with `param`."""
    given = _known(body, CHAT_PARAMETERS)
    max_tokens = _max_tokens(given)
    return _request(given, messages=_messages(given.get("messages")), max_tokens=max_tokens)


def parse_completion(body: Mapping[str, Any]) -> ApiRequest:
    """The body of POST /v1/completions; raises UsageError with `param`."""
    given = _known(body, TEXT_PARAMETERS)
    max_tokens = _max_tokens(given) or TEXT_MAX_TOKENS_DEFAULT
    prompt = _prompt(given.get("prompt"))
    if isinstance(prompt, str):
        return _request(given, prompt=prompt, max_tokens=max_tokens)
    return _request(given, prompt_tokens=prompt, max_tokens=max_tokens)


def _request(given: Mapping[str, Any], **content: Any) -> ApiRequest:
    model = _text(given, "model", None)
    if not model:
        raise UsageError("the parameter model is required: a name or id from GET /v1/models", param="model")
    if _integer(given, "n", 1, 1, TOKENS_MAX) != 1:
        raise UsageError("n must be 1: one answer per request is supported", param="n")
    _text(given, "user", "")
    stream = _flag(given, "stream")
    return ApiRequest(
        model=model,
        stream=stream,
        include_usage=_include_usage(given.get("stream_options"), stream),
        generation=GenerationRequest(sampling=_sampling(given), stop=_stops(given.get("stop")), **content),
    )


def _known(body: Mapping[str, Any], known: frozenset[str]) -> dict[str, Any]:
    """The supported parameters that were given a value; null is as good as absent, as OpenAI's clients expect."""
    given = {}
    for name, value in body.items():
        if value is None:
            continue
        if name in known:
            given[name] = value
        elif not _is_neutral(name, value):
            shown = name[:60].encode("utf-8", "replace").decode()
            message = f"the parameter {shown!r} is not supported here"
            raise UsageError(message, param=shown, code="unsupported_parameter")
    return given


def _is_neutral(name: str, value: Any) -> bool:
    if name in _NEUTRAL_FLAGS:
        return value is False
    return name in NEUTRAL and value in NEUTRAL[name] and not isinstance(value, bool)


def _sampling(given: Mapping[str, Any]) -> SamplingOptions:
    return SamplingOptions(
        temperature=_number(given, "temperature", 1.0, lambda v: 0 <= v <= 2, "from 0 to 2"),
        top_p=_number(given, "top_p", 1.0, lambda v: 0 < v <= 1, "above 0, at most 1"),
        top_k=_integer(given, "top_k", 0, 0, TOKENS_MAX),
        min_p=_number(given, "min_p", 0.0, lambda v: 0 <= v <= 1, "from 0 to 1"),
        seed=_integer(given, "seed", 0, -(2**63), 2**63 - 1) if "seed" in given else None,
    )


def _max_tokens(given: Mapping[str, Any]) -> int | None:
    found = [name for name in ("max_completion_tokens", "max_tokens") if name in given]
    values = [_integer(given, name, 1, 1, TOKENS_MAX) for name in found]
    if len(set(values)) > 1:
        raise UsageError("max_tokens and max_completion_tokens differ; give one of them", param="max_tokens")
    return values[0] if values else None


def _include_usage(options: Any, stream: bool) -> bool:
    if options is None:
        return False
    if not isinstance(options, dict) or set(options) - {"include_usage"}:
        raise UsageError("stream_options must be an object with include_usage alone", param="stream_options")
    if not stream:
        raise UsageError("stream_options is allowed only with stream: true", param="stream_options")
    return _flag(options, "include_usage", "stream_options.include_usage")


def _stops(value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or len(stops) > STOPS_MAX or not all(isinstance(s, str) for s in stops):
        raise UsageError(f"stop must be a string or a list of at most {STOPS_MAX} strings", param="stop")
    for stop in stops:
        if not 1 <= len(stop) <= STOP_CHARACTERS_MAX:
            raise UsageError(f"a stop string has 1 to {STOP_CHARACTERS_MAX} characters, got {len(stop)}", param="stop")
        _unicode(stop, "stop")
    return tuple(stops)


def _prompt(value: Any) -> str | tuple[int, ...]:
    """A string, or token ids; a list may wrap exactly one of either."""
    if isinstance(value, list) and value and isinstance(value[0], str | list):
        if len(value) > 1:
            raise UsageError(f"one prompt per request is supported, got a list of {len(value)}", param="prompt")
        value = value[0]
    if isinstance(value, str) and value:
        return _unicode(value, "prompt")
    if isinstance(value, list) and value:
        if all(isinstance(t, int) and not isinstance(t, bool) and 0 <= t <= TOKENS_MAX for t in value):
            return tuple(value)
        raise UsageError("a list as prompt holds token ids (whole numbers from 0), or one string", param="prompt")
    got = "an empty one" if value in ("", []) else "none" if value is None else _kind(value)
    raise UsageError(f"prompt must be text or a list of token ids, and not empty; got {got}", param="prompt")


def _messages(value: Any) -> tuple[Mapping[str, Any], ...]:
    if not isinstance(value, list) or not 1 <= len(value) <= MESSAGES_MAX:
        got = f"{len(value)} of them" if isinstance(value, list) else "none" if value is None else _kind(value)
        raise UsageError(f"messages must be a list of 1 to {MESSAGES_MAX} messages; got {got}", param="messages")
    return tuple(_message(message, f"messages[{index}]") for index, message in enumerate(value))


def _message(message: Any, where: str) -> dict[str, str]:
    if not isinstance(message, dict):
        raise UsageError(f"{where} must be an object with role and content, got {_kind(message)}", param=where)
    for key, value in message.items():
        if key not in ("role", "content", "name") and value is not None:
            shown = key[:60].encode("utf-8", "replace").decode()
            raise UsageError(f"{shown!r} in {where} is not supported", param=f"{where}.{shown}")
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise UsageError(f"{where}.role must be one of {', '.join(ROLES)}", param=f"{where}.role")
    checked = {"role": ROLES[role], "content": _content(message.get("content"), f"{where}.content")}
    if message.get("name") is not None:
        checked["name"] = _text(message, "name", "", f"{where}.name")
    return checked


def _content(content: Any, where: str) -> str:
    """Text, or text parts joined by line breaks (as vLLM does for templates that want one string)."""
    if isinstance(content, str):
        return _unicode(content, where)
    if not isinstance(content, list) or not content:
        raise UsageError(f"{where} must be text or a list of text parts, got {_kind(content)}", param=where)
    texts = []
    for index, part in enumerate(content):
        at = f"{where}[{index}]"
        if not isinstance(part, dict) or part.get("type") != "text" or set(part) - {"type", "text"}:
            raise UsageError(f'{at} must be {{"type": "text", "text": ...}}; other parts are not supported', param=at)
        texts.append(_text(part, "text", "", f"{at}.text"))
    return "\n".join(texts)


def _number(given: Mapping[str, Any], name: str, default: float, fits: Callable[[float], bool], range_: str) -> float:
    value = given.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not fits(value):
        raise UsageError(f"{name} must be a number {range_}, got {_shown(value)}", param=name)
    return float(value)


def _integer(given: Mapping[str, Any], name: str, default: int, low: int, high: int) -> int:
    value = given.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise UsageError(f"{name} must be a whole number from {low} to {high}, got {_shown(value)}", param=name)
    return value


def _flag(given: Mapping[str, Any], name: str, where: str | None = None) -> bool:
    value = given.get(name)
    if value is not None and not isinstance(value, bool):
        raise UsageError(f"{where or name} must be true or false, got {_shown(value)}", param=where or name)
    return bool(value)


def _text(given: Mapping[str, Any], name: str, default: str | None, where: str | None = None) -> str:
    value = given.get(name, default)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise UsageError(f"{where or name} must be text, got {_kind(value)}", param=where or name)
    return _unicode(value, where or name)


def _unicode(text: str, where: str) -> str:
    """JSON's escapes can spell half a surrogate pair, which is no character and cannot be encoded again."""
    if not text.isascii():
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise UsageError(f"{where} holds half a surrogate pair at {error.start}", param=where) from error
    return text


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON number")


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "text", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")


def _shown(value: Any) -> str:
    return repr(value)[:40] if isinstance(value, int | float) and abs(value) < 1e300 else _kind(value)
