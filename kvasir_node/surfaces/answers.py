"""OpenAI's answers, chunks and errors as JSON documents.

It does not know HTTP beyond the status that an error carries, nor how the text came to be.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from kvasir_node.base.errors import Blame, KvasirError, QueueFull, UsageError
from kvasir_node.base.generation import (
    Alternative,
    AnswerEvent,
    ChoiceEnded,
    Finished,
    ReasoningDelta,
    TextDelta,
    TokenLogprob,
    ToolCall,
)
from kvasir_node.surfaces.ports import ModelCard

Document = dict[str, Any]

ERROR_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
ERROR_CODES = {
    401: "invalid_api_key",
    405: "method_not_allowed",
    413: "request_too_large",
    415: "unsupported_media_type",
    429: "rate_limit_exceeded",
    503: "no_capacity",
}
_HIDDEN = {
    Blame.DATA: "the model's data on this node is damaged; see the node's log",
    Blame.US: "internal error; see the node's log",
}
"""What the caller reads instead of messages that may name files of this machine."""


@dataclass(frozen=True, slots=True)
class AnswerShape:
    """One answer's fixed fields, and the documents made with them; chat and plain completions differ in names only."""

    chat: bool
    id: str
    created: int
    model: str
    choices: int = 1
    logprobs: bool = False

    def whole(self, events: Iterable[AnswerEvent], end: Finished) -> Document:
        """All of an answer from all its events, `end` being the last of them."""
        collected = [_Collected() for _ in range(self.choices)]
        for event in events:
            collected[event.choice].add(event)
        return {
            **self._head("chat.completion" if self.chat else "text_completion"),
            "choices": [self._whole_choice(index, choice) for index, choice in enumerate(collected)],
            "usage": _usage(end),
            "kvasir": asdict(end.facts),
        }

    def first(self, include_usage: bool) -> Iterator[Document]:
        """The role chunk of each choice; plain completions have none."""
        if self.chat:
            for choice in range(self.choices):
                delta = {"role": "assistant", "content": "", "refusal": None}
                yield self._chunk([self._choice(choice, {"delta": delta})], include_usage)

    def delta(self, event: TextDelta | ReasoningDelta | ToolCall, include_usage: bool) -> Document:
        return self._chunk([self._delta_choice(event)], include_usage)

    def choice_end(self, end: ChoiceEnded | Finished, include_usage: bool) -> Document:
        content: Document = {"delta": {}} if self.chat else {"text": ""}
        return self._chunk([self._choice(end.choice, content, end.reason.value)], include_usage)

    def last(self, end: Finished, include_usage: bool) -> Iterator[Document]:
        """The finish chunk, then the usage chunk if asked for; the facts ride on the last of them."""
        finish = self.choice_end(end, include_usage)
        facts = {"kvasir": asdict(end.facts)}
        if not include_usage:
            yield finish | facts
            return
        yield finish
        yield self._chunk([], False) | {"usage": _usage(end)} | facts

    def _whole_choice(self, index: int, collected: _Collected) -> Document:
        text = "".join(collected.texts)
        logprobs = self._logprobs(collected.logprobs) if self.logprobs else None
        if not self.chat:
            return self._choice(index, {"text": text}, collected.reason, logprobs)
        message: Document = {"role": "assistant", "content": text or None if collected.calls else text, "refusal": None}
        if collected.reasoning:
            message["reasoning_content"] = "".join(collected.reasoning)
        if collected.calls:
            message["tool_calls"] = [_call(call) for call in collected.calls]
        return self._choice(index, {"message": message}, collected.reason, logprobs)

    def _delta_choice(self, event: TextDelta | ReasoningDelta | ToolCall) -> Document:
        if isinstance(event, TextDelta):
            content = {"delta": {"content": event.text}} if self.chat else {"text": event.text}
            logprobs = self._logprobs(event.logprobs) if event.logprobs else None
            return self._choice(event.choice, content, logprobs=logprobs)
        if isinstance(event, ReasoningDelta):
            content = {"delta": {"reasoning_content": event.text}} if self.chat else {"text": ""}
        else:
            content = (
                {"delta": {"tool_calls": [{"index": event.number, **_call(event)}]}} if self.chat else {"text": ""}
            )
        return self._choice(event.choice, content)

    def _logprobs(self, tokens: Sequence[TokenLogprob]) -> Document:
        return _chat_logprobs(tokens) if self.chat else _text_logprobs(tokens)

    def _chunk(self, choices: list[Document], include_usage: bool) -> Document:
        head = self._head("chat.completion.chunk" if self.chat else "text_completion")
        return {**head, "choices": choices, **({"usage": None} if include_usage else {})}

    def _head(self, kind: str) -> Document:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def _choice(
        self, index: int, content: Document, finish_reason: str | None = None, logprobs: Document | None = None
    ) -> Document:
        return {"index": index, **content, "logprobs": logprobs, "finish_reason": finish_reason}


@dataclass(slots=True)
class _Collected:
    """One choice as its events add up."""

    texts: list[str] = field(default_factory=list[str])
    reasoning: list[str] = field(default_factory=list[str])
    calls: list[ToolCall] = field(default_factory=list[ToolCall])
    logprobs: list[TokenLogprob] = field(default_factory=list[TokenLogprob])
    reason: str | None = None

    def add(self, event: AnswerEvent) -> None:
        match event:
            case TextDelta():
                self.texts.append(event.text)
                self.logprobs += event.logprobs
            case ReasoningDelta():
                self.reasoning.append(event.text)
            case ToolCall():
                self.calls.append(event)
            case _:
                self.reason = event.reason.value


def answer_shape(*, chat: bool, model: str, created: int, choices: int = 1, logprobs: bool = False) -> AnswerShape:
    prefix = "chatcmpl-" if chat else "cmpl-"
    return AnswerShape(chat, prefix + secrets.token_hex(12), created, model, choices, logprobs)


def _call(call: ToolCall) -> Document:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _chat_logprobs(tokens: Sequence[TokenLogprob]) -> Document:
    def entry(token: TokenLogprob | Alternative) -> Document:
        text = token.data.decode("utf-8", "replace")
        return {"token": text, "logprob": token.logprob, "bytes": list(token.data)}

    content = [{**entry(token), "top_logprobs": [entry(other) for other in token.alternatives]} for token in tokens]
    return {"content": content, "refusal": None}


def _text_logprobs(tokens: Sequence[TokenLogprob]) -> Document:
    return {
        "tokens": [_label(token.data) for token in tokens],
        "token_logprobs": [token.logprob for token in tokens],
        "top_logprobs": [{_label(other.data): other.logprob for other in token.alternatives} for token in tokens],
        "text_offset": [token.offset for token in tokens],
    }


def _label(data: bytes) -> str:
    """A token as a name: parts of characters keep their difference, as in OpenAI's "bytes:\\xe2"."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _usage(end: Finished) -> Document:
    return {
        "prompt_tokens": end.prompt_tokens,
        "completion_tokens": end.completion_tokens,
        "total_tokens": end.prompt_tokens + end.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": end.cached_tokens},
    }


def model_document(card: ModelCard) -> Document:
    """`id` is the name that people pass as `model`; the content id works as well and stands beside it."""
    return {
        "id": card.name,
        "object": "model",
        "created": card.created_at,
        "owned_by": "kvasir",
        "kvasir": {"model_id": card.id},
    }


def error_document(status: int, message: str, *, param: str | None = None, code: str | None = None) -> Document:
    """`{"error": {message, type, param, code}}` as OpenAI's clients expect it."""
    kind = ERROR_TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code or ERROR_CODES.get(status)}}


def document_of_error(error: KvasirError) -> Document:
    param, code = (error.param, error.code) if isinstance(error, UsageError) else (None, None)
    return error_document(error.http_status, _HIDDEN.get(error.blame, str(error)), param=param, code=code)


def headers_of_error(error: KvasirError) -> dict[str, str]:
    if isinstance(error, QueueFull):
        return {"retry-after": str(max(1, math.ceil(error.retry_after_s)))}
    return {}
