"""OpenAI's request bodies, checked field by field, as GenerationRequests.

It does not know HTTP, nodes or tokens. A parameter is known and right, or it is an error that names it; nothing
is dropped silently. Source: OpenAI API reference, "Create chat completion" and "Create completion" (2025).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvasir_node.base.errors import UsageError
from kvasir_node.base.generation import GenerationRequest, SamplingOptions
from kvasir_node.surfaces import fields
from kvasir_node.surfaces.openai_messages import read_messages
from kvasir_node.surfaces.openai_tools import read_format, read_tools

STOPS_MAX = 4
STOP_CHARACTERS_MAX = 512
TOKENS_MAX = 2**31 - 1
TEXT_MAX_TOKENS_DEFAULT = 16  # OpenAI's default of /v1/completions; a chat may go on to the context's end
CHOICES_MAX = 16  # each takes a place of its own
PROMPTS_MAX = 64  # times the choices of each
TOP_LOGPROBS_MAX = 20
BIASES_MAX = 1024
NUMBER_DIGITS_MAX = 400  # more than any float has before its point

_COMMON = frozenset(
    (  # noqa: SIM905
        "model stream stream_options max_tokens temperature top_p top_k min_p seed stop n user logprobs logit_bias "
        "presence_penalty frequency_penalty response_format"
    ).split()
)
CHAT_PARAMETERS = _COMMON | {
    "messages",
    "max_completion_tokens",
    "top_logprobs",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
}
TEXT_PARAMETERS = _COMMON | {"prompt"}

NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "tools": ([],),
    "tool_choice": ("none",),
}
"""Parameters that are not supported, with the values that ask for nothing: clients send those as a matter of course."""
_NEUTRAL_FLAGS = frozenset({"echo", "store"})  # neutral when literally false


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
        document = json.loads(body.decode("utf-8"), parse_constant=_no_constant, parse_int=_bounded_int)
    except RecursionError as error:
        raise UsageError("the request body is nested too deeply") from error
    except ValueError as error:  # UnicodeDecodeError and JSONDecodeError are ValueErrors
        raise UsageError(f"the request body is not JSON in UTF-8: {error}", code="invalid_json") from error
    if not isinstance(document, dict):
        raise UsageError(f"the request body must be a JSON object, got {fields.kind(document)}", code="invalid_json")
    return document


def parse_chat(body: Mapping[str, Any]) -> ApiRequest:
    """The body of POST /v1/chat/completions; raises UsageError with `param`."""
    given = _known(body, CHAT_PARAMETERS)
    max_tokens = _max_tokens(given)
    messages = read_messages(given.get("messages"))
    top_logprobs, tools = _chat_logprobs(given), read_tools(given)
    return _request(given, messages=messages, max_tokens=max_tokens, top_logprobs=top_logprobs, tools=tools)


def parse_completion(body: Mapping[str, Any]) -> ApiRequest:
    """The body of POST /v1/completions; raises UsageError with `param`."""
    given = _known(body, TEXT_PARAMETERS)
    max_tokens = _max_tokens(given) or TEXT_MAX_TOKENS_DEFAULT
    prompts, top_logprobs = _prompts(given.get("prompt")), _text_logprobs(given)
    content: dict[str, Any] = {"prompts": prompts}
    if len(prompts) == 1:
        content = {"prompt" if isinstance(prompts[0], str) else "prompt_tokens": prompts[0]}
    return _request(given, max_tokens=max_tokens, top_logprobs=top_logprobs, **content)


def _request(given: Mapping[str, Any], **content: Any) -> ApiRequest:
    model = fields.text(given, "model", None)
    if not model:
        raise UsageError("the parameter model is required: a name or id from GET /v1/models", param="model")
    fields.text(given, "user", "")
    stream = fields.flag(given, "stream")
    return ApiRequest(
        model=model,
        stream=stream,
        include_usage=_include_usage(given.get("stream_options"), stream),
        generation=GenerationRequest(
            sampling=_sampling(given),
            stop=_stops(given.get("stop")),
            choices=fields.integer(given, "n", 1, 1, CHOICES_MAX),
            format=read_format(given.get("response_format")),
            **content,
        ),
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
            shown = fields.printable(name)
            message = f"the parameter {shown!r} is not supported here"
            raise UsageError(message, param=shown, code="unsupported_parameter")
    return given


def _is_neutral(name: str, value: Any) -> bool:
    if name in _NEUTRAL_FLAGS:
        return value is False
    return name in NEUTRAL and value in NEUTRAL[name] and not isinstance(value, bool)


def _sampling(given: Mapping[str, Any]) -> SamplingOptions:
    return SamplingOptions(
        temperature=fields.number(given, "temperature", 1.0, lambda v: 0 <= v <= 2, "from 0 to 2"),
        top_p=fields.number(given, "top_p", 1.0, lambda v: 0 < v <= 1, "above 0, at most 1"),
        top_k=fields.integer(given, "top_k", 0, 0, TOKENS_MAX),
        min_p=fields.number(given, "min_p", 0.0, lambda v: 0 <= v <= 1, "from 0 to 1"),
        seed=fields.integer(given, "seed", 0, -(2**63), 2**63 - 1) if "seed" in given else None,
        presence_penalty=fields.number(given, "presence_penalty", 0.0, lambda v: -2 <= v <= 2, "from -2 to 2"),
        frequency_penalty=fields.number(given, "frequency_penalty", 0.0, lambda v: -2 <= v <= 2, "from -2 to 2"),
        logit_bias=_biases(given.get("logit_bias", {})),
    )


def _biases(value: Any) -> tuple[tuple[int, float], ...]:
    """As pairs in the order of token ids, so that equal requests are equal."""
    if not isinstance(value, dict) or len(value) > BIASES_MAX:
        raise UsageError(f"logit_bias must be an object of at most {BIASES_MAX} token ids", param="logit_bias")
    biases = {}
    for key, bias in value.items():
        if not (key.isascii() and key.isdigit() and len(key) <= 10 and int(key) <= TOKENS_MAX):
            raise UsageError(
                f"logit_bias must have token ids as keys, got {fields.printable(key)!r}", param="logit_bias"
            )
        if isinstance(bias, bool) or not isinstance(bias, int | float) or not -100 <= bias <= 100:
            raise UsageError(f"logit_bias of token {key} must be a number from -100 to 100", param="logit_bias")
        biases[int(key)] = float(bias)
    return tuple(sorted(biases.items()))


def _chat_logprobs(given: Mapping[str, Any]) -> int | None:
    asked = fields.flag(given, "logprobs")
    if "top_logprobs" in given and not asked:
        raise UsageError("top_logprobs is allowed only with logprobs: true", param="top_logprobs")
    return fields.integer(given, "top_logprobs", 0, 0, TOP_LOGPROBS_MAX) if asked else None


def _text_logprobs(given: Mapping[str, Any]) -> int | None:
    """A number here, where chats have a flag; false asks for nothing."""
    if given.get("logprobs", False) is False:
        return None
    return fields.integer(given, "logprobs", 0, 0, TOP_LOGPROBS_MAX)


def _max_tokens(given: Mapping[str, Any]) -> int | None:
    found = [name for name in ("max_completion_tokens", "max_tokens") if name in given]
    values = [fields.integer(given, name, 1, 1, TOKENS_MAX) for name in found]
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
    return fields.flag(options, "include_usage", "stream_options.include_usage")


def _stops(value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or len(stops) > STOPS_MAX or not all(isinstance(s, str) for s in stops):
        raise UsageError(f"stop must be a string or a list of at most {STOPS_MAX} strings", param="stop")
    for stop in stops:
        if not 1 <= len(stop) <= STOP_CHARACTERS_MAX:
            raise UsageError(f"a stop string has 1 to {STOP_CHARACTERS_MAX} characters, got {len(stop)}", param="stop")
        fields.unicode(stop, "stop")
    return tuple(stops)


def _prompts(value: Any) -> tuple[str | tuple[int, ...], ...]:
    """Texts, or lists of token ids; one of either may stand without a list around it."""
    if isinstance(value, list) and value and isinstance(value[0], str | list):
        if len(value) > PROMPTS_MAX:
            raise UsageError(f"at most {PROMPTS_MAX} prompts per request, got {len(value)}", param="prompt")
        return tuple(_prompt(each) for each in value)
    return (_prompt(value),)


def _prompt(value: Any) -> str | tuple[int, ...]:
    if isinstance(value, str) and value:
        return fields.unicode(value, "prompt")
    if isinstance(value, list) and value:
        if all(isinstance(t, int) and not isinstance(t, bool) and 0 <= t <= TOKENS_MAX for t in value):
            return tuple(value)
        raise UsageError("a list as prompt holds token ids (whole numbers from 0), or prompts", param="prompt")
    got = "an empty one" if value in ("", []) else "none" if value is None else fields.kind(value)
    raise UsageError(f"prompt must be text or a list of token ids, and not empty; got {got}", param="prompt")


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON number")


def _bounded_int(digits: str) -> int:
    """Reading digits takes time that grows with their square, so Python itself has a bound and advises to raise it."""
    if len(digits) > NUMBER_DIGITS_MAX:
        raise UsageError(
            f"the request body holds a number with more than {NUMBER_DIGITS_MAX} digits", code="invalid_json"
        )
    return int(digits)
