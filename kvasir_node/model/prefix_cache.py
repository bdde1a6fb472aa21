"""Which slots are free, which tokens each slot holds, and where a new prompt finds its beginning already computed.

It does not know tensors or requests: it keeps the books, the engine copies and clears. A slot that was given back
keeps what it holds until another request takes it, the longest unused first; what a slot holds is compared token by
token, so a wrong hit cannot happen. Bounded by the slots: nothing is kept beside them.

A sequence with recurrent states (convolutions, gated delta nets, mamba) can be taken up only where its states stand,
which is at its end: `whole` allows no other hit. Shorter beginnings of such models are computed again, because states
are as large as thousands of keys, and to keep more of them would take the place of slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

REUSE_MIN_TOKENS = 16  # fewer are computed about as fast as they are copied
_BLOCK = 64  # tokens compared at once


@dataclass(frozen=True, slots=True)
class Refill:
    """What to do with a slot before its new sequence goes on.

    Its first `length` positions are those of `source` (perhaps the slot itself); those from there up to `dirty` are
    leftovers of another sequence, as are the states unless `length` is greater than 0. `tokens`: what the slot holds
    from now on, to which its owner appends.
    """

    source: int
    length: int
    dirty: int
    tokens: list[int]


class PrefixCache:
    """`reuses` False: a slot that is given back holds nothing any more."""

    def __init__(self, slots: int, *, reuses: bool, whole: bool) -> None:
        self._reuses = reuses
        self._whole = whole
        self._held: list[list[int]] = [[] for _ in range(slots)]
        self._dirty = [0] * slots  # positions that may not be zero
        self._free: dict[int, None] = dict.fromkeys(range(slots))  # longest unused first

    @property
    def free_count(self) -> int:
        return len(self._free)

    def take(self, prompt: Sequence[int]) -> int:
        """A free slot for a prompt; what it holds stays in use until `refill`.

        The one that would lose least of what it holds, when it holds a beginning of the prompt and little else; else an
        empty one, the lowest first, because neighbouring slots are read without a copy; else the longest unused.
        """
        wanted = list(prompt)
        found = [(self._hit(slot, wanted), slot) for slot in self._free]
        length, best = max(found)
        if not length or length < 0.75 * len(self._held[best]):
            empty = [slot for slot in self._free if not self._held[slot]]
            best = min(empty) if empty else next(iter(self._free))
        del self._free[best]
        return best

    def refill(self, slot: int, prompt: Sequence[int]) -> Refill:
        """Gives a taken slot the longest beginning of the prompt that any slot holds, all of it but the last token at
        most: something must be computed to know what comes next."""
        wanted = list(prompt)
        length, is_own, source = max((self._hit(each, wanted), each == slot, each) for each in range(len(self._held)))
        if not length:
            return self.replace(slot, slot, [])
        if source in self._free and not is_own:
            self._free[source] = self._free.pop(source)  # used just now
        return self.replace(slot, source, wanted[:length])

    def gains(self, prompt: Sequence[int], coming: Sequence[tuple[int, Sequence[int]]]) -> bool:
        """Whether `refill` will find enough more of a prompt to wait for it, once slots hold the tokens that are
        `coming`: (slot, its next tokens)."""
        if not self._reuses:
            return False
        wanted = list(prompt)
        most = max((self._soon(slot, tokens, wanted) for slot, tokens in coming), default=0)
        if most < REUSE_MIN_TOKENS:
            return False
        return most >= REUSE_MIN_TOKENS + max(self._hit(each, wanted) for each in range(len(self._held)))

    def _soon(self, slot: int, tokens: Sequence[int], wanted: list[int]) -> int:
        held = self._held[slot]
        length = _common(held, wanted)
        if length == len(held):
            length += _common(list(tokens), wanted[length:])
        return min(length, len(wanted) - 1)

    def replace(self, slot: int, source: int, tokens: list[int]) -> Refill:
        """As `refill`, with `tokens` of which all lie in the source."""
        refill = Refill(source, len(tokens), self._dirty[slot], tokens)
        is_known = source == slot or len(self._held[source]) >= len(tokens)  # else the source was forgotten meanwhile
        self._held[slot] = tokens if is_known else []
        self._dirty[slot] = len(tokens)
        return refill

    def wrote(self, slot: int, length: int) -> None:
        """Positions up to `length` may be written now."""
        self._dirty[slot] = max(self._dirty[slot], length)

    def give_back(self, slot: int, *, keeps: bool) -> None:
        """The slot is free; what it holds may be copied by others unless `keeps` is False."""
        if not (keeps and self._reuses):
            self._held[slot] = []
        self._free[slot] = None

    def forget(self) -> None:
        """Nothing that was computed so far is given to others. Who computes goes on appending to its own list."""
        self._held = [[] for _ in self._held]

    def _hit(self, slot: int, wanted: list[int]) -> int:
        held = self._held[slot]
        if not self._reuses or (self._whole and len(held) >= len(wanted)):
            return 0
        length = min(_common(held, wanted), len(wanted) - 1)
        return length if length >= REUSE_MIN_TOKENS and (length == len(held) or not self._whole) else 0


def _common(left: list[int], right: list[int]) -> int:
    """How many first tokens are the same."""
    most = min(len(left), len(right))
    start = 0
    while start < most and left[start : start + _BLOCK] == right[start : start + _BLOCK]:
        start += _BLOCK
    while start < most and left[start] == right[start]:
        start += 1
    return min(start, most)
