"""One request's answer on its way out: from tokens to text, thoughts, calls of tools, and the ends of its choices.

It does not know the engine, places or HTTP. A request has one or more choices; each turns its tokens into events by
itself, and all of them go into one bounded channel.
"""

from __future__ import annotations

import secrets
import string
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import trio

from kvasir_node.base.errors import KvasirError
from kvasir_node.base.generation import (
    Alternative,
    AnswerEvent,
    AnswerFacts,
    ChoiceEnded,
    Finished,
    FinishReason,
    ReasoningDelta,
    TextDelta,
    TokenLogprob,
    ToolCall,
)
from kvasir_node.model.dialect import AnswerPlan
from kvasir_node.model.jobs import AnswerTally, Job, StepToken
from kvasir_node.model.sampling import TokenScores
from kvasir_node.model.text import TextModel, TextStream
from kvasir_node.model.tools import Called, Piece, Said

_CALL_ID_CHARACTERS = 9  # letters and digits, because Mistral's templates refuse any other id
AnswerItem = AnswerEvent | KvasirError


@dataclass(slots=True)
class Answer:
    """The events of one answer; a KvasirError among them is raised."""

    items: trio.MemoryReceiveChannel[AnswerItem]
    ended: bool = False

    def __aiter__(self) -> AsyncIterator[AnswerEvent]:
        return self

    async def __anext__(self) -> AnswerEvent:
        if self.ended:
            raise StopAsyncIteration
        item = await self.items.receive()
        self.ended = isinstance(item, Finished | KvasirError)
        if isinstance(item, KvasirError):
            raise item
        return item


class ChoiceWriter:
    """Makes events of one choice's tokens. Text, thoughts and calls come in the order in which they were written."""

    def __init__(self, text: TextModel, stops: tuple[str, ...], plan: AnswerPlan, choice: int) -> None:
        """Raises UsageError for stop strings that cannot be used."""
        self._text = text
        self._stream = TextStream(text, stops, plan.shown)
        self._reader = None if plan.reader is None else plan.reader()
        self._choice = choice
        self._calls = 0
        self._certain = 0  # characters that the stream gave out
        self._scored: deque[tuple[int, TokenLogprob]] = deque()  # (characters at its end, token), not given out yet

    @property
    def stopped(self) -> bool:
        """A stop string is complete; no later token counts."""
        return self._stream.stopped

    def write(self, token: StepToken) -> list[AnswerEvent]:
        """The events that this token makes certain; after the last token, all that was held."""
        start = self._stream.characters
        text = self._stream.push((token.token,)) if token.is_text else ""
        if token.scores is not None and token.is_text:
            # A token that is only the beginning of a character waits for that character.
            end = max(self._stream.characters, start + 1)
            self._scored.append((end, self._logprob(token.token, token.scores, start)))
        is_last = token.finished is not None
        if is_last:
            text += self._stream.finish()
        self._certain += len(text)
        return self._events(self._read(text, is_last=is_last or self.stopped), self._scores(is_last=is_last))

    def reason(self, token: StepToken) -> FinishReason:
        """Why the choice ended with this token."""
        if token.finished is FinishReason.LENGTH and not self.stopped:
            return FinishReason.LENGTH
        return FinishReason.TOOL_CALLS if self._calls else FinishReason.STOP

    def _read(self, text: str, *, is_last: bool) -> list[Piece]:
        if self._reader is None:
            return [Said(text)] if text else []
        pieces = self._reader.push(text)
        return pieces + self._reader.finish() if is_last else pieces

    def _scores(self, *, is_last: bool) -> tuple[TokenLogprob, ...]:
        """Of the tokens whose text is certain by now; a token that a stop string cut off whole never shows."""
        found: list[TokenLogprob] = []
        while self._scored:
            end, scored = self._scored[0]
            is_shown = scored.offset < self._certain if self.stopped else is_last or end <= self._certain
            if not is_shown:
                break
            self._scored.popleft()
            found.append(scored)
        return tuple(found)

    def _logprob(self, token: int, scores: TokenScores, offset: int) -> TokenLogprob:
        likeliest = tuple(Alternative(self._text.token_label(other), value) for other, value in scores.likeliest)
        return TokenLogprob(self._text.token_label(token), scores.logprob, likeliest, offset)

    def _events(self, pieces: list[Piece], logprobs: tuple[TokenLogprob, ...]) -> list[AnswerEvent]:
        events: list[AnswerEvent] = []
        for piece in pieces:
            if isinstance(piece, Called):
                events.append(self._call(piece))
            elif piece.aloud:
                events.append(TextDelta(piece.text, self._choice, logprobs))
                logprobs = ()
            else:
                events.append(ReasoningDelta(piece.text, self._choice))
        return [*events, TextDelta("", self._choice, logprobs)] if logprobs else events

    def _call(self, called: Called) -> ToolCall:
        characters = string.ascii_letters + string.digits
        call_id = "".join(secrets.choice(characters) for _ in range(_CALL_ID_CHARACTERS))
        self._calls += 1
        return ToolCall(call_id, called.name, called.arguments, self._calls - 1, self._choice)


@dataclass(slots=True, eq=False)
class Choice:
    """One of a request's answers and its way through admission and engine."""

    job: Job
    writer: ChoiceWriter
    request: Request
    number: int
    is_first: bool = True  # of those of its prompt
    tokens: int = 0
    tally: AnswerTally = field(default_factory=AnswerTally)
    placed: bool = True  # admission still counts it
    joined: bool = False  # the engine has it
    token_at: float | None = None  # when its latest token came


@dataclass(slots=True, eq=False)
class Request:
    """What one caller asked for: its choices, and one channel for the events of them all."""

    arrived_at: float
    prompt_tokens: int  # of all prompts
    # Holds at most a few events per token of the answer, so it is bounded by max_tokens and the number of choices.
    send: trio.MemorySendChannel[AnswerItem]
    choices: list[Choice] = field(default_factory=list[Choice])
    open_count: int = 0  # choices that have not ended
    admitted_at: float | None = None  # the first choice
    first_token_at: float | None = None
    ended_by: FinishReason | None = None  # its last choice

    @property
    def number(self) -> int:
        """Of its first choice's job: what the log calls it."""
        return self.choices[0].job.id

    @property
    def answer_tokens(self) -> int:
        return sum(choice.tokens for choice in self.choices)

    def deliver(self, choice: Choice, token: StepToken, now: float) -> bool:
        """Sends what the token brings; True when it ends the choice."""
        if self.first_token_at is None:
            self.first_token_at = now
        choice.tokens += 1
        choice.tally = token.tally
        for event in choice.writer.write(token):
            self.send.send_nowait(event)
        if token.finished is None and not choice.writer.stopped:
            return False
        self.open_count -= 1
        reason = choice.writer.reason(token)
        self.send.send_nowait(self._end(choice, reason, now))
        return True

    def _end(self, choice: Choice, reason: FinishReason, now: float) -> ChoiceEnded | Finished:
        if self.open_count:
            return ChoiceEnded(reason, choice.number)
        self.ended_by = reason
        cached = sum(each.tally.reused_tokens for each in self.choices if each.is_first)
        return Finished(reason, self.prompt_tokens, self.answer_tokens, self.facts(now), choice.number, cached)

    def facts(self, now: float) -> AnswerFacts:
        """Up to now."""
        admitted = self.arrived_at if self.admitted_at is None else self.admitted_at
        first = now if self.first_token_at is None else self.first_token_at
        tallies = [choice.tally for choice in self.choices]
        return AnswerFacts(
            local_pairs=sum(tally.local_pairs for tally in tallies),
            remote_pairs=sum(tally.remote_pairs for tally in tallies),
            fallbacks=sum(tally.fallbacks for tally in tallies),
            hedges=sum(tally.hedges for tally in tallies),
            queue_ms=round((admitted - self.arrived_at) * 1000, 3),
            prefill_ms=round((first - admitted) * 1000, 3),
            decode_ms=round((now - first) * 1000, 3),
            request=self.number,
        )
