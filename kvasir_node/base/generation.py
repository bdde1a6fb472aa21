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
    """How the next token is drawn. temperature 0 = greedy; top_p 1, top_k 0 and min_p 0 switch a filter off.

    A penalty is subtracted from the logit of each token that the answer (not the prompt) holds already: once for
    presence, once per occurrence for frequency. `logit_bias` holds (token, what is added to its logit).
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class JsonFormat:
    """The answer is one JSON value that the schema allows; `param` is the request's parameter that asked for it."""

    schema: Mapping[str, Any]
    param: str = "response_format"


class ToolUse(StrEnum):
    """May the answer call tools?"""

    AUTO = "auto"
    REQUIRED = "required"


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call. `strict`: arguments must follow the schema whenever it is called."""

    name: str
    description: str | None
    parameters: Mapping[str, Any]
    strict: bool = False

    def document(self) -> dict[str, Any]:
        """In OpenAI's shape, which chat templates expect."""
        about = {} if self.description is None else {"description": self.description}
        return {"type": "function", "function": {"name": self.name, **about, "parameters": dict(self.parameters)}}


@dataclass(frozen=True, slots=True)
class Tools:
    """The tools of one request. REQUIRED means that the answer is a call of one of them, or of `only`."""

    offered: tuple[Tool, ...]
    use: ToolUse = ToolUse.AUTO
    only: str | None = None  # REQUIRED alone: the one tool that must be called

    def documents(self) -> list[dict[str, Any]]:
        return [tool.document() for tool in self.offered]


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """Exactly one of `messages`, `prompt`, `prompt_tokens` and `prompts` is given. max_tokens None = up to the
    context's end.

    `choices` answers are made of each prompt, all with a place of their own; of several `prompts` (texts or tokens),
    the answers to the first come first. `top_logprobs` None = no log
    probabilities; else those of the answer's tokens and of that many alternatives each.
    """

    messages: tuple[Mapping[str, Any], ...] | None = None
    prompt: str | None = None
    prompt_tokens: tuple[int, ...] | None = None
    prompts: tuple[str | tuple[int, ...], ...] = ()
    max_tokens: int | None = None
    sampling: SamplingOptions = field(default_factory=SamplingOptions)
    stop: tuple[str, ...] = ()
    choices: int = 1
    top_logprobs: int | None = None
    format: JsonFormat | None = None
    tools: Tools | None = None

    @property
    def answer_count(self) -> int:
        return self.choices * max(1, len(self.prompts))


class FinishReason(StrEnum):
    STOP = "stop"  # end token, a stop string, or the format is complete
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"


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
    request: int = 0  # its number in this node's log


@dataclass(frozen=True, slots=True)
class Alternative:
    """A token that could have come, in bytes: it may be a part of a character."""

    data: bytes
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One token of an answer: natural logarithm of its probability, from the model's logits as they came (before
    temperature, penalties, biases and formats). `offset`: characters of the answer before it."""

    data: bytes
    logprob: float
    alternatives: tuple[Alternative, ...]
    offset: int


@dataclass(frozen=True, slots=True)
class TextDelta:
    """More text of one choice; never ends inside a character, never shows a part of a stop string.

    `logprobs` are those of the tokens whose text is certain by now; the text may be empty when there are some.
    """

    text: str
    choice: int = 0
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """More of what the model thinks aloud before it answers, where its format tells the two apart."""

    text: str
    choice: int = 0


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A whole call; `arguments` is the text of a JSON object. `number` counts the calls of the choice from 0."""

    id: str
    name: str
    arguments: str
    number: int
    choice: int = 0


@dataclass(frozen=True, slots=True)
class ChoiceEnded:
    """A choice is complete while others still go on."""

    reason: FinishReason
    choice: int


@dataclass(frozen=True, slots=True)
class Finished:
    """Always the last event of an answer; `reason` and `choice` are those of the choice that ended last.

    `cached_tokens` of the prompts were not computed, because another request had begun like them.
    """

    reason: FinishReason
    prompt_tokens: int
    completion_tokens: int
    facts: AnswerFacts
    choice: int = 0
    cached_tokens: int = 0


AnswerEvent = TextDelta | ReasoningDelta | ToolCall | ChoiceEnded | Finished
