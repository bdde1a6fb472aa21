"""How many bytes the market's messages take, from the messages themselves.

It does not know when they are sent. Each grows evenly with what it lists, so two sizes of each tell all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvasir_node.base.ids import DAG_CBOR_CODEC, ModelId, PeerId, SliceId, cid_of
from kvasir_node.sim.network import CALL_OVERHEAD_BYTES
from kvasir_node.wire.messages import LeaseVerdict, NoOffer, Offer, Poll, Renewal, Renewals, Verdicts

_MODEL = ModelId(cid_of(b"a model", DAG_CBOR_CODEC))
_PEER = PeerId("12D3KooW" + "A" * 44)
_LEASE = "18f3a2b4c5d.12345"
_FEW, _MANY = 1, 33


def _parts(count: int) -> tuple[tuple[ModelId, SliceId], ...]:
    return tuple((_MODEL, SliceId(number % 48, number, number + 3)) for number in range(count))


def _poll(count: int) -> bytes:
    return Poll(1 << 30, (), tuple(sorted(_parts(count))), ((_PEER, 0.03),)).to_bytes()


def _renewals(count: int) -> bytes:
    leases = (Renewal(_LEASE, model, part, _PEER, serving=True, progress=100) for model, part in _parts(count))
    return Renewals(tuple(leases)).to_bytes()


def _verdicts(count: int) -> bytes:
    return Verdicts((LeaseVerdict(45.0, ""),) * count).to_bytes()


@dataclass(frozen=True, slots=True)
class _Size:
    fixed_bytes: float
    each_bytes: float

    def of(self, count: int) -> float:
        return self.fixed_bytes + self.each_bytes * count


def _measured(spell: Callable[[int], bytes]) -> _Size:
    few, many = len(spell(_FEW)), len(spell(_MANY))
    each = (many - few) / (_MANY - _FEW)
    return _Size(CALL_OVERHEAD_BYTES + few - _FEW * each, each)


POLL = _measured(_poll)
RENEWALS = _measured(_renewals)
VERDICTS = _measured(_verdicts)
_ADDRESSES = ("/ip4/198.51.100.17/tcp/9481/p2p/" + _PEER,) * 2
OFFER_BYTES = CALL_OVERHEAD_BYTES + len(
    Offer(_LEASE, _MODEL, "bfloat16", SliceId(47, 100, 103), _PEER, _ADDRESSES, 45.0).to_bytes()
)
NO_OFFER_BYTES = CALL_OVERHEAD_BYTES + len(NoOffer(123.4).to_bytes())
