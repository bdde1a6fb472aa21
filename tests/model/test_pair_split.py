"""The kernel and the torch operations cut and add up alike; a part is what a request's frame holds."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvasir_node.base.ids import PeerId
from kvasir_node.decide.dealing import Dealing, Prices, deal
from kvasir_node.model.kernels.library import kernels
from kvasir_node.model.pair_split import DealTable, PairSplitter, Part

EXPERTS, WIDTH = 12, 8
PEERS = (PeerId("ann"), PeerId("bob"), PeerId("cho"))


@pytest.fixture(scope="module", params=["kernel", "torch"])
def way(request):
    if request.param == "kernel" and "split" not in kernels():
        pytest.skip("no kernels for this processor")
    return request.param


def splitter_of(way: str, dtype: torch.dtype) -> PairSplitter:
    splitter = PairSplitter(dtype)
    if way == "torch":
        splitter._split = splitter._join = None
    return splitter


def table_of(where: Sequence[int]) -> DealTable:
    """Of four machines; no choice."""
    return DealTable(Dealing(PEERS, tuple((machine,) for machine in where), Prices(*[(0.0,) * 4] * 3)))


def arrays_of(part: Part, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """weights, rows, experts, values, read back out of the body."""
    pairs, body = part.pairs, part.body.clone()
    values = body[12 * pairs :].view(dtype).view(part.rows, WIDTH)
    return body[: 4 * pairs].view(torch.float32), *body[4 * pairs : 12 * pairs].view(torch.int32).view(2, pairs), values


def drawn(seed: int, count: int, each: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.stack([torch.randperm(EXPERTS, generator=generator)[:each] for _ in range(count)])
    return torch.randn(count, WIDTH, generator=generator), chosen, torch.rand(count, each, generator=generator)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 1000),
    count=st.integers(1, 9),
    each=st.integers(1, 5),
    where=st.lists(st.integers(0, 3), min_size=EXPERTS, max_size=EXPERTS),
    dtypes=st.sampled_from(
        [(torch.float32, torch.float32), (torch.float32, torch.bfloat16), (torch.bfloat16, torch.bfloat16)]
    ),
)
def test_every_pair_goes_to_its_machine_once(way, seed, count, each, where, dtypes):
    given_dtype, wire_dtype = dtypes
    rows, chosen, weights = drawn(seed, count, each)
    rows = rows.to(given_dtype)
    found = splitter_of(way, wire_dtype).split(table_of(where), [True] * 4, rows, chosen, weights)
    pairs = {
        (0, row, expert, weight)
        for row, expert, weight in zip(
            found.own_rows.tolist(), found.own_experts.tolist(), found.own_weights.tolist(), strict=True
        )
    }
    assert found.activated == len(set(found.own_experts.tolist()))
    for part in found.parts:
        pair_weight, pair_row, pair_expert, values = arrays_of(part, wire_dtype)
        assert torch.equal(values, rows[part.used].to(wire_dtype))
        assert part.used.tolist() == sorted(set(part.used.tolist()))
        assert torch.equal(torch.bincount(pair_row, minlength=part.rows), part.row_pairs)
        assert part.activated == len(set(pair_expert.tolist()))
        assert part.pairs == len(pair_row)
        lines = part.used[pair_row.long()].tolist()
        pairs |= set(zip([part.machine] * part.pairs, lines, pair_expert.tolist(), pair_weight.tolist(), strict=True))
    assert pairs == {
        (where[chosen[row, slot]], row, int(chosen[row, slot]), float(weights[row, slot]))
        for row in range(count)
        for slot in range(each)
    }


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 1000),
    count=st.integers(1, 9),
    able=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4, unique=True), min_size=EXPERTS, max_size=EXPERTS),
    allowed=st.tuples(st.just(True), *[st.booleans()] * 3),
    prices=st.lists(st.integers(0, 64), min_size=12, max_size=12),  # small integers: sums in float32 are exact
)
def test_experts_are_dealt_out_as_the_plain_function_says(way, seed, count, able, allowed, prices):
    dealing = Dealing(PEERS, tuple(map(tuple, able)), Prices(*(tuple(map(float, prices[at::3])) for at in range(3))))
    rows, chosen, weights = drawn(seed, count, 3)
    found = splitter_of(way, torch.float32).split(DealTable(dealing), allowed, rows, chosen, weights)
    pairs = torch.bincount(chosen.reshape(-1), minlength=EXPERTS).tolist()
    where = dict.fromkeys(found.own_experts.tolist(), 0)
    for part in found.parts:
        where |= dict.fromkeys(arrays_of(part, torch.float32)[2].tolist(), part.machine)
    wanted = deal(dealing, pairs, allowed)
    assert where == {expert: wanted[expert] for expert in where}
    assert len(where) == sum(1 for each in pairs if each)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_are_added_to_their_rows_and_their_pairs_counted(way, dtype):
    part = Part(1, 5, 2, 2, torch.empty(0, dtype=torch.uint8), torch.tensor([0, 3, 2, 3]), 0, 2)
    sums = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(3)).to(dtype)
    totals, done = torch.ones(4, WIDTH), torch.tensor([7, 0, 0, 1])
    assert splitter_of(way, dtype).join(sums, part, totals, done)
    expected = torch.ones(4, WIDTH)
    expected[0] += sums[0].float()
    expected[3] += sums[1].float()
    assert torch.equal(totals, expected)
    assert done.tolist() == [9, 0, 0, 4]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("place", [0, 1, 2 * WIDTH - 1])
def test_nothing_is_added_when_one_sum_is_not_finite(way, dtype, bad, place):
    part = Part(1, 5, 2, 2, torch.empty(0, dtype=torch.uint8), torch.tensor([0, 3, 2, 3]), 0, 2)
    sums = torch.ones(2, WIDTH)
    sums.view(-1)[place] = bad
    totals, done = torch.ones(4, WIDTH), torch.zeros(4, dtype=torch.int64)
    assert not splitter_of(way, dtype).join(sums.to(dtype), part, totals, done)
    assert torch.equal(totals, torch.ones(4, WIDTH))
    assert done.tolist() == [0] * 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_largest_finite_values_are_finite(way, dtype):
    part = Part(1, 1, 1, 1, torch.empty(0, dtype=torch.uint8), torch.tensor([0, 1]), 0, 1)
    largest = torch.full((1, WIDTH), torch.finfo(dtype).max, dtype=dtype)
    totals = torch.zeros(1, WIDTH)
    assert splitter_of(way, dtype).join(largest, part, totals, torch.zeros(1, dtype=torch.int64))
    assert torch.equal(totals, largest.float())
