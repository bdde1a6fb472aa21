"""OpenAI's answers, chunks and errors as JSON documents.

It does not know HTTP beyond the status that an error carries, nor how the text came to be.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from kvasir_node.base.errors import Blame, KvasirError, QueueFull, UsageError
from kvasir_node.base.generation import Finished, TextDelta
from kvasir_node.surfaces.ports import ModelCard

Document = dict[str, Any]

_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_CODES = {
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

    def whole(self, text: str, end: Finished) -> Document:
        message = {"role": "assistant", "content": text, "refusal": None}
        choice = self._choice({"message": message} if self.chat else {"text": text}, end.reason.value)
        return {
            **self._head("chat.completion" if self.chat else "text_completion"),
            "choices": [choice],
            "usage": _usage(end),
            "kvasir": asdict(end.facts),
        }

    def first(self, include_usage: bool) -> Iterator[Document]:
        """The role chunk; plain completions have none."""
        if self.chat:
            delta = {"role": "assistant", "content": "", "refusal": None}
            yield self._chunk([self._choice({"delta": delta}, None)], include_usage)

    def delta(self, delta: TextDelta, include_usage: bool) -> Document:
        text = {"delta": {"content": delta.text}} if self.chat else {"text": delta.text}
        return self._chunk([self._choice(text, None)], include_usage)

    def last(self, end: Finished, include_usage: bool) -> Iterator[Document]:
        """The finish chunk, then the usage chunk if asked for; the facts ride on the last of them."""
        choice = self._choice({"delta": {}} if self.chat else {"text": ""}, end.reason.value)
        finish = self._chunk([choice], include_usage)
        facts = {"kvasir": asdict(end.facts)}
        if not include_usage:
            yield finish | facts
            return
        yield finish
        yield self._chunk([], False) | {"usage": _usage(end)} | facts

    def _chunk(self, choices: list[Document], include_usage: bool) -> Document:
        head = self._head("chat.completion.chunk" if self.chat else "text_completion")
        return {**head, "choices": choices, **({"usage": None} if include_usage else {})}

    def _head(self, kind: str) -> Document:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def _choice(self, content: Document, finish_reason: str | None) -> Document:
        return {"index": 0, **content, "logprobs": None, "finish_reason": finish_reason}


def answer_shape(*, chat: bool, model: str, created: int) -> AnswerShape:
    prefix = "chatcmpl-" if chat else "cmpl-"
    return AnswerShape(chat, prefix + secrets.token_hex(12), created, model)


def _usage(end: Finished) -> Document:
    return {
        "prompt_tokens": end.prompt_tokens,
        "completion_tokens": end.completion_tokens,
        "total_tokens": end.prompt_tokens + end.completion_tokens,
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
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code or _CODES.get(status)}}


def document_of_error(error: KvasirError) -> Document:
    param, code = (error.param, error.code) if isinstance(error, UsageError) else (None, None)
    return error_document(error.http_status, _HIDDEN.get(error.blame, str(error)), param=param, code=code)


def headers_of_error(error: KvasirError) -> dict[str, str]:
    if isinstance(error, QueueFull):
        return {"retry-after": str(max(1, math.ceil(error.retry_after_s)))}
    return {}
