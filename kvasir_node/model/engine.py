"""Continuous batching: requests join and leave at token boundaries and share each forward.

It does not know tokenizers, text, time or the network, and awaits nothing; one thread at a time may use it. A step
that raises has changed nothing that a later step could see, so it may be repeated.

Where the trunk packs rows of any length, the next token of every running job and chunks of several prompts are one
forward, so weights are read once per step; else prompts are computed one after the other, each in a forward of its own.
"""

from __future__ import annotations

import secrets
from bisect import insort
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait

import torch

from kvasir_node.base.errors import BugError, CapacityError, UsageError
from kvasir_node.base.generation import FinishReason
from kvasir_node.model.cache import Lane
from kvasir_node.model.forwards import Forward, Seat
from kvasir_node.model.jobs import BadLogits, ConstraintFailed, Job, StepToken
from kvasir_node.model.prefix_cache import PrefixCache, Refill
from kvasir_node.model.sampling import TokenScores, bad_rows, choose, forbid, likeliest, score, shift, uniform
from kvasir_node.model.trunk import Trunk

LANES_MAX = 4


class Engine:
    """Up to `slots` jobs of up to `context` tokens each (prompt and answer).

    `lanes` (1 … LANES_MAX, may be set at any time): the running jobs are split into so many forwards, each in a thread
    of its own, so that one of them computes while another waits for experts elsewhere. With 1 there are no threads.
    Packed prompts go with the first one.
    """

    def __init__(
        self, trunk: Trunk, slots: int, context: int, prefill_chunk: int, *, reuses_prefixes: bool = True
    ) -> None:
        if not 1 <= context <= trunk.context_max:
            raise UsageError(f"a context of {context} tokens: the model allows 1 to {trunk.context_max}")
        if slots < 1 or prefill_chunk < 1:
            raise UsageError(f"{slots} slots and prefill chunks of {prefill_chunk} tokens: both must be at least 1")
        self.slots = slots
        self.context = context
        self._lane_count = 1
        self._trunk = trunk
        self._forks: list[Trunk] = []  # for the forwards beside the first one
        self._threads = ThreadPoolExecutor(LANES_MAX, "lane")  # starts none before it is used
        self._prefill_chunk = prefill_chunk
        self._cache = trunk.new_cache(slots, context)
        self._lanes = [self._cache.lane() for _ in range(LANES_MAX)]
        self._prefill_lane = self._cache.lane()  # of a trunk that does not pack
        self._packs = trunk.packs(self._cache)
        # A model whose prompts cannot be computed in parts could not take up a sequence either.
        self._prefixes = PrefixCache(
            slots, reuses=reuses_prefixes and trunk.splits_prompts, whole=bool(self._cache.states)
        )
        self._joining: deque[Seat] = deque()  # at most `slots`, as every seat has a slot
        self._running: dict[int, Seat] = {}
        self._in_order: list[Seat] = []  # those running, by slot
        self._paused: dict[int, Seat] = {}
        self._is_to_forget = False
        self.prompt_tokens = 0  # of all prompts whose computing has begun
        self.reused_tokens = 0  # of these, those that were found in the cache
        self.rows_computed = 0  # tokens, of answers and prompts; not of steps in which a prompt had its own forward

    @property
    def lanes(self) -> int:
        return self._lane_count

    @lanes.setter
    def lanes(self, count: int) -> None:
        if not 1 <= count <= LANES_MAX:
            raise UsageError(f"{count} lanes: expected 1 to {LANES_MAX}")
        self._lane_count = count

    @property
    def free_slots(self) -> int:
        return self._prefixes.free_count

    @property
    def busy_slots(self) -> int:
        return self.slots - self.free_slots

    @property
    def is_idle(self) -> bool:
        """Nothing to compute: `step` would return at once."""
        return not self._joining and not self._running

    @property
    def is_prefilling(self) -> bool:
        """The next step computes rows of prompts as well."""
        return bool(self._joining)

    def join(self, job: Job) -> None:
        """Gives the job a slot; its prompt is computed by the next steps.

        Raises CapacityError when no slot is free, UsageError when it can never fit.
        """
        self.check(job)
        if not self.free_slots:
            raise CapacityError(f"all {self.slots} slots are busy")
        seed = secrets.randbits(64) if job.sampling.seed is None else job.sampling.seed
        self._joining.append(Seat(job, self._prefixes.take(job.prompt), seed, job.is_plain))

    def leave(self, job_id: int) -> None:
        """Ends a job and frees its slot; does nothing for one that has ended already."""
        seat = self._paused.pop(job_id, None) or self._stop(job_id)
        if seat is not None:
            self._release(seat)

    def pause(self, job_id: int) -> None:
        """Leaves a job out of the steps until `resume`; it keeps its slot and what was computed of it."""
        seat = self._stop(job_id)
        if seat is not None:
            self._paused[job_id] = seat

    def resume(self, job_id: int) -> None:
        """Lets a paused job go on; does nothing for another one."""
        seat = self._paused.pop(job_id, None)
        if seat is None:
            return
        if seat.answer:
            self._start(seat)
        else:
            self._joining.append(seat)

    def forget(self) -> None:
        """From the next step on, nothing that was computed so far is copied to another request. Any thread may call."""
        self._is_to_forget = True

    @torch.inference_mode()
    def step(self) -> list[StepToken]:
        """One token for every running job, and up to `prefill_chunk` tokens of prompts, those that came first first.

        Raises BadLogits or ConstraintFailed that name a job, JobsWait for jobs that should be paused, or whatever the
        expert dispatch raises.
        """
        if self._is_to_forget:
            self._is_to_forget = False
            self._prefixes.forget()
        forwards = self._packed() if self._packs else self._separate()
        self._compute(forwards)
        for forward in forwards:
            self._check_logits(forward)
        chosen = [self._choose(forward) for forward in forwards]
        for forward in forwards:
            forward.lane.commit()
        tokens = [token for each in zip(forwards, chosen, strict=True) for token in self._commit(*each)]
        if all(forward.lane is not self._prefill_lane for forward in forwards):
            self.rows_computed += sum(len(each) for forward in forwards for each in forward.tokens)
        return tokens

    def _shares(self) -> list[list[Seat]]:
        """The running jobs by lane: neighbours together, because neighbouring slots are read without a copy."""
        seats = self._in_order
        lanes = min(self._lane_count, len(seats))
        if lanes <= 1:
            return [seats] * lanes
        return [seats[len(seats) * lane // lanes : len(seats) * (lane + 1) // lanes] for lane in range(lanes)]

    def _packed(self) -> list[Forward]:
        """A forward for each lane."""
        shares, chunks = self._shares(), self._chunks()
        if not shares:
            return [self._forward(self._lanes[0], [], chunks)] if chunks else []
        lanes = zip(self._lanes, shares, strict=False)
        return [self._forward(lane, seats, () if number else chunks) for number, (lane, seats) in enumerate(lanes)]

    def _separate(self) -> list[Forward]:
        """A forward for each lane, and one for the prompt that came first."""
        forwards = [self._forward(lane, seats) for lane, seats in zip(self._lanes, self._shares(), strict=False)]
        if self._joining:
            seat = self._joining[0]
            size = self._prefill_chunk if self._trunk.splits_prompts else len(seat.job.prompt)
            forwards.append(self._forward(self._prefill_lane, [], [(seat, self._chunk(seat, size))]))
        return forwards

    def _chunks(self) -> list[tuple[Seat, list[int]]]:
        """Tokens of prompts for one forward. The first prompt may take all the room."""
        chunks: list[tuple[Seat, list[int]]] = []
        room = self._prefill_chunk
        for seat in self._joining:
            if not room:
                break
            if not self._is_coming(seat, chunks):
                chunk = self._chunk(seat, room)
                chunks.append((seat, chunk))
                room -= len(chunk)
        return chunks

    def _is_coming(self, seat: Seat, chunks: Sequence[tuple[Seat, list[int]]]) -> bool:
        """Whether these chunks of others are what the seat needs as well, so that it should wait and copy."""
        if any(other.job.prompt == seat.job.prompt for other, _ in chunks):
            return True
        return not seat.is_filled and self._prefixes.gains(seat.job.prompt, [(each.slot, new) for each, new in chunks])

    def _chunk(self, seat: Seat, size: int) -> list[int]:
        """The next tokens of a prompt. Before the first of them, what others have computed of it is copied."""
        prompt = seat.job.prompt
        if not seat.is_filled:
            self._fill(seat, self._prefixes.refill(seat.slot, prompt))
        return list(prompt[len(seat.fed) : len(seat.fed) + size])

    def _forward(self, lane: Lane, running: Sequence[Seat], chunks: Sequence[tuple[Seat, list[int]]] = ()) -> Forward:
        seats = [*running, *(seat for seat, _ in chunks)]
        tokens = [*(seat.answer[-1:] for seat in running), *(chunk for _, chunk in chunks)]
        slots, starts = [seat.slot for seat in seats], [len(seat.fed) for seat in seats]
        if self._packs:
            lane.begin_packed(slots, starts, [len(each) for each in tokens])
        else:
            lane.begin(slots, starts, len(tokens[0]))
        rows = list(range(len(running)))
        twins: list[tuple[Seat, Seat]] = []
        twin_rows: list[int] = []
        for row, (seat, chunk) in enumerate(chunks, len(running)):
            prompt = seat.job.prompt
            if len(seat.fed) + len(chunk) == len(prompt):
                rows.append(row)
                found = [(other, seat) for other in self._joining if other is not seat and other.job.prompt == prompt]
                twins += found
                twin_rows += [row] * len(found)
        answering = [*(seats[row] for row in rows), *(twin for twin, _ in twins)]
        return Forward(lane, seats, tokens, self._packs, answering, rows + twin_rows, twins)

    def _fill(self, seat: Seat, refill: Refill) -> None:
        if refill.dirty > refill.length or not refill.length:
            self._cache.clear(seat.slot, refill.length, refill.dirty)
        if refill.source != seat.slot:
            self._cache.copy(refill.source, seat.slot, refill.length)
        seat.fed, seat.is_filled = refill.tokens, True
        seat.tally = seat.tally._replace(reused_tokens=refill.length)
        self.prompt_tokens += len(seat.job.prompt)
        self.reused_tokens += refill.length

    def _compute(self, forwards: Sequence[Forward]) -> None:
        """All of them, at the same time if there are lanes; ends when none is under way any more."""
        if self._lane_count == 1 or len(forwards) <= 1:
            for forward in forwards:
                forward.run(self._trunk)
            return
        while len(self._forks) < len(forwards) - 1:
            self._forks.append(self._trunk.fork())
        others = [
            self._threads.submit(forward.run, fork) for fork, forward in zip(self._forks, forwards[1:], strict=False)
        ]
        try:
            forwards[0].run(self._trunk)
        finally:
            wait(others)
        for other in others:
            other.result()

    def _check_logits(self, forward: Forward) -> None:
        for row in bad_rows(forward.logits):
            seat = forward.seats[row]
            seat.is_poisoned = True
            raise BadLogits(
                f"the model's logits for job {seat.job.id} at position {len(seat.fed) + len(forward.tokens[row])} are "
                "not finite",
                job_id=seat.job.id,
            )

    def _choose(self, forward: Forward) -> list[tuple[int, TokenScores | None]]:
        """The next token of each seat that answers, with its scores; changes nothing."""
        seats, rows = forward.answering, forward.logit_rows
        if not seats:
            return []
        if all(seat.is_plain for seat in seats):
            tokens = likeliest(forward.logits)
            return [(tokens[row], None) for row in rows]
        logits = forward.logits if forward.answers_all else forward.logits[list(rows)]
        jobs = [seat.job for seat in seats]
        options = [job.sampling for job in jobs]
        draws = [uniform(seat.seed, len(seat.answer)) if seat.job.sampling.temperature > 0 else 0.0 for seat in seats]
        shifted = shift(logits, options, [seat.counts for seat in seats])
        tokens = choose(forbid(shifted, self._allowed(jobs)), options, draws)
        scores: dict[int, TokenScores] = {}
        asked = [row for row, job in enumerate(jobs) if job.top_logprobs is not None]
        if asked:
            tops = [jobs[row].top_logprobs or 0 for row in asked]
            scores = dict(zip(asked, score(logits[asked], [tokens[row] for row in asked], tops), strict=True))
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

    def _commit(self, forward: Forward, chosen: Sequence[tuple[int, TokenScores | None]]) -> list[StepToken]:
        forward.take_tokens()
        for twin, source in forward.twins:
            self._prefixes.wrote(twin.slot, self._written(twin))
            self._fill(twin, self._prefixes.replace(twin.slot, source.slot, list(twin.job.prompt)))
        return [self._take(*each) for each in zip(forward.answering, chosen, strict=True)]

    def _take(self, seat: Seat, chosen: tuple[int, TokenScores | None]) -> StepToken:
        (token, scores), job = chosen, seat.job
        seat.answer.append(token)
        if not seat.is_plain:
            seat.counts[token] += 1
            if job.constraint is not None:
                job.constraint.take(token)
        is_end = token in job.end_tokens and not job.ignore_end
        finished = self._finish_reason(seat, is_end)
        if finished is not None:
            self._stop(job.id)
            self._release(seat)
        elif len(seat.answer) == 1:
            self._joining.remove(seat)
            self._start(seat)
        return StepToken(job.id, token, finished, seat.tally, not is_end, scores)

    def _finish_reason(self, seat: Seat, is_end: bool) -> FinishReason | None:
        job = seat.job
        if is_end or (job.constraint is not None and job.constraint.ended):
            return FinishReason.STOP
        is_full = len(job.prompt) + len(seat.answer) >= self.context
        return FinishReason.LENGTH if is_full or len(seat.answer) >= job.max_tokens else None

    def _start(self, seat: Seat) -> None:
        self._running[seat.job.id] = seat
        insort(self._in_order, seat, key=lambda other: other.slot)

    def _stop(self, job_id: int) -> Seat | None:
        """Takes a job out of the steps."""
        seat = self._running.pop(job_id, None)
        if seat is not None:
            self._in_order.remove(seat)
            return seat
        seat = next((each for each in self._joining if each.job.id == job_id), None)
        if seat is not None:
            self._joining.remove(seat)
        return seat

    def _release(self, seat: Seat) -> None:
        if seat.is_filled:
            self._prefixes.wrote(seat.slot, self._written(seat))
        self._prefixes.give_back(seat.slot, keeps=not seat.is_poisoned)

    def _written(self, seat: Seat) -> int:
        """One position, one chunk or the prompt beyond `fed` may have been written by a forward that then failed."""
        return (
            min(max(len(seat.fed) + self._prefill_chunk, len(seat.job.prompt)), self.context) if seat.is_filled else 0
        )

    def check(self, job: Job) -> None:
        joining = [seat.job.id for seat in list(self._joining)]  # a copy: a step may take one out meanwhile
        if job.id in self._running or job.id in self._paused or job.id in joining:
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
