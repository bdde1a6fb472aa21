"""Scenes and costs for tests of planning: small worlds in which what is right can be worked out."""

from collections.abc import Mapping, Sequence

from kvasir_node.base.ids import PeerId, SliceId
from kvasir_node.decide.costs import Costs, OwnCosts, WorkerCosts
from kvasir_node.decide.prediction import Scene

NAMES = tuple(PeerId(name) for name in ("ann", "bob", "cyd", "dan", "eve", "fay", "gil", "hal"))

M_LIKE = OwnCosts(
    trunk_s=7e-3, trunk_row_s=6e-4, layer_s=5e-5, expert_s=2.3e-4, pair_s=1.4e-5, call_s=3e-4, borrow_s=0.05
)
"""The bench model M on one core: 12 layers of 64 experts, 8 chosen (docs/log.md)."""

S_LIKE = OwnCosts(
    trunk_s=3.5e-3, trunk_row_s=2.5e-4, layer_s=5e-5, expert_s=3.4e-5, pair_s=5e-6, call_s=4e-4, borrow_s=0.01
)
"""The bench model S on one core: 8 layers of 32 experts, 4 chosen."""


def scene(
    layers: int,
    experts: int,
    chosen: int,
    workers: int,
    *,
    row_bytes: int = 2048,
    heat: Mapping[int, Sequence[float]] | None = None,
    missing: Sequence[int] = (),
    proven: Sequence[tuple[PeerId, SliceId]] | None = None,
) -> Scene:
    """All is held here but `missing`, and every worker is proven for everything unless told otherwise."""
    everything = [(peer, SliceId(layer, 0, experts - 1)) for layer in range(layers) for peer in NAMES[:workers]]
    return Scene(
        layers=tuple(range(layers)),
        experts=experts,
        chosen=chosen,
        row_bytes=row_bytes,
        held={layer: frozenset(range(experts)).difference(missing) for layer in range(layers)},
        proven=everything if proven is None else proven,
        heat={} if heat is None else heat,
    )


def like(own: OwnCosts, *, slower: float = 1.0, rtt_s: float = 3e-4, bytes_s: float = 1e9) -> WorkerCosts:
    """A worker that computes `slower` times as slowly as we do, at that distance."""
    return WorkerCosts(
        rtt_s=rtt_s,
        call_s=slower * own.layer_s,
        expert_s=slower * own.expert_s,
        pair_s=slower * own.pair_s,
        sent_byte_s=1 / bytes_s,
        received_byte_s=1 / bytes_s,
    )


def costs(own: OwnCosts, *workers: WorkerCosts) -> Costs:
    return Costs(own, dict(zip(NAMES, workers, strict=False)))
