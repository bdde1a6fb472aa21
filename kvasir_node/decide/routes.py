"""What becomes of routes in force at once when the world changes, before anything is planned anew.

It does not know costs or gains: all here is exact and quick. Routes that nothing has to leave come back as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from kvasir_node.base.ids import PeerId, SliceId
from kvasir_node.decide.prediction import Routes

Row = tuple[PeerId | None, ...]


def without_unproven(routes: Routes, proven: Collection[tuple[PeerId, SliceId]]) -> Routes:
    """An expert whose peer is not proven for it (any more) is computed here."""
    able: dict[tuple[PeerId, int], set[int]] = {}
    for peer, part in proven:
        able.setdefault((peer, part.layer), set()).update(range(part.first, part.last + 1))
    nothing: set[int] = set()
    return _each(
        routes,
        lambda layer, row: tuple(
            peer if peer is not None and index in able.get((peer, layer), nothing) else None
            for index, peer in enumerate(row)
        ),
    )


def at_home(routes: Routes, held: Mapping[int, Collection[int]]) -> Routes:
    """Law 2: what is held here stays here."""
    return _each(
        routes,
        lambda layer, row: tuple(None if index in held.get(layer, ()) else peer for index, peer in enumerate(row)),
    )


def shares_held(routes: Routes, held: Mapping[int, Collection[int]]) -> int:
    """Layers of which a peer computes what is held here."""
    return sum(
        any(peer is not None and index in held.get(layer, ()) for index, peer in enumerate(row))
        for layer, row in routes.items()
    )


def _each(routes: Routes, change: Callable[[int, Row], Row]) -> Routes:
    """Each layer that has a peer, changed; `routes` itself when that changes nothing."""
    changed = {layer: row if all(peer is None for peer in row) else change(layer, row) for layer, row in routes.items()}
    return routes if changed == routes else changed
