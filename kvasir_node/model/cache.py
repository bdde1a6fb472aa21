"""Keys and values of all running requests in one pre-allocated pool, a slot for each request.

It does not know requests, tokens or which model computes: `begin` says which slots the next forward works on and
where each of them stands; the attention layers then call `update`, as they would on transformers' own cache.

Shapes: S slots, B rows of one forward (a slot each), H key/value heads, C context, Q new tokens per row, D head width,
N keys looked at: the longest row's length after this forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import Cache

from kvasir_node.base.errors import BugError


class SlotCache(Cache):
    """Pools [S, H, C, D] per layer. Shorter rows see their unused keys masked, so a slot must be cleared after use."""

    def __init__(
        self,
        layers: int,
        slots: int,
        kv_heads: int,
        context: int,
        head_width: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__(layers=[])
        self.slots = slots
        self.context = context
        shape = (slots, kv_heads, context, head_width)
        self._keys = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(layers)]
        self._values = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(layers)]
        self._device = device
        self.begin([0], [0], 1)

    @property
    def nbytes(self) -> int:
        return sum(pool.nbytes for pool in (*self._keys, *self._values))

    def begin(self, slots: Sequence[int], starts: Sequence[int], new_tokens: int) -> None:
        """Aims the next forward: row i writes positions starts[i] … starts[i] + new_tokens - 1 of slots[i].

        Writing the same positions again is allowed: a forward that failed half-way may be repeated.
        """
        longest = max(starts) + new_tokens
        if longest > self.context or not all(0 <= slot < self.slots for slot in slots):
            raise BugError(f"cache of {self.slots} × {self.context} aimed at slots {slots} up to position {longest}")
        self._rows = torch.tensor(slots, device=self._device)
        self._length = longest
        self._new_tokens = new_tokens
        first = torch.tensor(starts, device=self._device)[:, None]
        self.positions = first + torch.arange(new_tokens, device=self._device)  # [B, Q]
        # Neighbouring slots are read as a view; anything else costs a copy of their keys and values.
        is_run = list(slots) == list(range(slots[0], slots[0] + len(slots)))
        self._run = slice(slots[0], slots[0] + len(slots)) if is_run else None

    def mask(self, window: int | None) -> torch.Tensor:
        """bool [B, 1, Q, N]: which keys each new token sees; the last `window` ones if there is a window.

        Source: causal_mask_function and sliding_window_overlay of transformers 5.24.
        """
        keys = torch.arange(self._length, device=self._device)
        queries = self.positions[:, None, :, None]
        seen = keys <= queries
        return seen if window is None else seen & (keys > queries - window)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Stores [B, H, Q, D] of this forward and returns all keys and values [B, H, N, D] of its rows."""
        return (
            self._store(self._keys[layer_idx], key_states),
            self._store(self._values[layer_idx], value_states),
        )

    def copy(self, source: int, target: int, length: int) -> None:
        """Gives a slot the first `length` positions of another one."""
        for pool in (*self._keys, *self._values):
            pool[target, :, :length] = pool[source, :, :length]

    def clear(self, slot: int, length: int) -> None:
        """Zeroes the first `length` positions. Masked keys still take part in the arithmetic (0 × NaN is NaN), so
        what a request left behind could otherwise reach the next one."""
        for pool in (*self._keys, *self._values):
            pool[slot, :, :length].zero_()

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._length - self._new_tokens

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return self._length - self._new_tokens

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self._length, 0

    def _store(self, pool: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        pool[self._rows[:, None], :, self.positions] = states.transpose(1, 2)
        if self._run is not None:
            return pool[self._run, :, : self._length]
        return pool[:, :, : self._length].index_select(0, self._rows)
