"""What was measured while the model serves, kept until a plan is made, then put into two books of costs.

It does not know plans, routes or how anything was timed (roles/measured.py). Few rows and thousands of them cost
differently, here and at a worker, so decoding and prompts have a book each; a link is the same for both.

Whoever measures leaves a note and returns at once, from any thread. Notes are read where plans are made, in a thread
of its own: there are thousands of them a minute, and everything on the loop would wait.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from typing import TypeVar

from kvasir_node.base.ids import PeerId
from kvasir_node.decide.costs import CostBook, Costs
from kvasir_node.roles.measured import CallMeasured, ForwardMeasured, LinkMeasured

NOTES_MAX = 2048  # of a kind, between two plans; the eldest make room
TRIP_AGAIN_S = 5.0
TRIPS_MAX = 4096  # peers whose last round trip is remembered


T = TypeVar("T")


class Costing:
    """Implements `measured.Observer`. `decode_rows_max`: a forward of more rows has prompts in it; `chosen` = experts
    of a row and layer; `borrow_s`: see `CostBook`.

    `in_one_lane` is set by whoever sets lanes: forwards beside each other make each other longer, so only those that
    were alone are taken for what things cost.
    """

    def __init__(
        self, *, decode_rows_max: int, chosen: int, borrow_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.in_one_lane = True
        self._decode_rows_max = decode_rows_max
        self._decode_pairs_max = decode_rows_max * chosen
        self._clock = clock
        self._decode, self._prompt = CostBook(borrow_s), CostBook(borrow_s)
        self._forwards: deque[tuple[float, ForwardMeasured]] = deque(maxlen=NOTES_MAX)
        self._calls: deque[tuple[float, CallMeasured | LinkMeasured]] = deque(maxlen=NOTES_MAX)
        self._trips: deque[tuple[float, PeerId, float]] = deque(maxlen=NOTES_MAX)
        self._last_trips: dict[PeerId, tuple[float, float]] = {}  # with when it was taken

    def forward_measured(self, measured: ForwardMeasured) -> None:
        if self.in_one_lane:
            self._forwards.append((self._clock(), measured))

    def call_measured(self, measured: CallMeasured) -> None:
        self._calls.append((self._clock(), measured))

    def link_measured(self, measured: LinkMeasured) -> None:
        self._calls.append((self._clock(), measured))

    def round_trips_measured(self, trips: Mapping[PeerId, float]) -> None:
        """Seconds of the last round trip of each peer. One that is as it was is still the best guess, and is taken
        again now and then, or what is known of the way would fade."""
        now = self._clock()
        last, self._last_trips = self._last_trips, {}
        for peer, took_s in list(trips.items())[:TRIPS_MAX]:
            known_s, known_at = last.get(peer, (-1.0, now))
            is_due = took_s != known_s or now - known_at >= TRIP_AGAIN_S
            if is_due:
                self._trips.append((now, peer, took_s))
            self._last_trips[peer] = (took_s, now if is_due else known_at)

    def costs(self, peers: Collection[PeerId]) -> tuple[Costs, Costs]:
        """Of decoding and of prompts, as of now; of these workers, also of those never heard of. One at a time."""
        self._read()
        now = self._clock()
        return self._decode.costs(now, peers), self._prompt.costs(now, peers)

    def _read(self) -> None:
        for at, forward in _taken(self._forwards):
            self._take_forward(forward, at)
        for at, peer, took_s in _taken(self._trips):
            self._decode.observe_round_trip(peer, took_s, at)
            self._prompt.observe_round_trip(peer, took_s, at)
        for at, call in _taken(self._calls):
            if isinstance(call, LinkMeasured):
                self._take_link(call, at)
            else:
                self._take_call(call, at)

    def _take_link(self, link: LinkMeasured, at: float) -> None:
        for book in (self._decode, self._prompt):
            book.forget_link(link.peer)
            for size, took_s in link.trips:
                book.observe_travel(link.peer, size, size, took_s, at)

    def _take_forward(self, forward: ForwardMeasured, at: float) -> None:
        book = self._decode if forward.rows <= self._decode_rows_max else self._prompt
        book.observe_trunk(forward.rows, forward.trunk_s, at)
        if forward.layer is not None:
            book.observe_layer(forward.layer.activated, forward.layer.pairs, forward.layer.took_s, at)
        if forward.own_call_s is not None:
            book.observe_own_call(forward.own_call_s, at)

    def _take_call(self, call: CallMeasured, at: float) -> None:
        book, other = self._decode, self._prompt
        if call.pairs > self._decode_pairs_max:
            book, other = other, book
        book.observe_call(
            call.peer,
            activated=call.activated,
            pairs=call.pairs,
            sent_bytes=call.sent_bytes,
            received_bytes=call.received_bytes,
            took_s=call.took_s,
            computed_s=call.computed_s,
            now=at,
        )
        if call.computed_s is not None:
            travelled_s = call.took_s - min(call.took_s, call.computed_s)
            other.observe_travel(call.peer, call.sent_bytes, call.received_bytes, travelled_s, at)


def _taken(notes: deque[T]) -> list[T]:
    """All notes up to now, out of the queue; others may be left there meanwhile."""
    return [notes.popleft() for _ in range(len(notes))]
