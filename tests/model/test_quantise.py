"""int8 rows: error bound, rounding, and rows that divide badly."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvasir_node.model.quantise import LEVELS, int8_rows


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(0, 1000), st.sampled_from([torch.float32, torch.bfloat16]), st.floats(1e-30, 1e30))
def test_a_weight_is_at_most_half_a_level_off(seed, dtype, scale):
    matrix = (torch.randn(7, 33, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)
    levels, factors = int8_rows(matrix)
    assert levels.dtype is torch.int8
    assert factors.dtype is torch.float32
    assert (levels.abs().amax(1) == LEVELS).all()
    off = (levels.double() * factors.double()[:, None] - matrix.double()).abs()
    assert (off <= 0.5001 * factors.double()[:, None]).all()


def test_halves_go_to_the_even_level():
    levels, factors = int8_rows(torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5]]))
    assert factors.tolist() == [1.0]
    assert levels.tolist() == [[127, 0, 2, 2, 0, -2]]


@pytest.mark.parametrize("value", [0.0, 1e-45])
def test_a_row_that_is_next_to_nothing_becomes_nothing(value):
    levels, factors = int8_rows(torch.full((1, 32), value))
    assert ((levels * factors[:, None]) == 0).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_shows_in_its_row_alone(bad):
    matrix = torch.ones(2, 32)
    matrix[1, 3] = bad
    levels, factors = int8_rows(matrix)
    assert torch.isfinite(levels[0] * factors[0]).all()
    assert not torch.isfinite((levels[1] * factors[1]).sum())
