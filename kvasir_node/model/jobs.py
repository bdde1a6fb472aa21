"""What the engine takes and gives: jobs, their tokens, and the errors that name a job.

It does not know how any of it is computed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from kvasir_node.base.errors import DataError, UsageError
from kvasir_node.base.generation import FinishReason, SamplingOptions
from kvasir_node.model.sampling import TokenScores


class Constraint(Protocol):
    """What an answer may be, token by token; one for each job (see `model/grammar.py`)."""

    @property
    def ended(self) -> bool:
        """The answer is complete and nothing but an end token could follow."""
        ...

    def allowed(self, vocabulary: int) -> torch.Tensor:
        """bool [vocabulary]: which tokens may come next, at least one. Raises UsageError when it cannot tell."""
        ...

    def take(self, token: int) -> None:
        """The answer goes on with this token."""
        ...


@dataclass(frozen=True, slots=True)
class Job:
    """One request in tokens. `id` is unique among the jobs of an engine.

    `top_logprobs` None = no scores; else each StepToken carries them, with that many of the likeliest tokens.
    """

    id: int
    prompt: tuple[int, ...]
    max_tokens: int
    sampling: SamplingOptions
    end_tokens: frozenset[int]
    ignore_end: bool = False
    top_logprobs: int | None = None
    constraint: Constraint | None = None

    @property
    def is_plain(self) -> bool:
        """Its tokens are simply the likeliest ones, and nothing else is asked of it."""
        sampling = self.sampling
        is_shifted = sampling.presence_penalty or sampling.frequency_penalty or sampling.logit_bias
        return sampling.temperature <= 0 and not is_shifted and self.top_logprobs is None and self.constraint is None


class AnswerTally(NamedTuple):
    """(row, expert) pairs of one job so far, prefill included, but for the `reused_tokens` of its prompt, which were
    copied from other requests."""

    local_pairs: int = 0
    remote_pairs: int = 0
    fallbacks: int = 0
    hedges: int = 0
    reused_tokens: int = 0


class StepToken(NamedTuple):
    """One more token of a job. An end token is reported too, with `finished` STOP and not as `is_text`."""

    job_id: int
    token: int
    finished: FinishReason | None
    tally: AnswerTally
    is_text: bool = True
    scores: TokenScores | None = None


class BadLogits(DataError):
    """The model gave a job logits that are not finite; the job must leave, its neighbours can go on."""

    def __init__(self, message: str, *, job_id: int) -> None:
        super().__init__(message)
        self.job_id = job_id


class ConstraintFailed(UsageError):
    """A job's constraint cannot tell what may come next; the job must leave, its neighbours can go on."""

    def __init__(self, error: UsageError, *, job_id: int) -> None:
        super().__init__(str(error), param=error.param, code=error.code)
        self.job_id = job_id
