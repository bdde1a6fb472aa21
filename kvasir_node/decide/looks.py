"""Looks: now and then a forward is split while fan-out is off, so that it is known what calls cost now.

It does not know rows, clocks or who deserves load. While fan-out is off nothing is sent to workers, and what is
believed of them stays what it was when they were timed last: perhaps in a trial, while they still loaded. The governor
would say no for minutes because of that. A look is split as if something had to be shared, with one worker at a time:
who seems slow beside others would get nothing otherwise, and seem slow for ever. It goes on through all layers, as the
first calls cost up to three times what the next ones do (whoever was not called lately sleeps, and caches are cold),
but ends with the layer in which it has become dear: where workers are far, with the first.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from kvasir_node.base.ids import PeerId
from kvasir_node.decide.costs import Costs, WorkerCosts
from kvasir_node.decide.dealing import Dealings, fixed
from kvasir_node.decide.planner import shared_anyway
from kvasir_node.decide.prediction import CALL_BYTES, PAIR_BYTES, Scene
from kvasir_node.decide.routes import Row

LOOK_RESTS = 100.0  # times as long as a look cost more than computing its layers alone, nobody is looked at
LOOK_PAUSE_S = 0.25  # at least: one that cost nothing tells no more when it is repeated at once
LOOK_LOSS_S = 0.01  # a look that has cost so much more ends


@dataclass(slots=True)
class LookPace:
    """When the next look may be: so that all of them together take about 1 % of the time."""

    _rests_until: float = -math.inf

    def take(self, now: float) -> bool:
        """Whether one may begin now; then nobody else may before LOOK_PAUSE_S."""
        if now < self._rests_until:
            return False
        self._rests_until = now + LOOK_PAUSE_S
        return True

    def took(self, more_s: float, now: float) -> None:
        """A look has taken so many seconds longer than computing its layers alone; less than 0 if shorter."""
        self._rests_until = max(self._rests_until, now + LOOK_RESTS * more_s)


@dataclass(frozen=True, slots=True)
class Look:
    """Whom to look at, and how each layer is split for it: those that are not in `layers` tell nothing."""

    peer: PeerId
    layers: Dealings


def next_look(
    scene: Scene,
    costs: Costs,
    rows: int,
    peers: Collection[PeerId],
    last: PeerId | None,
    *,
    step_s: float,
    bytes_s: float = 0.0,
) -> Look | None:
    """Whom to look at after `last`, of proven `peers` in turn; None when there is nobody.

    `step_s`: a whole step alone. Whose way takes longer than that cannot pay, and would hold up a token by as much.
    `bytes_s`: what may travel in a second, both ways; 0 = no limit.
    """
    order = sorted(
        peer for peer in peers if peer in costs.workers and _way_s(costs.workers[peer], rows, scene) <= step_s
    )
    if not order:
        return None
    peer = order[bisect_right(order, last) % len(order)] if last is not None else order[0]
    alone = replace(scene, proven=tuple(pair for pair in scene.proven if pair[0] == peer))
    shared = shared_anyway(alone, costs, rows)
    routes = {layer: row for layer, row in shared.routes.items() if any(row)}
    many = max(1, len(routes))
    if bytes_s and shared.predicted.bytes_s * shared.predicted.token_s > bytes_s * LOOK_PAUSE_S:
        return Look(peer, {})
    if (shared.predicted.token_s - shared.alone.token_s) / many > step_s:
        routes = {layer: _hottest(row, scene.heat.get(layer, ())) for layer, row in routes.items()}
    return Look(peer, fixed(routes))


def _hottest(row: Sequence[PeerId | None], heat: Sequence[float]) -> Row:
    """Only one expert leaves: of who seems far too slow for more, that tells enough. The hottest one, or nobody would
    want it."""
    away = [index for index, peer in enumerate(row) if peer is not None]
    chosen = max(away, key=lambda index: heat[index]) if len(heat) == len(row) else away[0]
    return tuple(peer if index == chosen else None for index, peer in enumerate(row))


def _way_s(worker: WorkerCosts, rows: int, scene: Scene) -> float:
    """There and back, of a layer's rows with all of their pairs."""
    rows_bytes = CALL_BYTES / 2 + rows * scene.row_bytes
    sent_bytes = rows_bytes + rows * scene.chosen * PAIR_BYTES
    return worker.rtt_s + sent_bytes * worker.sent_byte_s + rows_bytes * worker.received_byte_s
