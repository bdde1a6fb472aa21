"""A worker's frames by kernel are what `wire.tensors` makes of them: same values, same refusals, same bytes."""

from __future__ import annotations

import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvasir_node.base.errors import Misbehaved
from kvasir_node.model.kernels.library import kernels
from kvasir_node.model.worker_frames import WorkerFrames
from kvasir_node.wire.tensors import Encoding, ExpertRequest, answer_parts, read_request, request_parts

WIDTH = 8
EXACT = [Encoding.FLOAT32, Encoding.BFLOAT16]


@pytest.fixture(scope="module", params=["kernel", "torch"])
def frames(request):
    by_kernel = request.param == "kernel"
    if by_kernel and "widen" not in kernels():
        pytest.skip("no kernels for this processor")
    return WorkerFrames(WIDTH, by_kernel=by_kernel)


def drawn(seed: int, rows: int, pairs: int) -> ExpertRequest:
    draw = torch.Generator().manual_seed(seed)
    return ExpertRequest(
        layer=3,
        rows=torch.randn(rows, WIDTH, generator=draw),
        pair_row=torch.randint(rows, (pairs,), generator=draw, dtype=torch.int32),
        pair_expert=torch.randint(99, (pairs,), generator=draw, dtype=torch.int32),
        pair_weight=torch.rand(pairs, generator=draw),
    )


def body_of(request: ExpertRequest, encoding: Encoding) -> memoryview:
    return memoryview(bytearray(b"".join(request_parts(request, encoding))))


def assert_same(read: ExpertRequest, expected: ExpertRequest) -> None:
    assert (read.layer, read.encoding) == (expected.layer, expected.encoding)
    for name in ("rows", "pair_row", "pair_expert", "pair_weight"):
        wanted = getattr(expected, name)
        assert torch.equal(getattr(read, name).to(wanted.dtype), wanted)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 1000),
    rows=st.integers(1, 40),
    pairs=st.integers(1, 70),
    encoding=st.sampled_from(list(Encoding)),
)
def test_a_request_is_read_as_it_was_spelt(frames, seed, rows, pairs, encoding):
    body = body_of(drawn(seed, rows, pairs), encoding)
    expected, read = read_request(body, hidden_size=WIDTH), frames.read(body)
    assert_same(read, expected)


@pytest.mark.parametrize("by_kernel", [False, True])
def test_rows_are_widened_where_a_kernel_computes_experts_from_them(by_kernel):
    if by_kernel and "widen" not in kernels():
        pytest.skip("no kernels for this processor")
    read = WorkerFrames(WIDTH, by_kernel=by_kernel).read(body_of(drawn(0, 5, 9), Encoding.BFLOAT16))
    wide = (torch.float32, torch.int64, torch.int64)
    narrow = (torch.bfloat16, torch.int32, torch.int32)
    assert (read.rows.dtype, read.pair_row.dtype, read.pair_expert.dtype) == (wide if by_kernel else narrow)


@pytest.mark.parametrize("encoding", EXACT)
@pytest.mark.parametrize("place", [0, 20, 62])
@pytest.mark.parametrize(
    ("name", "bad", "words"),
    [
        ("pair_row", 7, "outside the 7 rows"),
        ("pair_row", -1, "outside the 7 rows"),
        ("pair_expert", -1, "outside the 7 rows"),
        ("pair_weight", float("nan"), "a weight is not finite"),
        ("pair_weight", float("-inf"), "a weight is not finite"),
        ("rows", float("nan"), "a row holds NaN or infinity"),
        ("rows", float("inf"), "a row holds NaN or infinity"),
    ],
)
def test_law_5_what_does_not_add_up_is_refused_in_the_same_words(frames, encoding, place, name, bad, words):
    request = drawn(1, 7, 63)
    array = getattr(request, name).view(-1)
    array[place % array.numel()] = bad
    body = body_of(request, encoding)
    with pytest.raises(Misbehaved, match=words) as said:
        frames.read(body)
    with pytest.raises(Misbehaved) as expected:
        read_request(body, hidden_size=WIDTH)
    assert (said.value.reason, str(said.value)) == (expected.value.reason, str(expected.value))


@pytest.mark.parametrize("encoding", EXACT)
def test_the_largest_finite_values_are_read(frames, encoding):
    request = drawn(4, 3, 4)
    request.rows.fill_(torch.finfo(torch.bfloat16).max)
    request.pair_weight.fill_(torch.finfo(torch.float32).max)
    read = frames.read(body_of(request, encoding))
    assert torch.equal(read.rows.float(), request.rows)
    assert torch.equal(read.pair_weight, request.pair_weight)


@pytest.mark.parametrize("encoding", EXACT)
def test_law_5_a_flipped_bit_anywhere_is_read_alike_or_refused_alike(frames, encoding):
    spelt = bytes(body_of(drawn(2, 3, 4), encoding))
    for position in range(len(spelt)):
        for bit in (1, 0x40, 0x80):
            body = memoryview(bytearray(spelt))
            body[position] ^= bit
            try:
                expected = read_request(body, hidden_size=WIDTH)
            except Misbehaved as error:
                with pytest.raises(Misbehaved, match=f"^{re.escape(str(error))}$"):
                    frames.read(body)
            else:
                assert_same(frames.read(body), expected)


def test_law_5_a_frame_that_is_cut_short_or_too_long_is_refused(frames):
    spelt = bytes(body_of(drawn(3, 2, 2), Encoding.FLOAT32))
    for data in (spelt[:-1], spelt + b"x", spelt[:19], b""):
        with pytest.raises(Misbehaved):
            frames.read(memoryview(bytearray(data)))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(seed=st.integers(0, 1000), rows=st.integers(1, 40), encoding=st.sampled_from([None, *Encoding]))
def test_an_answer_has_the_same_bytes(frames, seed, rows, encoding):
    sums = torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(seed)) * 10.0 ** (seed % 60 - 30)
    assert b"".join(frames.answer(sums, encoding, 0.5)) == b"".join(answer_parts(sums, encoding, 0.5))


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), 3.4e38, -0.0, 1e-42, 1.00390625, 1.01171875])
def test_an_answer_rounds_as_torch_does(frames, value):
    sums = torch.full((2, WIDTH), value)
    expected = answer_parts(sums, Encoding.BFLOAT16)
    assert b"".join(frames.answer(sums, Encoding.BFLOAT16, 0.0)) == b"".join(expected)


def test_an_answer_that_is_not_a_number_stays_none(frames):
    sums = torch.full((1, WIDTH), float("nan"))
    values = b"".join(frames.answer(sums, Encoding.BFLOAT16, 0.0)[1:])
    assert torch.frombuffer(bytearray(values), dtype=torch.bfloat16).isnan().all()
