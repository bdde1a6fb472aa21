"""What all running requests must remember, in pre-allocated pools with a slot for each request.

It does not know requests, tokens or which model computes. `SlotCache` owns the pools; a `Lane` aims one forward at some
of the slots, and is what the layers call as they would call transformers' own cache. Several forwards may be under way
at once, each in a thread of its own with a lane of its own, as long as no slot is in two of them.

Attention layers keep keys and values (for MLA: latents) of every position; convolutions, gated delta nets and mamba
keep a state that each token replaces. Writing keys again is harmless, moving a state on twice is not: a lane stages the
states of its forward until `commit`, so that a forward that failed may be repeated.

Shapes: S slots, B rows of one forward (a slot each), H key/value heads, C context, Q new tokens per row, D head width,
N keys looked at: the longest row's length after this forward, T tokens of a packed forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch.nn.functional import pad
from transformers.cache_utils import Cache

from kvasir_node.base.errors import BugError

_StateKey = tuple[str, int, int]  # convolution or recurrent, layer, which of the layer's
_CONVOLUTION, _RECURRENT = "convolution", "recurrent"


class SlotCache:
    """Pools are made when a layer first shows what it keeps; `Trunk.new_cache` sees to it that all of them are made.
    Shorter rows see their unused keys masked, so a slot must be cleared before another request uses it.

    `keys` and `values` are open to whoever computes attention by other means than `Lane.update`: by layer,
    [S, H, C, D]. Each token of a forward writes its own position of its slot and reads up to there.
    """

    def __init__(self, slots: int, context: int, device: torch.device) -> None:
        self.slots = slots
        self.context = context
        self.device = device
        self.keys: dict[int, torch.Tensor] = {}
        self.values: dict[int, torch.Tensor] = {}
        self.states: dict[_StateKey, torch.Tensor] = {}  # [S, …]

    @property
    def nbytes(self) -> int:
        return sum(pool.nbytes for pool in (*self.keys.values(), *self.values.values(), *self.states.values()))

    def lane(self) -> Lane:
        return Lane(self)

    def copy(self, source: int, target: int, length: int) -> None:
        """Gives a slot the first `length` positions of another one, whose states must stand exactly there."""
        for pool in (*self.keys.values(), *self.values.values()):
            pool[target, :, :length] = pool[source, :, :length]
        for pool in self.states.values():
            pool[target] = pool[source]

    def clear(self, slot: int, start: int, end: int) -> None:
        """Zeroes positions start … end - 1, and the states if none stays. Masked keys still take part in the arithmetic
        (0 × NaN is NaN), so what a request left behind could otherwise reach the next one."""
        for pool in (*self.keys.values(), *self.values.values()):
            pool[slot, :, start:end].zero_()
        if start == 0:
            for pool in self.states.values():
                pool[slot].zero_()

    def _pool(self, like: torch.Tensor, *shape: int) -> torch.Tensor:
        with torch.inference_mode(False):  # a forward's own tensors could not be cleared outside of it
            return torch.zeros((self.slots, *shape), dtype=like.dtype, device=self.device)


class Lane(Cache):
    """The aim of one forward at a time: `begin` before it, `commit` when it and all that belongs to it has happened.

    Set by `begin`: `slots` and `starts` (B numbers each: the slot, and how many positions it has), `positions` [B, Q],
    `rows` [B] (`slots` as a tensor) and `length` (N). By `begin_packed`: the same, but `positions` and `rows` are [T],
    and `last`: the place of each row's last token among the T.
    """

    def __init__(self, pools: SlotCache) -> None:
        super().__init__(layers=[])
        self.pools = pools
        self.slots: tuple[int, ...] = ()
        self.last: tuple[int, ...] = ()
        self._counts: tuple[int, ...] = ()  # tokens of each row if packed, as `rows` was made for them
        self.begin([0], [0], 1)

    def begin(self, slots: Sequence[int], starts: Sequence[int], new_tokens: int) -> None:
        """Aims the next forward: row i writes positions starts[i] … starts[i] + new_tokens - 1 of slots[i].

        Writing the same positions again is allowed: a forward that failed half-way may be repeated. States that were
        staged and not committed are forgotten.
        """
        device = self.pools.device
        self._aim(slots, starts, max(starts) + new_tokens)
        if self.slots != tuple(slots) or self._counts:
            self.slots, self._counts = tuple(slots), ()
            self.rows = torch.tensor(slots, device=device)
            # Neighbouring slots are read as a view; anything else costs a copy of their keys and values.
            is_run = self.slots == tuple(range(slots[0], slots[0] + len(slots)))
            self._run = slice(slots[0], slots[0] + len(slots)) if is_run else None
        self._new_tokens = new_tokens
        self._is_fresh = not any(starts)  # else rows that start anew find the zeros that `clear` left
        first = torch.tensor(starts, device=device)[:, None]
        self.positions = first if new_tokens == 1 else first + torch.arange(new_tokens, device=device)

    def begin_packed(self, slots: Sequence[int], starts: Sequence[int], counts: Sequence[int]) -> None:
        """As `begin`, but row i writes `counts[i]` positions. For attention on the pools themselves: what the layers
        of transformers call does not work with it, and there may be no states."""
        device = self.pools.device
        self._aim(slots, starts, max(start + count for start, count in zip(starts, counts, strict=True)))
        if self.slots != tuple(slots) or self._counts != tuple(counts):
            self.slots, self._counts = tuple(slots), tuple(counts)
            self.rows = torch.tensor(slots, device=device).repeat_interleave(torch.tensor(counts, device=device))
            self.last = tuple(end - 1 for end in accumulate(counts))
        spans = (range(start, start + count) for start, count in zip(starts, counts, strict=True))
        self.positions = torch.tensor([position for span in spans for position in span], device=device)

    def _aim(self, slots: Sequence[int], starts: Sequence[int], longest: int) -> None:
        pools = self.pools
        if longest > pools.context or not all(0 <= slot < pools.slots for slot in slots):
            raise BugError(f"cache of {pools.slots} × {pools.context} aimed at slots {slots} up to position {longest}")
        self.starts, self.length = tuple(starts), longest
        self._staged: dict[_StateKey, torch.Tensor] = {}

    def commit(self) -> None:
        """The forward happened: its states replace the ones before it."""
        for key, state in self._staged.items():
            self.pools.states[key][self.rows] = state
        self._staged = {}

    def mask(self, window: int | None) -> torch.Tensor:
        """bool [B, 1, Q, N]: which keys each new token sees; the last `window` ones if there is a window.

        Source: causal_mask_function and sliding_window_overlay of transformers 5.24.
        """
        keys = torch.arange(self.length, device=self.pools.device)
        queries = self.positions[:, None, :, None]
        seen = keys <= queries
        return seen if window is None else seen & (keys > queries - window)

    # What the layers of transformers call -----------------------------------------------------------------------

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Stores [B, H, Q, D] of this forward and returns all keys and values [B, H, N, D] of its rows."""
        return (
            self._store(self.pools.keys, layer_idx, key_states),
            self._store(self.pools.values, layer_idx, value_states),
        )

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """The rows' states; a layer may change them in place. None at the start of a sequence."""
        return self._state((_CONVOLUTION, layer_idx, state_idx))

    def update_conv_state(
        self,
        conv_states: torch.Tensor,
        layer_idx: int,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Takes inputs [B, width, Q] and returns them after those that are remembered.

        Source: LinearAttentionLayer.update_conv_state of transformers 5.24.
        """
        key = (_CONVOLUTION, layer_idx, state_idx)
        size = conv_states.shape[-1] if conv_kernel_size is None else conv_kernel_size
        if self._is_fresh:
            seen = pad(conv_states, (max(0, size - conv_states.shape[-1]), 0))
        else:
            size = self.pools.states[key].shape[-1]
            seen = torch.cat((self.pools.states[key][self.rows], conv_states), dim=-1)
        self._stage(key, seen[..., -size:])
        return seen

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """As `get_conv_state`."""
        return self._state((_RECURRENT, layer_idx, state_idx))

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> torch.Tensor:
        self._stage((_RECURRENT, layer_idx, state_idx), recurrent_states)
        return recurrent_states

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        return not self._is_fresh

    def is_recording_past(self, layer_idx: int) -> bool:
        return False

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.length - self._new_tokens

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return self.length - self._new_tokens

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self.length, 0

    # ------------------------------------------------------------------------------------------------------------

    def _store(self, pools: dict[int, torch.Tensor], layer: int, states: torch.Tensor) -> torch.Tensor:
        pool = pools.get(layer)
        if pool is None:
            pool = pools[layer] = self.pools._pool(states, states.shape[1], self.pools.context, states.shape[3])
        pool[self.rows[:, None], :, self.positions] = states.transpose(1, 2)
        if self._run is not None:
            return pool[self._run, :, : self.length]
        return pool[:, :, : self.length].index_select(0, self.rows)

    def _state(self, key: _StateKey) -> torch.Tensor | None:
        pool = self.pools.states.get(key)
        if self._is_fresh or pool is None:
            return None
        state = pool[self.rows]  # a copy
        self._stage(key, state)
        return state

    def _stage(self, key: _StateKey, state: torch.Tensor) -> None:
        if key not in self.pools.states:
            self.pools.states[key] = self.pools._pool(state, *state.shape[1:])
        self._staged[key] = state
