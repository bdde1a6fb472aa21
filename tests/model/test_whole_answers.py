"""A worker's answers by one kernel are those that its frames and its shard make; what it leaves, it leaves."""

from __future__ import annotations

import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvasir_node.base.errors import Misbehaved
from kvasir_node.base.ids import ExpertId
from kvasir_node.model.expert_kernel import ANSWER_ROOM_BYTES
from kvasir_node.model.experts import ExpertShard
from kvasir_node.model.kernels.library import is_able
from kvasir_node.model.maths import ExpertMaths
from kvasir_node.model.threads import Threads
from kvasir_node.model.worker_frames import WholeAnswers, WorkerFrames
from kvasir_node.wire.tensors import Encoding, ExpertRequest, answer_header, request_parts

pytestmark = pytest.mark.skipif(not is_able(), reason="no kernels for this processor")
D, WIDE, E, LAYER = 96, 64, 6, 2
HELD = (0, 1, 2, 4, 5)  # 3 is missing
STORED = (torch.float32, torch.bfloat16, torch.int8)
EXACT = (Encoding.FLOAT32, Encoding.BFLOAT16)
MATHS = {
    "glu": ExpertMaths(),
    "clamped": ExpertMaths(gate="clamped", limit=0.5),
    "gptoss": ExpertMaths(gate="gptoss", limit=0.7, alpha=1.702, bias=True),
}


def parts_of(maths: ExpertMaths, dtype: torch.dtype, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"gate": (WIDE, D), "up": (WIDE, D), "down": (D, WIDE)}
    if maths.bias:
        shapes |= {"gate_bias": (WIDE,), "up_bias": (WIDE,), "down_bias": (D,)}
    return {part: (torch.randn(shape, generator=generator) / 4).to(dtype) for part, shape in shapes.items()}


def shard_of(name: str = "glu", stored: torch.dtype = torch.float32, threads: int = 1) -> ExpertShard:
    shard = ExpertShard(MATHS[name], D, WIDE, torch.float32, stored=stored, threads=Threads(threads))
    for index in HELD:
        dtype = torch.bfloat16 if stored is torch.int8 else stored
        shard.add(ExpertId(LAYER, index), parts_of(MATHS[name], dtype, index))
    return shard


def whole_of(shard: ExpertShard) -> WholeAnswers:
    kernel = shard.answer_kernel()
    assert kernel is not None
    return WholeAnswers(shard, kernel)


SHARDS = {(name, stored): shard_of(name, stored) for name in MATHS for stored in STORED} if is_able() else {}
WHOLE = {key: whole_of(shard) for key, shard in SHARDS.items()}
PLAIN = ("glu", torch.float32)


def request_for(pairs: list[tuple[int, int]], rows: int, seed: int = 0, layer: int = LAYER) -> ExpertRequest:
    generator = torch.Generator().manual_seed(seed)
    pair_row, pair_expert = torch.tensor(pairs, dtype=torch.int32).unbind(1)
    weights = torch.rand(len(pairs), generator=generator)
    return ExpertRequest(layer, torch.randn(rows, D, generator=generator), pair_row, pair_expert, weights)


def body_of(request: ExpertRequest, encoding: Encoding = Encoding.FLOAT32) -> memoryview:
    return memoryview(bytearray(b"".join(request_parts(request, encoding))))


def values_in_parts(shard: ExpertShard, body: memoryview) -> bytes:
    """Without the header, in which there is a time."""
    frames = WorkerFrames(D, by_kernel=True)
    request = frames.read(body)
    pairs = request.pair_row.long(), request.pair_expert.long(), request.pair_weight
    sums = shard.compute(request.layer, request.rows, *pairs)
    return b"".join(frames.answer(sums, request.encoding, 0.0)[1:])


def values_of(whole: WholeAnswers, body: memoryview) -> bytes | None:
    found = whole.answer(body)
    return None if found is None else b"".join(found[1][1:])


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    st.lists(st.tuples(st.integers(0, 10), st.sampled_from(HELD)), min_size=1, max_size=55, unique=True),
    st.sampled_from([(name, stored) for name in MATHS for stored in STORED]),
    st.sampled_from(EXACT),
    st.integers(0, 1000),
)
def test_an_answer_has_the_same_bytes_as_in_parts(pairs, which, encoding, seed):
    body = body_of(request_for(pairs, 11, seed), encoding)
    before = bytes(body)
    assert values_of(WHOLE[which], body) == values_in_parts(SHARDS[which], body)
    assert bytes(body) == before


@pytest.mark.parametrize("encoding", EXACT)
def test_its_header_is_that_of_its_rows_and_says_how_long_it_took(encoding):
    found = WHOLE[PLAIN].answer(body_of(request_for([(0, 1), (2, 5)], 3), encoding))
    assert found is not None
    rows, (header, values) = found
    assert rows == 3
    assert header[:-4] == answer_header(encoding, 3, D, 0.0)[:-4]
    assert 0 <= int.from_bytes(header[-4:], "little") < 1_000_000
    assert len(values) == 3 * D * (4 if encoding is Encoding.FLOAT32 else 2)


def test_a_request_larger_than_the_room_that_is_kept_has_one_of_its_own():
    rows = ANSWER_ROOM_BYTES // (4 * 3 * D) + 1
    shard, whole = SHARDS[PLAIN], WHOLE[PLAIN]
    large, small = (
        body_of(request_for([(row, row % 3) for row in range(rows)], rows)),
        body_of(request_for([(0, 1)], 1)),
    )
    for body in (small, large, small):
        assert values_of(whole, body) == values_in_parts(shard, body)


@pytest.mark.parametrize(
    "request_left",
    [
        request_for([(0, 1), (1, 3)], 2),  # an expert that is not held
        request_for([(0, 1), (1, E)], 2),  # one beyond the table
        request_for([(0, 1)], 1, layer=LAYER + 1),  # a layer of which nothing is held
        request_for([(0, 1), (2, 1)], 2),  # a row that there is not
        request_for([(0, 1), (0, -1)], 2),
        request_for([(0, 1)] * (len(HELD) + 1), 1),  # some pairs repeat others
    ],
)
@pytest.mark.parametrize("encoding", EXACT)
def test_what_it_does_not_compute_is_left_to_whoever_says_why(request_left, encoding):
    assert WHOLE[PLAIN].answer(body_of(request_left, encoding)) is None


@pytest.mark.parametrize("name", ["rows", "pair_weight"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("encoding", EXACT)
def test_law_5_what_is_not_finite_is_left(name, bad, encoding):
    request = request_for([(0, 1), (1, 2)], 2)
    getattr(request, name).view(-1)[-1] = bad
    assert WHOLE[PLAIN].answer(body_of(request, encoding)) is None


def test_int8_is_left():
    assert WHOLE[PLAIN].answer(body_of(request_for([(0, 1)], 1), Encoding.INT8)) is None


@pytest.mark.parametrize("encoding", EXACT)
def test_law_5_a_flipped_bit_anywhere_is_answered_alike_or_left(encoding):
    shard, whole = SHARDS[PLAIN], WHOLE[PLAIN]
    spelt = bytes(body_of(request_for([(0, 1), (1, 4), (1, 5)], 2), encoding))
    for position in range(len(spelt)):
        for bit in (1, 0x80):
            body = memoryview(bytearray(spelt))
            body[position] ^= bit
            try:
                values = values_of(whole, body)
            except Misbehaved:
                with pytest.raises(Misbehaved):
                    WorkerFrames(D, by_kernel=True).read(body)
                continue
            if values is not None:
                assert values == values_in_parts(shard, body)


def test_an_expert_that_came_or_went_is_seen_by_the_next_answer():
    shard = shard_of()
    whole, body = whole_of(shard), body_of(request_for([(0, 3)], 1))
    assert whole.answer(body) is None
    shard.add(ExpertId(LAYER, 3), parts_of(MATHS["glu"], torch.float32, 3))
    assert values_of(whole, body) == values_in_parts(shard, body)
    shard.remove(ExpertId(LAYER, 3))
    assert whole.answer(body) is None


def test_two_threads_with_one_each_do_not_meet():
    shard = SHARDS[PLAIN]
    bodies = [body_of(request_for([(row, 1 + number) for row in range(9)], 9, number)) for number in range(2)]
    expected = [values_in_parts(shard, body) for body in bodies]
    wrong: list[int] = []

    def repeat(number: int) -> None:
        whole = whole_of(shard)
        wrong.extend(number for _ in range(300) if values_of(whole, bodies[number]) != expected[number])

    threads = [threading.Thread(target=repeat, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_shard_that_several_threads_compute_has_none():
    assert shard_of(threads=2).answer_kernel() is None
