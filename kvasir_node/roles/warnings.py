"""A node's warnings: their words for people, and the telling of it when they change. It does not know what is wrong."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

import trio

from kvasir_node.base.events import Tell, WarningsChanged
from kvasir_node.base.ids import PeerId
from kvasir_node.base.settings import ComputeSettings

LOOK_INTERVAL_S = 1.0  # whether they changed
_PEER_ID = r"\b12D3KooW[1-9A-HJ-NP-Za-km-z]{44}\b"  # of an Ed25519 key, which all peers here have


def for_people(warnings: Iterable[str], name_of: Callable[[PeerId], str]) -> tuple[str, ...]:
    """Names instead of peer ids, and addresses without them."""
    shorter = (re.sub(rf"/p2p/{_PEER_ID}", "", warning) for warning in warnings)
    return tuple(re.sub(_PEER_ID, lambda match: name_of(PeerId(match[0])), warning) for warning in shorter)


def emulations(compute: ComputeSettings) -> list[str]:
    """A node that pretends to be slower or farther than it is says so."""
    found: list[str] = []
    if compute.slowdown > 1:
        found.append(f"emulated device: computes {compute.slowdown:g} times slower than it could (compute.slowdown)")
    if compute.answer_delay_s > 0:
        delay_ms = compute.answer_delay_s * 1000
        found.append(f"emulated distance: answers are held back {delay_ms:g} ms (compute.answer_delay_s)")
    return found


async def tell_changes(warnings: Callable[[], tuple[str, ...]], tell: Tell) -> None:
    """For ever."""
    told: tuple[str, ...] = ()
    while True:
        current = warnings()
        if current != told:
            told = current
            tell(WarningsChanged(current))
        await trio.sleep(LOOK_INTERVAL_S)
