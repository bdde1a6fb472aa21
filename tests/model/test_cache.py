"""Slots, masks and reads of the pooled cache."""

from __future__ import annotations

import pytest
import torch

from kvasir_node.base.errors import BugError
from kvasir_node.model.cache import SlotCache


def make() -> SlotCache:
    cache = SlotCache(slots=4, context=10, device=torch.device("cpu"))
    for layer in (0, 1):  # the pools are made when a layer first shows what it keeps
        cache.update(torch.zeros(1, 2, 1, 3), torch.zeros(1, 2, 1, 3), layer)
    cache.discard()
    return cache


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


def convolution(cache: SlotCache, inputs: list[list[float]]) -> list[list[float]]:
    return cache.update_conv_state(torch.tensor(inputs)[:, None], 7, conv_kernel_size=3)[:, 0].tolist()


def test_a_convolution_sees_what_came_before_and_an_empty_past_is_zeros():
    cache = make()
    cache.begin([2], [0], 2)
    assert cache.get_conv_state(7) is None
    assert convolution(cache, [[1.0, 2.0]]) == [[0, 1, 2]]
    cache.commit()
    cache.begin([2], [2], 2)
    assert convolution(cache, [[3.0, 4.0]]) == [[0, 1, 2, 3, 4]]
    cache.commit()
    cache.begin([2], [4], 1)
    state = cache.get_conv_state(7)
    assert state is not None
    assert state[0, 0].tolist() == [2, 3, 4]


def test_a_state_that_a_layer_changes_in_place_counts_only_when_committed():
    cache = make()
    cache.begin([1], [0], 1)
    cache.update_recurrent_state(torch.ones(1, 2, 2), 3)
    cache.commit()
    for happened in (False, False, True, True):
        cache.begin([1], [1], 1)
        state = cache.get_recurrent_state(3)
        assert state is not None
        before = state.clone()
        state.mul_(2)
        cache.commit() if happened else cache.discard()
        cache.begin([1], [1], 1)
        after = cache.get_recurrent_state(3)
        assert after is not None
        assert torch.equal(after, before * 2 if happened else before)
        cache.discard()


def test_forwards_of_one_step_are_committed_together_and_other_slots_stay():
    cache = make()
    cache.begin([0, 1, 3], [0, 0, 0], 1)
    cache.update_recurrent_state(torch.tensor([[1.0], [2.0], [3.0]]), 3)
    cache.commit()
    cache.begin([0, 1], [1, 1], 1)
    cache.update_recurrent_state(torch.tensor([[10.0], [20.0]]), 3)
    cache.begin([2], [0], 4)
    cache.update_recurrent_state(torch.tensor([[40.0]]), 3)
    cache.commit()
    cache.begin([0, 1, 2, 3], [2, 2, 4, 1], 1)
    state = cache.get_recurrent_state(3)
    assert state is not None
    assert state.flatten().tolist() == [10, 20, 40, 3]


def test_clearing_zeroes_states_and_copying_takes_them_along():
    cache = make()
    cache.begin([0, 1], [0, 0], 1)
    cache.update_recurrent_state(torch.tensor([[float("nan")], [2.0]]), 3)
    states(cache, 2, 1, 5.0)
    cache.commit()
    cache.clear(0, 1)
    cache.copy(1, 2, 1)
    cache.begin([0, 1, 2], [1, 1, 1], 1)
    state = cache.get_recurrent_state(3)
    assert state is not None
    assert state.flatten().tolist() == [0, 2, 2]
    assert cache._keys[1][2, :, 0].eq(5).all()


def test_rows_of_other_widths_for_keys_and_values_as_in_latent_attention():
    cache = make()
    cache.begin([1], [0], 2)
    keys, values = cache.update(torch.ones(1, 1, 2, 8), torch.ones(1, 1, 2, 4), 5)
    assert (keys.shape, values.shape) == ((1, 1, 2, 8), (1, 1, 2, 4))
