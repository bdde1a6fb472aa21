"""Jobs that cannot go on until an expert is there: each waits for it to be fetched, or for a worker that computes it.

It does not know the engine, nor what a job is beyond its number; all others go on meanwhile. Lives on the trio loop.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Protocol

import trio

from kvasir_node.base.errors import KvasirError
from kvasir_node.model.missing import JobsWait


class BringsExperts(Protocol):
    """See roles/missing_experts.py for what each promises."""

    async def bring(self, owner: str, layer: int, experts: Collection[int]) -> None: ...

    def let_go(self, owner: str) -> None: ...


@dataclass(frozen=True, slots=True)
class _Wait:
    layer: int
    experts: frozenset[int]
    scope: trio.CancelScope  # cancelled when the job should try again


class WaitingJobs:
    """`resumed(job)` and `failed(job, error)` hear how each wait ended. Without `missing` nothing can be fetched.

    What was brought for a job stays on the disk until `let_go`: the next experts that it needs must not push it out.
    """

    def __init__(
        self,
        missing: BringsExperts | None,
        *,
        resumed: Callable[[int], None],
        failed: Callable[[int, KvasirError], None],
    ) -> None:
        self._missing = missing
        self._resumed = resumed
        self._failed = failed
        self._waits: dict[int, _Wait] = {}  # at most one for each slot
        self._brought: set[int] = set()  # jobs for which something is kept on the disk

    def __len__(self) -> int:
        return len(self._waits)

    def begin(self, job_id: int, error: JobsWait, nursery: trio.Nursery) -> None:
        """Lets a job wait for what it lacks; it is not waiting yet."""
        if self._missing is None:
            self._failed(job_id, error)
            return
        self._waits[job_id] = wait = _Wait(error.layer, error.experts, trio.move_on_after(math.inf))
        nursery.start_soon(self._wait, self._missing, job_id, wait)

    def covered(self, layer: int, experts: Collection[int]) -> None:
        """These can be computed now, by somebody: who waits for no others tries again."""
        for wait in self._waits.values():
            if wait.layer == layer and wait.experts.issubset(experts):
                wait.scope.cancel()

    def let_go(self, job_id: int) -> None:
        """A job got on, or has ended. Does nothing for one that never waited."""
        wait = self._waits.get(job_id)
        if wait is not None:
            wait.scope.cancel()
        elif job_id in self._brought:
            self._brought.discard(job_id)
            if self._missing is not None:
                self._missing.let_go(_owner(job_id))

    async def _wait(self, missing: BringsExperts, job_id: int, wait: _Wait) -> None:
        self._brought.add(job_id)
        try:
            with wait.scope:
                await missing.bring(_owner(job_id), wait.layer, wait.experts)
        except KvasirError as error:
            del self._waits[job_id]
            self._failed(job_id, error)
            return
        del self._waits[job_id]
        self._resumed(job_id)


def _owner(job_id: int) -> str:
    return f"job {job_id}"
