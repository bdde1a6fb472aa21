"""Slots, masks and reads of the pooled cache, and lanes that aim forwards at it."""

from __future__ import annotations

import pytest
import torch

from kvasir_node.base.errors import BugError
from kvasir_node.model.cache import Lane, SlotCache


def make() -> Lane:
    lane = SlotCache(slots=4, context=10, device=torch.device("cpu")).lane()
    for layer in (0, 1):  # the pools are made when a layer first shows what it keeps
        lane.update(torch.zeros(1, 2, 1, 3), torch.zeros(1, 2, 1, 3), layer)
    return lane


def states(lane: Lane, rows: int, tokens: int, value: float) -> tuple[torch.Tensor, torch.Tensor]:
    fill = torch.full((rows, 2, tokens, 3), value)
    return lane.update(fill, -fill, 1)


def recurrent(lane: Lane, value: list[list[float]]) -> None:
    lane.update_recurrent_state(torch.tensor(value), 3)


def read_recurrent(lane: Lane) -> list[float]:
    state = lane.get_recurrent_state(3)
    assert state is not None
    return state.flatten().tolist()


def test_rows_of_any_slots_read_back_what_they_wrote():
    lane = make()
    lane.begin([3, 1], [0, 0], 2)
    keys, values = states(lane, 2, 2, 5.0)
    assert keys.shape == (2, 2, 2, 3)
    assert torch.equal(keys, torch.full_like(keys, 5.0))
    assert torch.equal(values, -keys)
    lane.begin([1, 2, 3], [2, 0, 2], 1)  # a run of slots, of unequal lengths
    keys, _ = states(lane, 3, 1, 7.0)
    assert keys[:, 0, :, 0].tolist() == [[5, 5, 7], [7, 0, 0], [5, 5, 7]]


def test_other_layers_and_slots_stay_untouched():
    lane = make()
    lane.begin([2], [4], 3)
    states(lane, 1, 3, 1.0)
    pools = lane.pools
    assert all(pool.count_nonzero() == 0 for pool in (pools.keys[0], pools.values[0]))
    assert pools.keys[1].nonzero()[:, 0].unique().tolist() == [2]
    assert pools.keys[1].nonzero()[:, 2].unique().tolist() == [4, 5, 6]


def test_a_lane_tells_where_its_forward_stands():
    lane = make()
    lane.begin([3, 0], [2, 7], 1)
    assert (lane.slots, lane.starts, lane.length) == ((3, 0), (2, 7), 8)
    assert lane.rows.tolist() == [3, 0]
    assert lane.positions.tolist() == [[2], [7]]


def test_masks_end_at_each_rows_own_position():
    lane = make()
    lane.begin([0, 1], [3, 0], 2)
    assert lane.positions.tolist() == [[3, 4], [0, 1]]
    full = lane.mask(None)
    assert full.shape == (2, 1, 2, 5)
    assert full[:, 0].int().tolist() == [[[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]], [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0]]]
    assert lane.mask(2)[0, 0].int().tolist() == [[0, 0, 1, 1, 0], [0, 0, 0, 1, 1]]


def test_clearing_forgets_one_slot():
    lane = make()
    lane.begin([0, 1], [0, 0], 4)
    states(lane, 2, 4, float("nan"))
    lane.pools.clear(0, 0, 4)
    keys, values = lane.pools.keys[1], lane.pools.values[1]
    assert keys[0].count_nonzero() == values[0].count_nonzero() == 0
    assert keys[1, :, :4].isnan().all()


@pytest.mark.parametrize(("slots", "starts", "tokens"), [([0], [9], 2), ([4], [0], 1), ([-1], [0], 1)])
def test_aiming_outside_of_the_pool_is_a_bug(slots, starts, tokens):
    with pytest.raises(BugError, match="cache of 4 × 10"):
        make().begin(slots, starts, tokens)


def test_the_pool_has_the_size_it_was_promised():
    assert make().pools.nbytes == 2 * 2 * 4 * 2 * 10 * 3 * 4


def convolution(lane: Lane, inputs: list[list[float]]) -> list[list[float]]:
    return lane.update_conv_state(torch.tensor(inputs)[:, None], 7, conv_kernel_size=3)[:, 0].tolist()


def test_a_convolution_sees_what_came_before_and_an_empty_past_is_zeros():
    lane = make()
    lane.begin([2], [0], 2)
    assert lane.get_conv_state(7) is None
    assert convolution(lane, [[1.0, 2.0]]) == [[0, 1, 2]]
    lane.commit()
    lane.begin([2], [2], 2)
    assert convolution(lane, [[3.0, 4.0]]) == [[0, 1, 2, 3, 4]]
    lane.commit()
    lane.begin([2], [4], 1)
    state = lane.get_conv_state(7)
    assert state is not None
    assert state[0, 0].tolist() == [2, 3, 4]


def test_a_state_that_a_layer_changes_in_place_counts_only_when_committed():
    lane = make()
    lane.begin([1], [0], 1)
    lane.update_recurrent_state(torch.ones(1, 2, 2), 3)
    lane.commit()
    for happened in (False, False, True, True):
        lane.begin([1], [1], 1)
        state = lane.get_recurrent_state(3)
        assert state is not None
        before = state.clone()
        state.mul_(2)
        if happened:
            lane.commit()
        lane.begin([1], [1], 1)
        after = lane.get_recurrent_state(3)
        assert after is not None
        assert torch.equal(after, before * 2 if happened else before)


def test_lanes_under_way_at_once_keep_their_own_aim_and_commit_by_themselves():
    lane = make()
    other = lane.pools.lane()
    lane.begin([0, 1, 3], [0, 0, 0], 1)
    recurrent(lane, [[1.0], [2.0], [3.0]])
    lane.commit()
    lane.begin([0, 1], [1, 1], 1)
    other.begin([2], [0], 4)
    recurrent(lane, [[10.0], [20.0]])
    recurrent(other, [[40.0]])
    keys, _ = states(other, 1, 4, 8.0)
    assert keys.shape == (1, 2, 4, 3)
    assert states(lane, 2, 1, 6.0)[0].shape == (2, 2, 2, 3)
    other.commit()
    lane.begin([0, 1, 2, 3], [1, 1, 4, 1], 1)
    assert read_recurrent(lane) == [1, 2, 40, 3]  # what was staged for slots 0 and 1 did not happen


def test_clearing_zeroes_states_and_copying_takes_them_along():
    lane = make()
    lane.begin([0, 1], [0, 0], 1)
    recurrent(lane, [[float("nan")], [2.0]])
    states(lane, 2, 1, 5.0)
    lane.commit()
    lane.pools.clear(0, 0, 1)
    lane.pools.copy(1, 2, 1)
    lane.begin([0, 1, 2], [1, 1, 1], 1)
    assert read_recurrent(lane) == [0, 2, 2]
    assert lane.pools.keys[1][2, :, 0].eq(5).all()


def test_rows_of_other_widths_for_keys_and_values_as_in_latent_attention():
    lane = make()
    lane.begin([1], [0], 2)
    keys, values = lane.update(torch.ones(1, 1, 2, 8), torch.ones(1, 1, 2, 4), 5)
    assert (keys.shape, values.shape) == ((1, 1, 2, 8), (1, 1, 2, 4))
