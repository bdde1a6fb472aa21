import struct
import tracemalloc

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from wire_samples import STEADY, flips

from kvasir_node.base.errors import Misbehaved, RejectReason
from kvasir_node.wire.tensors import (
    PAIRS_MAX,
    ROWS_MAX,
    ExpertRequest,
    answer_parts,
    read_answer,
    read_request,
    request_parts,
)

ROWS = torch.tensor([[1.0, -2.0], [0.5, 3.0]])
REQUEST = ExpertRequest(
    layer=5,
    rows=ROWS,
    pair_row=torch.tensor([0, 0, 1], dtype=torch.int32),
    pair_expert=torch.tensor([7, 3, 7], dtype=torch.int32),
    pair_weight=torch.tensor([0.75, 0.25, 1.0]),
)
HEAD = "00050000000200000003000000020000000000403f0000803e0000803f000000000000000001000000070000000300000007000000"
REQUEST_F32 = "514b01" + HEAD + "0000803f000000c00000003f00004040"
REQUEST_BF16 = "514b02" + HEAD + "803f00c0003f4040"
ANSWER_F32 = "414b010002000000020000000000803f000000c00000003f00004040"


dtypes = st.sampled_from([torch.float32, torch.bfloat16])


def body(data: bytes | str) -> memoryview:
    """As a received frame: a view of memory that may be written."""
    return memoryview(bytearray(bytes.fromhex(data) if isinstance(data, str) else data))


def same(one: ExpertRequest, other: ExpertRequest) -> bool:
    return one.layer == other.layer and all(
        torch.equal(getattr(one, name), getattr(other, name)) and getattr(one, name).dtype == getattr(other, name).dtype
        for name in ("rows", "pair_row", "pair_expert", "pair_weight")
    )


@pytest.mark.parametrize(("dtype", "spelling"), [(torch.float32, REQUEST_F32), (torch.bfloat16, REQUEST_BF16)])
def test_golden_vector_of_a_request(dtype, spelling):
    request = ExpertRequest(5, ROWS.to(dtype), REQUEST.pair_row, REQUEST.pair_expert, REQUEST.pair_weight)
    assert b"".join(request_parts(request)).hex() == spelling
    assert same(read_request(body(spelling), hidden_size=2), request)


def test_golden_vector_of_an_answer():
    assert b"".join(answer_parts(ROWS)).hex() == ANSWER_F32
    assert torch.equal(read_answer(body(ANSWER_F32), rows=2, hidden_size=2, dtype=torch.float32), ROWS)


@pytest.mark.parametrize("spelling", [REQUEST_F32, REQUEST_BF16])
def test_each_flip_of_a_request_is_refused_or_is_another_request_that_adds_up(spelling):
    for flipped in flips(bytes.fromhex(spelling)):
        try:
            request = read_request(body(flipped), hidden_size=2)
        except Misbehaved:
            continue
        assert b"".join(request_parts(request)) == flipped
        assert int(request.pair_row.max()) < request.rows.shape[0]
        assert int(request.pair_row.min()) >= 0
        assert int(request.pair_expert.min()) >= 0
        assert bool(torch.isfinite(request.rows).all() & torch.isfinite(request.pair_weight).all())


def test_each_flip_of_an_answer_is_refused_or_is_another_finite_answer():
    for flipped in flips(bytes.fromhex(ANSWER_F32)):
        try:
            sums = read_answer(body(flipped), rows=2, hidden_size=2, dtype=torch.float32)
        except Misbehaved:
            continue
        assert b"".join(answer_parts(sums)) == flipped
        assert bool(torch.isfinite(sums).all())


@pytest.mark.parametrize("spelling", [REQUEST_F32, REQUEST_BF16, ANSWER_F32])
def test_each_cut_and_each_surplus_is_refused(spelling):
    whole = bytes.fromhex(spelling)
    for data in (*(whole[:length] for length in range(len(whole))), whole + b"\0"):
        with pytest.raises(Misbehaved):
            read_request(body(data), hidden_size=2)
        with pytest.raises(Misbehaved):
            read_answer(body(data), rows=2, hidden_size=2, dtype=torch.float32)


@STEADY
@given(st.binary(max_size=120))
def test_arbitrary_bytes_are_refused(data):
    with pytest.raises(Misbehaved):
        read_request(body(data), hidden_size=2)
    with pytest.raises(Misbehaved):
        read_answer(body(b"\0" + data), rows=1, hidden_size=2, dtype=torch.bfloat16)


def with_head(layer: int, rows: int, pairs: int, dim: int) -> bytes:
    return struct.pack("<HBBIIII", 0x4B51, 1, 0, layer, rows, pairs, dim) + bytes.fromhex(REQUEST_F32)[20:]


@pytest.mark.parametrize(
    ("rows", "pairs", "dim"),
    [
        (0, 3, 2),
        (2, 0, 2),
        (ROWS_MAX + 1, 3, 2),
        (2, PAIRS_MAX + 1, 2),
        (ROWS_MAX, PAIRS_MAX, 2),
        (0xFFFFFFFF, 0xFFFFFFFF, 2),
        (2, 3, 4),
    ],
)
def test_a_request_that_says_more_than_it_holds_is_refused_before_any_allocation(rows, pairs, dim):
    data = body(with_head(5, rows, pairs, dim))
    tracemalloc.start()
    try:
        with pytest.raises(Misbehaved):
            read_request(data, hidden_size=2)
        assert tracemalloc.get_traced_memory()[1] < 10_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "changed",
    [
        {"pair_row": torch.tensor([0, 2, 1], dtype=torch.int32)},
        {"pair_row": torch.tensor([0, -1, 1], dtype=torch.int32)},
        {"pair_expert": torch.tensor([7, -1, 7], dtype=torch.int32)},
        {"pair_weight": torch.tensor([0.75, float("nan"), 1.0])},
        {"pair_weight": torch.tensor([0.75, float("inf"), 1.0])},
        # a worker would be blamed for what comes of these
        {"rows": torch.tensor([[1.0, float("nan")], [0.5, 3.0]])},
        {"rows": torch.tensor([[1.0, -2.0], [0.5, float("-inf")]])},
    ],
)
def test_a_request_that_no_worker_could_answer_is_refused(changed):
    parts = {name: getattr(REQUEST, name) for name in ("layer", "rows", "pair_row", "pair_expert", "pair_weight")}
    data = b"".join(request_parts(ExpertRequest(**parts | changed)))
    with pytest.raises(Misbehaved) as refused:
        read_request(body(data), hidden_size=2)
    assert refused.value.reason is RejectReason.BAD_FRAME


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_answer_that_is_not_finite_is_a_bad_result(bad, dtype):
    data = b"".join(answer_parts(torch.tensor([[1.0, bad]], dtype=dtype)))
    with pytest.raises(Misbehaved) as refused:
        read_answer(body(data), rows=1, hidden_size=2, dtype=dtype)
    assert refused.value.reason is RejectReason.BAD_RESULT


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_infinities_that_cancel_out_are_seen_and_finite_values_whose_sum_overflows_are_right(dtype):
    def answer(*values: float) -> torch.Tensor:
        data = b"".join(answer_parts(torch.tensor([values], dtype=dtype)))
        return read_answer(body(data), rows=1, hidden_size=len(values), dtype=dtype)

    with pytest.raises(Misbehaved):
        answer(float("inf"), float("-inf"))
    assert answer(3e38, 3e38, 3e38).shape == (1, 3)


@pytest.mark.parametrize(
    ("rows", "hidden_size", "dtype"),
    [(1, 4, torch.float32), (4, 1, torch.float32), (2, 4, torch.bfloat16), (4, 2, torch.bfloat16)],
)
def test_an_answer_of_the_right_size_in_another_shape_is_refused(rows, hidden_size, dtype):
    with pytest.raises(Misbehaved, match="header"):
        read_answer(body(ANSWER_F32), rows=rows, hidden_size=hidden_size, dtype=dtype)


def test_what_is_read_is_a_view_of_the_frame():
    frame = body(REQUEST_F32)
    request = read_request(frame, hidden_size=2)
    frame[-4:] = struct.pack("<f", 8.0)
    assert request.rows[1, 1] == 8.0


@STEADY
@given(
    st.data(), st.integers(1, 5), st.integers(1, 9), st.integers(1, 6), st.sampled_from([torch.float32, torch.bfloat16])
)
def test_round_trip(data, rows, pairs, dim, dtype):
    seed = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    request = ExpertRequest(
        layer=data.draw(st.integers(0, 0xFFFFFFFF)),
        rows=torch.randn(rows, dim, generator=seed).to(dtype),
        pair_row=torch.randint(rows, (pairs,), generator=seed, dtype=torch.int32),
        pair_expert=torch.randint(1 << 20, (pairs,), generator=seed, dtype=torch.int32),
        pair_weight=torch.rand(pairs, generator=seed),
    )
    assert same(read_request(body(b"".join(request_parts(request))), hidden_size=dim), request)
    answer = read_answer(body(b"".join(answer_parts(request.rows))), rows=rows, hidden_size=dim, dtype=dtype)
    assert torch.equal(answer, request.rows)


def test_a_slice_of_a_larger_tensor_is_sent_as_its_own_values():
    request = ExpertRequest(
        5, torch.arange(8.0).view(2, 4)[:, ::2], REQUEST.pair_row.long(), REQUEST.pair_expert, REQUEST.pair_weight
    )
    read = read_request(body(b"".join(request_parts(request))), hidden_size=2)
    assert read.rows.tolist() == [[0.0, 2.0], [4.0, 6.0]]
    assert read.pair_row.tolist() == [0, 0, 1]
