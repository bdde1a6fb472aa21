import struct
import tracemalloc
from dataclasses import replace

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from wire_samples import STEADY, flips

from kvasir_node.base.errors import Misbehaved, RejectReason
from kvasir_node.wire.tensors import (
    PAIRS_MAX,
    ROWS_MAX,
    SCALE_MIN,
    Encoding,
    ExpertRequest,
    answer_parts,
    computed_s_of,
    read_answer,
    read_request,
    request_parts,
    through_wire,
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
ANSWER_HEAD = "0002000000020000002a000000"
ANSWER_F32 = "414b01" + ANSWER_HEAD + "0000803f000000c00000003f00004040"
# Scales 2 and 3; levels 64 (of 63.5, to even), -127, 21 (of 21.2), 127.
REQUEST_INT8 = "514b03" + HEAD + "0000004000004040" + "4081157f"
ANSWER_INT8 = "414b03" + ANSWER_HEAD + "0000004000004040" + "4081157f"
INT8_ROWS = torch.tensor([[64 / 127 * 2, -2.0], [21 / 127 * 3, 3.0]])
REQUESTS = [REQUEST_F32, REQUEST_BF16, REQUEST_INT8]
ANSWERS = {Encoding.FLOAT32: ANSWER_F32, Encoding.INT8: ANSWER_INT8}
COMPUTED_S = 42e-6


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


def test_golden_vector_of_a_request_in_int8():
    assert b"".join(request_parts(REQUEST, Encoding.INT8)).hex() == REQUEST_INT8
    request = read_request(body(REQUEST_INT8), hidden_size=2)
    assert request.encoding is Encoding.INT8
    torch.testing.assert_close(request.rows, INT8_ROWS, rtol=1e-6, atol=0)
    assert request.rows[0, 1] == -2.0
    assert request.rows[1, 1] == 3.0


@pytest.mark.parametrize("encoding", ANSWERS)
def test_golden_vector_of_an_answer(encoding):
    assert b"".join(answer_parts(ROWS, encoding, COMPUTED_S)).hex() == ANSWERS[encoding]
    sums = read_answer(body(ANSWERS[encoding]), rows=2, hidden_size=2, dtype=encoding)
    assert torch.equal(sums, through_wire(ROWS, encoding))
    assert computed_s_of(body(ANSWERS[encoding])) == pytest.approx(COMPUTED_S)


def test_how_long_was_computed_is_read_of_a_header_alone_and_never_wraps_around():
    assert computed_s_of(body(ANSWER_F32)[:16]) == pytest.approx(COMPUTED_S)
    assert computed_s_of(body(b"".join(answer_parts(ROWS, None, 1e6)))) == pytest.approx(4294.967295)
    assert computed_s_of(body(b"".join(answer_parts(ROWS)))) == 0.0
    with pytest.raises(Misbehaved):
        computed_s_of(body(ANSWER_F32)[:15])


@pytest.mark.parametrize("spelling", REQUESTS)
def test_each_flip_of_a_request_is_refused_or_is_another_request_that_adds_up(spelling):
    for flipped in flips(bytes.fromhex(spelling)):
        try:
            request = read_request(body(flipped), hidden_size=2)
        except Misbehaved:
            continue
        assert b"".join(request_parts(request, request.encoding)) == flipped
        assert int(request.pair_row.max()) < request.rows.shape[0]
        assert int(request.pair_row.min()) >= 0
        assert int(request.pair_expert.min()) >= 0
        assert bool(torch.isfinite(request.rows).all() & torch.isfinite(request.pair_weight).all())


@pytest.mark.parametrize("encoding", ANSWERS)
def test_each_flip_of_an_answer_is_refused_or_is_another_finite_answer(encoding):
    for flipped in flips(bytes.fromhex(ANSWERS[encoding])):
        try:
            sums = read_answer(body(flipped), rows=2, hidden_size=2, dtype=encoding)
        except Misbehaved:
            continue
        spelt = b"".join(answer_parts(sums, encoding))
        assert (spelt[:12], spelt[16:]) == (flipped[:12], flipped[16:])  # between them: any microseconds
        assert bool(torch.isfinite(sums).all())


@pytest.mark.parametrize("spelling", [*REQUESTS, *ANSWERS.values()])
def test_each_cut_and_each_surplus_is_refused(spelling):
    whole = bytes.fromhex(spelling)
    for data in (*(whole[:length] for length in range(len(whole))), whole + b"\0"):
        with pytest.raises(Misbehaved):
            read_request(body(data), hidden_size=2)
        for encoding in Encoding:
            with pytest.raises(Misbehaved):
                read_answer(body(data), rows=2, hidden_size=2, dtype=encoding)


@STEADY
@given(st.binary(max_size=120))
def test_arbitrary_bytes_are_refused(data):
    with pytest.raises(Misbehaved):
        read_request(body(data), hidden_size=2)
    for encoding in Encoding:
        with pytest.raises(Misbehaved):
            read_answer(body(b"\0" + data), rows=1, hidden_size=2, dtype=encoding)


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
@pytest.mark.parametrize("encoding", Encoding)
def test_a_request_that_no_worker_could_answer_is_refused(changed, encoding):
    data = b"".join(request_parts(replace(REQUEST, **changed), encoding))
    with pytest.raises(Misbehaved) as refused:
        read_request(body(data), hidden_size=2)
    assert refused.value.reason is RejectReason.BAD_FRAME


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("encoding", Encoding)
def test_an_answer_that_is_not_finite_is_a_bad_result(bad, encoding):
    data = b"".join(answer_parts(torch.tensor([[1.0, bad]]), encoding))
    with pytest.raises(Misbehaved) as refused:
        read_answer(body(data), rows=1, hidden_size=2, dtype=encoding)
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
    read = read_request(body(b"".join(request_parts(request))), hidden_size=dim)
    assert same(read, request)
    assert read.encoding is Encoding.of(dtype)
    answer = read_answer(body(b"".join(answer_parts(request.rows))), rows=rows, hidden_size=dim, dtype=dtype)
    assert torch.equal(answer, request.rows)


def test_a_slice_of_a_larger_tensor_is_sent_as_its_own_values():
    request = ExpertRequest(
        5, torch.arange(8.0).view(2, 4)[:, ::2], REQUEST.pair_row.long(), REQUEST.pair_expert, REQUEST.pair_weight
    )
    read = read_request(body(b"".join(request_parts(request))), hidden_size=2)
    assert read.rows.tolist() == [[0.0, 2.0], [4.0, 6.0]]
    assert read.pair_row.tolist() == [0, 0, 1]


finite_rows = st.lists(
    st.lists(st.floats(-(2.0**127), 2.0**127, width=32, allow_subnormal=False), min_size=3, max_size=3),
    min_size=1,
    max_size=4,
).map(torch.tensor)


@STEADY
@given(finite_rows)
@example(torch.tensor([[0.0, 0.0, 7.2e-31], [0.0, 0.0, SCALE_MIN / 300], [SCALE_MIN, 0.0, -SCALE_MIN / 2]]))
def test_int8_is_within_half_a_level_has_one_spelling_and_is_what_the_other_end_reads(rows):
    parts = b"".join(answer_parts(rows, Encoding.INT8))
    read = read_answer(body(parts), rows=len(rows), hidden_size=3, dtype=Encoding.INT8)
    largest = rows.abs().amax(1)
    scale = largest.clamp_min(SCALE_MIN)  # a row of less than that is a few levels of it, or 0
    assert torch.equal(read, through_wire(rows, Encoding.INT8))
    # A product of float32 may round a value over the middle between two levels.
    assert bool(((read - rows).abs() <= scale[:, None] * Encoding.INT8.rounding * (1 + 1e-4)).all())
    assert b"".join(answer_parts(read, Encoding.INT8)) == parts
    assert torch.equal(read.abs().amax(1)[largest >= SCALE_MIN], largest[largest >= SCALE_MIN])


@STEADY
@given(finite_rows)
def test_bfloat16_is_rounded_to_the_nearest_and_is_what_the_other_end_reads(rows):
    rows = rows / 2  # the largest float32 rounds to infinity
    data = body(b"".join(answer_parts(rows, Encoding.BFLOAT16)))
    read = read_answer(data, rows=len(rows), hidden_size=3, dtype=Encoding.BFLOAT16)
    assert read.dtype is torch.bfloat16
    assert torch.equal(read, through_wire(rows, Encoding.BFLOAT16))
    assert bool(((read.float() - rows).abs() <= rows.abs() * Encoding.BFLOAT16.rounding + 1e-38).all())


@pytest.mark.parametrize(
    ("scale", "levels"),
    [
        (float("nan"), (5, 127)),
        (float("inf"), (5, 127)),
        (-1.0, (5, 127)),
        (SCALE_MIN / 2, (5, 127)),
        (0.0, (0, 0)),
        (-0.0, (0, 0)),
        (1.0, (0, 0)),
        (1.0, (5, 126)),
        (1.0, (5, -126)),
        (1.0, (127, -128)),
        (1.0, (-128, 0)),
    ],
)
def test_a_scale_that_does_not_fit_its_levels_is_refused(scale, levels):
    values = struct.pack("<ff2b2b", 1.0, scale, 127, 0, *levels)
    answer = bytes.fromhex(ANSWER_INT8)[:16] + values
    with pytest.raises(Misbehaved) as refused:
        read_answer(body(answer), rows=2, hidden_size=2, dtype=Encoding.INT8)
    assert refused.value.reason is RejectReason.BAD_RESULT
    request = bytes.fromhex(REQUEST_INT8)[: -len(values)] + values
    with pytest.raises(Misbehaved) as refused:
        read_request(body(request), hidden_size=2)
    assert refused.value.reason is RejectReason.BAD_FRAME


def test_an_answer_in_another_encoding_of_the_same_size_is_refused():
    data = body(b"".join(answer_parts(torch.ones(2, 4), Encoding.BFLOAT16)))  # 8 bytes a row, as int8 has
    with pytest.raises(Misbehaved, match="header"):
        read_answer(data, rows=2, hidden_size=4, dtype=Encoding.INT8)


def test_what_is_sent_in_the_dtype_it_is_computed_in_is_not_copied():
    sums = torch.ones(2, 4)
    _, values = answer_parts(sums, Encoding.FLOAT32)
    sums[0, 0] = 5.0
    assert struct.unpack_from("<f", values) == (5.0,)


def test_the_bounds_of_rounding_are_met_by_real_rows_heavy_columns_included():
    rows = torch.randn(4096, 64, generator=torch.Generator().manual_seed(2))
    rows[:, :3] *= 40
    scale = rows.abs().amax(1)
    for encoding in Encoding:
        worst = float(((through_wire(rows, encoding).float() - rows).abs().amax(1) / scale).max())
        assert encoding.rounding * 0.99 <= worst <= encoding.rounding * (1 + 1e-4)
