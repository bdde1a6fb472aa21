"""What happens in a node, as values, and the bounded log that keeps the latest of them.

It does not know who looks. Roles add what happened; a reader has a place of its own in the log and holds nothing up:
one that is slower than events come finds that some are gone, and how many. No prompt and no answer is ever in an event.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any, ClassVar

import trio

EVENT_SCHEMA = "kvasir.event/1"
KEPT_MAX = 1024  # events; at about 300 bytes each


@dataclass(frozen=True, slots=True)
class RequestStarted:
    """A request has a slot, or a place in the queue."""

    type: ClassVar[str] = "request.started"
    request: int  # its number in this node's log, as in an answer's kvasir.request
    prompt_tokens: int
    choices: int
    queued: bool


@dataclass(frozen=True, slots=True)
class RequestEnded:
    """`outcome`: stop, length, tool_calls, cancelled (its client left) or failed."""

    type: ClassVar[str] = "request.ended"
    request: int
    outcome: str
    prompt_tokens: int
    answer_tokens: int
    queue_ms: float
    prefill_ms: float
    decode_ms: float
    local_pairs: int
    remote_pairs: int


@dataclass(frozen=True, slots=True)
class LoadChanged:
    """Whether this coordinator has more work than it can do alone."""

    type: ClassVar[str] = "load.changed"
    state: str  # calm | saturated
    busy: int
    queued: int


@dataclass(frozen=True, slots=True)
class FanoutChanged:
    """Whether workers are used, and why; also when another plan comes into force."""

    type: ClassVar[str] = "fanout.changed"
    on: bool
    reason: str
    predicted_gain: float


@dataclass(frozen=True, slots=True)
class WorkerChanged:
    """What a coordinator holds of one of its workers. A state that lasted less than a quarter of a second may be
    passed over."""

    type: ClassVar[str] = "worker.changed"
    peer_id: str
    name: str
    state: str  # new | trial | proven | suspect | banned | gone
    was: str  # the state before; empty for a newcomer
    slices: int  # that it is attached with
    reason: str  # of its last failure, or empty


@dataclass(frozen=True, slots=True)
class DemandChanged:
    """What this coordinator asks of the market."""

    type: ClassVar[str] = "demand.changed"
    model: str
    slices: int  # of which copies are wanted
    copies: int
    proven: int  # of these


@dataclass(frozen=True, slots=True)
class LeasesChanged:
    """What this hub keeps the books of."""

    type: ClassVar[str] = "leases.changed"
    coordinators: int
    leases: int
    open_copies: int  # wanted, neither proven nor leased


@dataclass(frozen=True, slots=True)
class LendingChanged:
    """What this node's worker does."""

    type: ClassVar[str] = "lending.changed"
    state: str  # idle | fetching | loading | trial | serving | draining | paused
    leases: int
    reason: str  # why it drains or is paused


@dataclass(frozen=True, slots=True)
class WarningsChanged:
    """All warnings that hold from now on."""

    type: ClassVar[str] = "warnings.changed"
    warnings: tuple[str, ...]


Happening = (
    RequestStarted
    | RequestEnded
    | LoadChanged
    | FanoutChanged
    | WorkerChanged
    | DemandChanged
    | LeasesChanged
    | LendingChanged
    | WarningsChanged
)
"""All there is: a closed list."""

Tell = Callable[[Happening], None]
"""Takes note of what happened; on the loop, and it never waits."""


def tell_nobody(happening: Happening) -> None:
    """For roles that nobody watches."""


@dataclass(frozen=True, slots=True)
class Event:
    """`number` counts from 1 in the life of a process; `at` is seconds since 1970."""

    number: int
    at: float
    what: Happening

    def to_json(self, life: str) -> dict[str, Any]:
        head = {"schema": EVENT_SCHEMA, "id": f"{life}-{self.number}", "at": round(self.at, 3), "type": self.what.type}
        return head | asdict(self.what)


class EventLog:
    """The latest events of one process. All of it is of the loop. `life` tells two processes of one node apart."""

    def __init__(self, *, wall: Callable[[], float] = time.time, kept_max: int = KEPT_MAX) -> None:
        self._wall = wall
        self._kept: deque[Event] = deque(maxlen=kept_max)
        self._news = trio.Event()
        self.life = f"{int(wall() * 1000):x}"
        self.last = 0  # number of the newest

    def add(self, what: Happening) -> None:
        self.last += 1
        self._kept.append(Event(self.last, self._wall(), what))
        self._news.set()
        self._news = trio.Event()

    def lost_after(self, number: int) -> int:
        """How many events after that one are not kept any more."""
        return max(0, self.last - len(self._kept) - number)

    def after(self, number: int, most: int) -> Sequence[Event]:
        """The oldest `most` of those kept that came after event `number`."""
        skipped = max(0, number - (self.last - len(self._kept)))
        return tuple(islice(self._kept, skipped, skipped + most))

    async def wait_after(self, number: int) -> None:
        """Returns when there is one after event `number`. Cancel-safe."""
        while self.last <= number:
            await self._news.wait()
