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


def numbers_of(numbers: Sequence[int]) -> memoryview:
    return torch.tensor(numbers).numpy().data


def join(how: str, splitter: PairSplitter, sums: torch.Tensor, part: Part, totals: torch.Tensor, done) -> bool:
    """As a tensor, or out of a frame."""
    if how == "tensor":
        return splitter.join(sums, part, totals, done)
    frame = memoryview(bytearray(4 + sums.numel() * sums.element_size()))
    frame[4:] = sums.contiguous().view(torch.uint8).numpy().tobytes()
    return splitter.join_values(frame[4:], sums.dtype, part, totals, done)


def table_of(where: Sequence[int]) -> DealTable:
    """Of four machines; no choice."""
    return DealTable(Dealing(PEERS, tuple((machine,) for machine in where), Prices(*[(0.0,) * 4] * 3)))


def arrays_of(part: Part, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """weights, rows, experts, values, read back out of the body."""
    pairs, body = part.pairs, torch.frombuffer(bytearray(part.body), dtype=torch.uint8)
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


@pytest.mark.parametrize("how", ["tensor", "frame"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_are_added_to_their_rows_and_their_pairs_counted(way, how, dtype):
    part = Part(1, 5, 2, 2, memoryview(bytearray()), numbers_of([0, 3, 2, 3]), 0, 2)
    sums = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(3)).to(dtype)
    totals, done = torch.ones(4, WIDTH), torch.tensor([7, 0, 0, 1])
    assert join(how, splitter_of(way, dtype), sums, part, totals, done)
    expected = torch.ones(4, WIDTH)
    expected[0] += sums[0].float()
    expected[3] += sums[1].float()
    assert torch.equal(totals, expected)
    assert done.tolist() == [9, 0, 0, 4]


@pytest.mark.parametrize("how", ["tensor", "frame"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("place", [0, 1, 2 * WIDTH - 1])
def test_nothing_is_added_when_one_sum_is_not_finite(way, how, dtype, bad, place):
    part = Part(1, 5, 2, 2, memoryview(bytearray()), numbers_of([0, 3, 2, 3]), 0, 2)
    sums = torch.ones(2, WIDTH)
    sums.view(-1)[place] = bad
    totals, done = torch.ones(4, WIDTH), torch.zeros(4, dtype=torch.int64)
    assert not join(how, splitter_of(way, dtype), sums.to(dtype), part, totals, done)
    assert torch.equal(totals, torch.ones(4, WIDTH))
    assert done.tolist() == [0] * 4


@pytest.mark.parametrize("how", ["tensor", "frame"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_largest_finite_values_are_finite(way, how, dtype):
    part = Part(1, 1, 1, 1, memoryview(bytearray()), numbers_of([0, 1]), 0, 1)
    largest = torch.full((1, WIDTH), torch.finfo(dtype).max, dtype=dtype)
    totals = torch.zeros(1, WIDTH)
    assert join(how, splitter_of(way, dtype), largest, part, totals, torch.zeros(1, dtype=torch.int64))
    assert torch.equal(totals, largest.float())


def layer_of(seed: int, rows: int, rows_dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    chosen = torch.rand(rows, EXPERTS, generator=draw).argsort(1)[:, :3].contiguous()
    return [torch.randn(rows, WIDTH, generator=draw).to(rows_dtype), chosen, torch.rand(rows, 3, generator=draw)]


def assert_alike(found, expected, dtype: torch.dtype) -> None:
    for name in ("own_rows", "own_experts", "own_weights"):
        assert torch.equal(getattr(found, name), getattr(expected, name))
    assert found.activated == expected.activated
    for ours, theirs in zip(found.parts, expected.parts, strict=True):
        assert torch.equal(ours.used, theirs.used)
        assert torch.equal(ours.row_pairs, theirs.row_pairs)
        for one, other in zip(arrays_of(ours, dtype), arrays_of(theirs, dtype), strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("travels_as", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows_dtype", [torch.float32, torch.bfloat16])
def test_what_the_same_tensors_hold_by_now_is_split_whoever_had_them_copied(way, rows_dtype, travels_as):
    """A forward has one set of tensors for all of its layers."""
    splitter, table, allowed = splitter_of(way, travels_as), table_of([0, 1, 2, 3] * 3), [True] * 4
    given = layer_of(0, 6, rows_dtype)
    for seed in range(4):
        for tensor, new in zip(given, layer_of(seed, 6, rows_dtype), strict=True):
            tensor.copy_(new)
        expected = splitter_of("torch", travels_as).split(table, allowed, *given)
        assert_alike(splitter.split(table, allowed, *given), expected, travels_as)


def test_forwards_of_all_sizes_take_turns(way):
    splitter, allowed = splitter_of(way, torch.float32), [True] * 4
    for seed, rows in enumerate([1, 7, 2, 40, 0, 7, 1, 40]):
        table, given = table_of([(seed * each) % 4 for each in range(EXPERTS)]), layer_of(seed, rows)
        expected = splitter_of("torch", torch.float32).split(table, allowed, *given)
        assert_alike(splitter.split(table, allowed, *given), expected, torch.float32)


def test_a_part_outlives_the_splits_after_it(way):
    """Its answer may come, or be computed here, after other layers."""
    splitter, table, allowed = splitter_of(way, torch.float32), table_of([0, 1, 2, 3] * 3), [True] * 4
    given = layer_of(1, 6)
    first = splitter.split(table, allowed, *given).parts
    kept = [(part.used.clone(), part.row_pairs.clone(), bytes(part.body)) for part in first]
    for seed in range(2, 5):
        splitter.split(table, allowed, *layer_of(seed, 6))
    for part, (used, row_pairs, body) in zip(first, kept, strict=True):
        assert torch.equal(part.used, used)
        assert torch.equal(part.row_pairs, row_pairs)
        assert bytes(part.body) == body
