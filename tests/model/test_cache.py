"""Slots, masks and reads of the pooled cache."""

from __future__ import annotations

import pytest
import torch

from kvasir_node.base.errors import BugError
from kvasir_node.model.cache import SlotCache


def make() -> SlotCache:
    return SlotCache(
        layers=2, slots=4, kv_heads=2, context=10, head_width=3, dtype=torch.float32, device=torch.device("cpu")
    )


def states(cache: SlotCache, rows: int, tokens: int, value: float) -> tuple[torch.Tensor, torch.Tensor]:
    fill = torch.full((rows, 2, tokens, 3), value)
    return cache.update(fill, -fill, 1)


def test_rows_of_any_slots_read_back_what_they_wrote():
    cache = make()
    cache.begin([3, 1], [0, 0], 2)
    keys, values = states(cache, 2, 2, 5.0)
    assert keys.shape == (2, 2, 2, 3)
    assert torch.equal(keys, torch.full_like(keys, 5.0))
    assert torch.equal(values, -keys)
    cache.begin([1, 2, 3], [2, 0, 2], 1)  # a run of slots, of unequal lengths
    keys, _ = states(cache, 3, 1, 7.0)
    assert keys[:, 0, :, 0].tolist() == [[5, 5, 7], [7, 0, 0], [5, 5, 7]]


def test_other_layers_and_slots_stay_untouched():
    cache = make()
    cache.begin([2], [4], 3)
    states(cache, 1, 3, 1.0)
    assert all(pool.count_nonzero() == 0 for pool in (cache._keys[0], cache._values[0]))
    assert cache._keys[1].nonzero()[:, 0].unique().tolist() == [2]
    assert cache._keys[1].nonzero()[:, 2].unique().tolist() == [4, 5, 6]


def test_masks_end_at_each_rows_own_position():
    cache = make()
    cache.begin([0, 1], [3, 0], 2)
    assert cache.positions.tolist() == [[3, 4], [0, 1]]
    full = cache.mask(None)
    assert full.shape == (2, 1, 2, 5)
    assert full[:, 0].int().tolist() == [[[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]], [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0]]]
    assert cache.mask(2)[0, 0].int().tolist() == [[0, 0, 1, 1, 0], [0, 0, 0, 1, 1]]


def test_clearing_forgets_one_slot():
    cache = make()
    cache.begin([0, 1], [0, 0], 4)
    states(cache, 2, 4, float("nan"))
    cache.clear(0, 4)
    assert cache._keys[1][0].count_nonzero() == cache._values[1][0].count_nonzero() == 0
    assert cache._keys[1][1, :, :4].isnan().all()


@pytest.mark.parametrize(("slots", "starts", "tokens"), [([0], [9], 2), ([4], [0], 1), ([-1], [0], 1)])
def test_aiming_outside_of_the_pool_is_a_bug(slots, starts, tokens):
    with pytest.raises(BugError, match="cache of 4 × 10"):
        make().begin(slots, starts, tokens)


def test_the_pool_has_the_size_it_was_promised():
    assert make().nbytes == 2 * 2 * 4 * 2 * 10 * 3 * 4
