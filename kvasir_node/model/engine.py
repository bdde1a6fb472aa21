"""Continuous batching: requests join and leave at token boundaries and share each forward.

It does not know tokenizers, text, time or the network, and awaits nothing; one thread at a time may use it. A step
that raises has changed nothing that a later step could see, so it may be repeated.
"""

from __future__ import annotations

import secrets
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from kvasir_node.base.errors import BugError, CapacityError, DataError, UsageError
from kvasir_node.base.generation import FinishReason, SamplingOptions
from kvasir_node.model.cache import Lane
from kvasir_node.model.missing import ExpertsMissing, JobsWait
from kvasir_node.model.sampling import TokenScores, bad_rows, choose, forbid, score, shift, uniform
from kvasir_node.model.trunk import RowTally, Trunk


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


@dataclass(frozen=True, slots=True)
class AnswerTally:
    """(row, expert) pairs of one job so far, prefill included."""

    local_pairs: int = 0
    remote_pairs: int = 0
    fallbacks: int = 0
    hedges: int = 0


@dataclass(frozen=True, slots=True)
class StepToken:
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


@dataclass(slots=True, eq=False)
class _Seat:
    """A job and its slot. `fed` counts the positions whose keys and values are in the cache."""

    job: Job
    slot: int
    seed: int
    fed: int = 0
    answer: list[int] = field(default_factory=list)
    counts: Counter[int] = field(default_factory=Counter[int])  # of the answer's tokens
    tally: AnswerTally = AnswerTally()


@dataclass(frozen=True, slots=True)
class _Forward:
    """What one forward gave: `logits` [B, V] of `seats`, which now have `fed` positions, and their tallies."""

    lane: Lane
    seats: Sequence[_Seat]
    fed: Sequence[int]
    logits: torch.Tensor
    tallies: Sequence[AnswerTally]
    gives_tokens: bool
    twins: Sequence[_Seat] = ()  # have the prompt that the first seat computed, and get their part of the cache from it


class Engine:
    """Up to `slots` jobs of up to `context` tokens each (prompt and answer)."""

    def __init__(self, trunk: Trunk, slots: int, context: int, prefill_chunk: int) -> None:
        if not 1 <= context <= trunk.context_max:
            raise UsageError(f"a context of {context} tokens: the model allows 1 to {trunk.context_max}")
        if slots < 1 or prefill_chunk < 1:
            raise UsageError(f"{slots} slots and prefill chunks of {prefill_chunk} tokens: both must be at least 1")
        self.slots = slots
        self.context = context
        self._trunk = trunk
        self._prefill_chunk = prefill_chunk
        self._cache = trunk.new_cache(slots, context)
        self._decode_lane, self._prefill_lane = self._cache.lane(), self._cache.lane()
        self._free = list(range(slots))
        self._joining: deque[_Seat] = deque()  # at most `slots`, as every seat has a slot
        self._running: dict[int, _Seat] = {}
        self._paused: dict[int, _Seat] = {}

    @property
    def free_slots(self) -> int:
        return len(self._free)

    @property
    def busy_slots(self) -> int:
        return self.slots - len(self._free)

    @property
    def is_idle(self) -> bool:
        """Nothing to compute: `step` would return at once."""
        return not self._joining and not self._running

    def join(self, job: Job) -> None:
        """Gives the job a slot; its prompt is computed by the next steps.

        Raises CapacityError when no slot is free, UsageError when it can never fit.
        """
        self.check(job)
        if not self._free:
            raise CapacityError(f"all {self.slots} slots are busy")
        self._free.sort()
        seed = secrets.randbits(64) if job.sampling.seed is None else job.sampling.seed
        # The lowest free slot, because neighbouring slots are read without a copy.
        self._joining.append(_Seat(job, self._free.pop(0), seed))

    def leave(self, job_id: int) -> None:
        """Ends a job and frees its slot; does nothing for one that has ended already."""
        self.resume(job_id)
        seat = self._running.pop(job_id, None) or next((s for s in self._joining if s.job.id == job_id), None)
        if seat is not None:
            self._release(seat)

    def pause(self, job_id: int) -> None:
        """Leaves a job out of the steps until `resume`; it keeps its slot and what was computed of it."""
        seat = self._running.pop(job_id, None) or next((s for s in self._joining if s.job.id == job_id), None)
        if seat is not None:
            self._paused[job_id] = seat
            if seat in self._joining:
                self._joining.remove(seat)

    def resume(self, job_id: int) -> None:
        """Lets a paused job go on; does nothing for another one."""
        seat = self._paused.pop(job_id, None)
        if seat is None:
            return
        if seat.answer:
            self._running[job_id] = seat
        else:
            self._joining.append(seat)

    @torch.inference_mode()
    def step(self) -> list[StepToken]:
        """One token for every running job, and one chunk of the prompt of the job that has waited longest.

        Raises BadLogits or ConstraintFailed that name a job, JobsWait for jobs that should be paused, or whatever the
        expert dispatch raises.
        """
        forwards = []
        if self._running:
            forwards.append(self._decode(sorted(self._running.values(), key=lambda seat: seat.slot)))
        if self._joining:
            forwards.append(self._prefill(self._joining[0]))
        for forward in forwards:
            self._check_logits(forward)
        chosen = [self._choose(forward) for forward in forwards]
        for forward in forwards:
            forward.lane.commit()
        return [token for each in zip(forwards, chosen, strict=True) for token in self._commit(*each)]

    def _decode(self, seats: Sequence[_Seat]) -> _Forward:
        lane = self._decode_lane
        lane.begin([seat.slot for seat in seats], [seat.fed for seat in seats], 1)
        tokens = torch.tensor([[seat.answer[-1]] for seat in seats], device=self._trunk.device)
        logits, rows = self._run(tokens, lane, seats)
        tallies = [_sum_rows(rows, row, row + 1) for row in range(len(seats))]
        return _Forward(lane, seats, [seat.fed + 1 for seat in seats], logits, tallies, True)

    def _prefill(self, seat: _Seat) -> _Forward:
        size = self._prefill_chunk if self._trunk.splits_prompts else len(seat.job.prompt)
        chunk = seat.job.prompt[seat.fed : seat.fed + size]
        lane = self._prefill_lane
        lane.begin([seat.slot], [seat.fed], len(chunk))
        logits, rows = self._run(torch.tensor([chunk], device=self._trunk.device), lane, [seat])
        fed = seat.fed + len(chunk)
        tally = _sum_rows(rows, 0, len(chunk))
        if fed < len(seat.job.prompt):
            return _Forward(lane, [seat], [fed], logits, [tally], False)
        twins = [other for other in self._joining if other is not seat and other.job.prompt == seat.job.prompt]
        tallies = [tally, *(AnswerTally() for _ in twins)]
        return _Forward(
            lane, [seat, *twins], [fed] * len(tallies), logits.expand(len(tallies), -1), tallies, True, twins
        )

    def _run(self, tokens: torch.Tensor, lane: Lane, seats: Sequence[_Seat]) -> tuple[torch.Tensor, RowTally]:
        """`Trunk.forward`, a row of tokens [B, Q] for each seat; rows that cannot be computed become jobs that wait."""
        try:
            return self._trunk.forward(tokens, lane)
        except ExpertsMissing as missing:
            waiting = {seats[row // tokens.shape[1]].job.id for row in missing.rows}
            raise JobsWait(missing, sorted(waiting)) from missing

    def _check_logits(self, forward: _Forward) -> None:
        for row in bad_rows(forward.logits):
            job = forward.seats[row].job
            raise BadLogits(
                f"the model's logits for job {job.id} at position {forward.fed[row]} are not finite", job_id=job.id
            )

    def _choose(self, forward: _Forward) -> list[tuple[int, TokenScores | None]]:
        """The next token of each seat with its scores; changes nothing."""
        if not forward.gives_tokens:
            return []
        jobs = [seat.job for seat in forward.seats]
        options = [job.sampling for job in jobs]
        draws = [uniform(seat.seed, len(seat.answer)) for seat in forward.seats]
        logits = shift(forward.logits, options, [seat.counts for seat in forward.seats])
        tokens = choose(forbid(logits, self._allowed(jobs)), options, draws)
        scores: dict[int, TokenScores] = {}
        asked = [row for row, job in enumerate(jobs) if job.top_logprobs is not None]
        if asked:
            tops = [jobs[row].top_logprobs or 0 for row in asked]
            scores = dict(zip(asked, score(forward.logits[asked], [tokens[row] for row in asked], tops), strict=True))
        return [(token, scores.get(row)) for row, token in enumerate(tokens)]

    def _allowed(self, jobs: Sequence[Job]) -> dict[int, torch.Tensor]:
        masks: dict[int, torch.Tensor] = {}
        for row, job in enumerate(jobs):
            if job.constraint is not None:
                try:
                    masks[row] = job.constraint.allowed(self._trunk.vocab_size)
                except UsageError as error:
                    raise ConstraintFailed(error, job_id=job.id) from error
        return masks

    def _commit(self, forward: _Forward, chosen: Sequence[tuple[int, TokenScores | None]]) -> list[StepToken]:
        for seat, fed, tally in zip(forward.seats, forward.fed, forward.tallies, strict=True):
            seat.fed = fed
            seat.tally = _add(seat.tally, tally)
        for twin in forward.twins:
            self._cache.copy(forward.seats[0].slot, twin.slot, twin.fed)
        if not forward.gives_tokens:
            return []
        return [self._take(seat, *each) for seat, each in zip(forward.seats, chosen, strict=True)]

    def _take(self, seat: _Seat, token: int, scores: TokenScores | None) -> StepToken:
        seat.answer.append(token)
        seat.counts[token] += 1
        if seat.job.constraint is not None:
            seat.job.constraint.take(token)
        finished = self._finish_reason(seat, token)
        if finished is not None:
            self._running.pop(seat.job.id, None)
            self._release(seat)
        elif len(seat.answer) == 1:
            self._joining.remove(seat)
            self._running[seat.job.id] = seat
        return StepToken(seat.job.id, token, finished, seat.tally, not _is_end(seat.job, token), scores)

    def _finish_reason(self, seat: _Seat, token: int) -> FinishReason | None:
        job = seat.job
        if _is_end(job, token) or (job.constraint is not None and job.constraint.ended):
            return FinishReason.STOP
        is_full = len(job.prompt) + len(seat.answer) >= self.context
        return FinishReason.LENGTH if is_full or len(seat.answer) >= job.max_tokens else None

    def _release(self, seat: _Seat) -> None:
        if seat in self._joining:
            self._joining.remove(seat)
        # One position, one chunk or the prompt beyond `fed` may have been written by a forward that then failed.
        written = min(max(seat.fed + self._prefill_chunk, len(seat.job.prompt)), self.context)
        self._cache.clear(seat.slot, written)
        self._free.append(seat.slot)

    def check(self, job: Job) -> None:
        if job.id in self._running or job.id in self._paused or any(seat.job.id == job.id for seat in self._joining):
            raise BugError(f"job {job.id} joined twice")
        if not 1 <= len(job.prompt) < self.context:
            raise UsageError(
                f"the prompt has {len(job.prompt)} tokens; with at least one token of answer it must fit into "
                f"the context of {self.context}",
                param="prompt",
                code="context_length_exceeded",
            )
        if job.max_tokens < 1:
            raise UsageError(f"max_tokens is {job.max_tokens}, expected at least 1", param="max_tokens")
        wrong = next((token for token in job.prompt if not 0 <= token < self._trunk.vocab_size), None)
        if wrong is not None:
            raise UsageError(
                f"prompt token {wrong} is not in the vocabulary of {self._trunk.vocab_size}", param="prompt"
            )
        wrong = next((token for token, _ in job.sampling.logit_bias if token >= self._trunk.vocab_size), None)
        if wrong is not None:
            raise UsageError(
                f"logit_bias names token {wrong}, the vocabulary has {self._trunk.vocab_size}", param="logit_bias"
            )


def _is_end(job: Job, token: int) -> bool:
    return token in job.end_tokens and not job.ignore_end


def _sum_rows(rows: RowTally, first: int, end: int) -> AnswerTally:
    return AnswerTally(
        local_pairs=int(sum(rows.local[first:end])),
        remote_pairs=int(sum(rows.remote[first:end])),
        fallbacks=int(sum(rows.fallback[first:end])),
        hedges=int(sum(rows.hedged[first:end])),
    )


def _add(left: AnswerTally, right: AnswerTally) -> AnswerTally:
    return AnswerTally(
        left.local_pairs + right.local_pairs,
        left.remote_pairs + right.remote_pairs,
        left.fallbacks + right.fallbacks,
        left.hedges + right.hedges,
    )
