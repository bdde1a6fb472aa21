"""What all running requests must remember, in pre-allocated pools with a slot for each request.

It does not know requests, tokens or which model computes: `begin` says which slots the next forward works on and
where each of them stands; the layers then call `update` and the like, as they would on transformers' own cache.

Attention layers keep keys and values (for MLA: latents) of every position; convolutions, gated delta nets and mamba
keep a state that each token replaces. Writing keys again is harmless, moving a state on twice is not: states of a
forward are staged until `commit`, so that a step that failed may be repeated.

Shapes: S slots, B rows of one forward (a slot each), H key/value heads, C context, Q new tokens per row, D head width,
N keys looked at: the longest row's length after this forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.functional import pad
from transformers.cache_utils import Cache

from kvasir_node.base.errors import BugError

_StateKey = tuple[str, int, int]  # convolution or recurrent, layer, which of the layer's
_CONVOLUTION, _RECURRENT = "convolution", "recurrent"


class SlotCache(Cache):
    """Pools are made when a layer first shows what it keeps; `Trunk.new_cache` sees to it that all of them are made.
    Shorter rows see their unused keys masked, so a slot must be cleared after use."""

    def __init__(self, slots: int, context: int, device: torch.device) -> None:
        super().__init__(layers=[])
        self.slots = slots
        self.context = context
        self._keys: dict[int, torch.Tensor] = {}  # by layer, [S, H, C, D]
        self._values: dict[int, torch.Tensor] = {}
        self._states: dict[_StateKey, torch.Tensor] = {}  # [S, …]
        self._staged: list[tuple[torch.Tensor, dict[_StateKey, torch.Tensor]]] = []  # rows and states, by forward
        self._device = device
        self.begin([0], [0], 1)

    @property
    def nbytes(self) -> int:
        return sum(pool.nbytes for pool in (*self._keys.values(), *self._values.values(), *self._states.values()))

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
        self._is_fresh = not any(starts)  # else rows that start anew find the zeros that `clear` left
        first = torch.tensor(starts, device=self._device)[:, None]
        self.positions = first + torch.arange(new_tokens, device=self._device)  # [B, Q]
        # Neighbouring slots are read as a view; anything else costs a copy of their keys and values.
        is_run = list(slots) == list(range(slots[0], slots[0] + len(slots)))
        self._run = slice(slots[0], slots[0] + len(slots)) if is_run else None
        self._staged.append((self._rows, {}))

    def commit(self) -> None:
        """The forwards since the last `commit` or `discard` happened: their states replace the ones before them."""
        for rows, states in self._staged:
            for key, state in states.items():
                self._states[key][rows] = state
        self._staged.clear()

    def discard(self) -> None:
        """They did not happen."""
        self._staged.clear()

    def mask(self, window: int | None) -> torch.Tensor:
        """bool [B, 1, Q, N]: which keys each new token sees; the last `window` ones if there is a window.

        Source: causal_mask_function and sliding_window_overlay of transformers 5.24.
        """
        keys = torch.arange(self._length, device=self._device)
        queries = self.positions[:, None, :, None]
        seen = keys <= queries
        return seen if window is None else seen & (keys > queries - window)

    def copy(self, source: int, target: int, length: int) -> None:
        """Gives a slot the first `length` positions of another one, whose states must stand exactly there."""
        for pool in (*self._keys.values(), *self._values.values()):
            pool[target, :, :length] = pool[source, :, :length]
        for pool in self._states.values():
            pool[target] = pool[source]

    def clear(self, slot: int, length: int) -> None:
        """Zeroes the states and the first `length` positions. Masked keys still take part in the arithmetic (0 × NaN is
        NaN), so what a request left behind could otherwise reach the next one."""
        for pool in (*self._keys.values(), *self._values.values()):
            pool[slot, :, :length].zero_()
        for pool in self._states.values():
            pool[slot].zero_()

    # What the layers of transformers call -----------------------------------------------------------------------

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Stores [B, H, Q, D] of this forward and returns all keys and values [B, H, N, D] of its rows."""
        return (
            self._store(self._keys, layer_idx, key_states),
            self._store(self._values, layer_idx, value_states),
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
            size = self._states[key].shape[-1]
            seen = torch.cat((self._states[key][self._rows], conv_states), dim=-1)
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
        return self._length - self._new_tokens

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return self._length - self._new_tokens

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self._length, 0

    # ------------------------------------------------------------------------------------------------------------

    def _store(self, pools: dict[int, torch.Tensor], layer: int, states: torch.Tensor) -> torch.Tensor:
        pool = pools.get(layer)
        if pool is None:
            pool = pools[layer] = self._pool(states, states.shape[1], self.context, states.shape[3])
        pool[self._rows[:, None], :, self.positions] = states.transpose(1, 2)
        if self._run is not None:
            return pool[self._run, :, : self._length]
        return pool[:, :, : self._length].index_select(0, self._rows)

    def _state(self, key: _StateKey) -> torch.Tensor | None:
        pool = self._states.get(key)
        if self._is_fresh or pool is None:
            return None
        state = pool[self._rows]  # a copy
        self._stage(key, state)
        return state

    def _stage(self, key: _StateKey, state: torch.Tensor) -> None:
        if key not in self._states:
            self._states[key] = self._pool(state, *state.shape[1:])
        self._staged[-1][1][key] = state

    def _pool(self, like: torch.Tensor, *shape: int) -> torch.Tensor:
        with torch.inference_mode(False):  # a forward's own tensors could not be cleared outside of it
            return torch.zeros((self.slots, *shape), dtype=like.dtype, device=self._device)
