"""What guests are given, and what they never count as. A guest is a web page on somebody's phone (wire/guest_pass).

It does not know codes, passes or pages. Whether a worker is a guest is told by how it proved its membership, so no
worker can claim to be one, or not to be. A phone sleeps, leaves and comes back as its owner pleases; therefore:

- it is never the only copy: a slice that its coordinator lacks is given to guests only when other workers have proven
  as many copies as are always wanted, and their own copies come on top;
- it carries load only for what its coordinator holds, or another worker has proven, too;
- it gets few layers, each as whole as its memory allows, since each costs a round trip per token: as many as it can
  answer within a share of what a token may take.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from kvasir_node.base.ids import PeerId, SliceId

TOKEN_SHARE = 0.5  # of what all layers of a token may take beyond computing here, one guest may use so much


def copies_wanted(always: int, surge: int, others: int, guests: int) -> int:
    """How many copies of a slice to ask for: `always` of workers that are no guests, and `surge` more of anybody.

    `others` and `guests` have proven one. While others are too few, guests' copies do not fill their places.
    """
    return always + (surge if others >= always else max(surge, guests))


def kept_slices(
    always: Collection[SliceId], copies: int, proven: Iterable[tuple[PeerId, SliceId]], guests: Collection[PeerId]
) -> frozenset[SliceId]:
    """Of the slices that always want `copies`, those that workers other than guests have not filled."""
    others = dict.fromkeys(always, 0)
    for peer, part in proven:
        if part in others and peer not in guests:
            others[part] += 1
    return frozenset(part for part, count in others.items() if count < copies)


def carriers(
    proven: Sequence[tuple[PeerId, SliceId]], missing: Collection[SliceId], guests: Collection[PeerId]
) -> tuple[tuple[PeerId, SliceId], ...]:
    """Those that may carry load: a guest only for a slice that is held here, or that another worker has proven."""
    safe = {part for peer, part in proven if peer not in guests}
    return tuple((peer, part) for peer, part in proven if peer not in guests or part in safe or part not in missing)


def layers_for(call_s: float | None, near_rtt_s: float, layers: int, most: int) -> int:
    """How many layers a guest may serve for one coordinator, at least one.

    `call_s` = what it has measured a call to take, None = not yet; `near_rtt_s` = what a token may take more, divided
    by the `layers` of the model that are wanted.
    """
    if call_s is None or call_s <= 0:
        return 1
    return max(1, min(most, int(TOKEN_SHARE * near_rtt_s * layers / call_s)))
