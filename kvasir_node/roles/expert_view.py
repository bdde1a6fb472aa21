"""Where each expert of a coordinator's model is computed now, and how much it is used, as columns to be shown.

It does not know how any of that comes about. Cheap enough to be asked for every second: a model of 48 layers of 128
experts takes a few milliseconds.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from kvasir_node.base.ids import PeerId, SliceId
from kvasir_node.base.snapshot import ExpertLayerSnapshot
from kvasir_node.decide.prediction import Routes

HELD, MAPPED, WORKER, NOWHERE = "h", "m", "w", "."
USE_MAX = 100


def expert_layers(
    heat: Mapping[int, Sequence[float]],
    held: Mapping[int, Collection[int]],
    on_disk: Mapping[int, Collection[int]],
    routes: Routes,
    proven: Collection[tuple[PeerId, SliceId]],
) -> tuple[ExpertLayerSnapshot, ...]:
    """`heat` by layer says which layers and experts there are; `routes` are those of decoding."""
    hottest = max((max(row, default=0.0) for row in heat.values()), default=0.0)
    scale = USE_MAX / hottest if hottest > 0 else 0.0
    copies = {layer: [0] * len(row) for layer, row in heat.items()}
    for _, part in proven:
        layer = copies[part.layer]
        for index in range(part.first, part.last + 1):
            layer[index] += 1
    return tuple(
        ExpertLayerSnapshot(
            layer,
            tuple(round(value * scale) for value in row),
            _where(len(row), held.get(layer, ()), on_disk.get(layer, ()), routes.get(layer, ())),
            tuple(copies[layer]),
        )
        for layer, row in heat.items()
    )


def _where(count: int, held: Collection[int], on_disk: Collection[int], route: Sequence[PeerId | None]) -> str:
    here = [HELD if index in held else MAPPED if index in on_disk else NOWHERE for index in range(count)]
    for index, peer in enumerate(route):
        if peer is not None:
            here[index] = WORKER
    return "".join(here)
