"""One request for text and what comes back: plain values shared by the engine, the coordinator and the API.

It does not know HTTP, tokens' spelling, or where experts are computed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """How the next token is drawn. temperature 0 = greedy; top_p 1, top_k 0 and min_p 0 switch a filter off."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """Exactly one of `messages`, `prompt` and `prompt_tokens` is given. max_tokens None = up to the context's end."""

    messages: tuple[Mapping[str, Any], ...] | None = None
    prompt: str | None = None
    prompt_tokens: tuple[int, ...] | None = None
    max_tokens: int | None = None
    sampling: SamplingOptions = field(default_factory=SamplingOptions)
    stop: tuple[str, ...] = ()


class FinishReason(StrEnum):
    STOP = "stop"  # end token or a stop string
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class AnswerFacts:
    """The "kvasir" object of an answer; pairs are (row, expert) pairs of this request alone."""

    local_pairs: int = 0
    remote_pairs: int = 0
    fallbacks: int = 0
    hedges: int = 0
    queue_ms: float = 0.0
    prefill_ms: float = 0.0
    decode_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class TextDelta:
    """More text; never ends inside a character, never shows a part of a stop string."""

    text: str


@dataclass(frozen=True, slots=True)
class Finished:
    """Always the last event of an answer."""

    reason: FinishReason
    prompt_tokens: int
    completion_tokens: int
    facts: AnswerFacts
