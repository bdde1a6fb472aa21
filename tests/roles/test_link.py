"""A worker's link: what a coordinator may send, and what it can never cause."""

from __future__ import annotations

import random
import struct
from contextlib import suppress
from dataclasses import replace

import pytest
import torch
import trio
import trio.testing
from role_fakes import EXPERTS, HIDDEN, INNER, request_for

from kvasir_node.base.errors import (
    CallTimeout,
    KvasirError,
    Misbehaved,
    Overloaded,
    PeerError,
    RejectReason,
    Unreachable,
)
from kvasir_node.base.ids import DAG_CBOR_CODEC, ExpertId, ModelId, PeerId, SliceId, cid_of
from kvasir_node.decide.placement import Assignment, StandingTold
from kvasir_node.model.checkpoint import ExpertMaths
from kvasir_node.model.experts import ExpertShard
from kvasir_node.net.memory_net import open_memory_network
from kvasir_node.net.rpc import CallStream
from kvasir_node.net.rpc_frames import Kind, pack_header
from kvasir_node.net.transport import Stream
from kvasir_node.roles.content import run_inline
from kvasir_node.roles.link import ATTACH_TIMEOUT_S, Link, compute_here
from kvasir_node.wire.messages import EXPERTS_PROTOCOL, Attachment, ExpertsMethod, Standing
from kvasir_node.wire.tensors import Encoding, ExpertRequest, computed_s_of, read_answer, request_parts, through_wire

MODEL = ModelId(cid_of(b"model", DAG_CBOR_CODEC))
PART = SliceId(0, 0, 1)


def tiny_shard(count: int = 2) -> ExpertShard:
    shard = ExpertShard(ExpertMaths(), HIDDEN, INNER)
    generator = torch.Generator().manual_seed(1)
    for index in range(count):
        wide, tall = torch.randn(INNER, HIDDEN, generator=generator), torch.randn(HIDDEN, INNER, generator=generator)
        shard.add(ExpertId(0, index), {"gate": wide, "up": wide, "down": tall})
    return shard


class Ends:
    """A coordinator's end, in the hands of a test, and the link of a worker."""

    def __init__(self, network, nursery, *, compute=compute_here, answer_delay_s=0.0) -> None:
        self.nursery = nursery
        self.coordinator, self.worker = network.transport("carl"), network.transport("ann")
        self.told: list[StandingTold] = []
        self.rows: list[int] = []
        self.ended = trio.Event()
        self.streams: list[Stream] = []
        self.calls: CallStream | None = None
        self.log: list[tuple[int, bytes]] = []
        self.answers = True
        self.refusal: KvasirError | None = None
        self.speaks_calls = True
        self.coordinator.set_handler(EXPERTS_PROTOCOL, self.serve)
        self.answer_delay_s = answer_delay_s
        self.link = self.new_link(compute)

    def new_link(self, compute) -> Link:
        return Link(
            self.coordinator.peer_id,
            MODEL,
            "float32",
            tiny_shard(),
            body_bytes_max=1 << 20,
            in_flight_max=4,
            compute=compute,
            run_blocking=run_inline,
            computed=self.rows.append,
            standing_told=self.told.append,
            answer_delay_s=self.answer_delay_s,
        )

    async def serve(self, stream: Stream) -> None:
        self.streams.append(stream)

        async def handle(method: int, body: memoryview):
            self.log.append((method, bytes(body)))
            if self.refusal is not None:
                raise self.refusal
            if not self.answers:
                await trio.sleep_forever()
            return ()

        if not self.speaks_calls:
            await trio.sleep_forever()
        self.calls = CallStream(stream, handler=handle, in_flight_max=8, body_bytes_max=1 << 20)
        await self.calls.run()

    async def open(self) -> None:
        await self.worker.connect(self.coordinator.addresses())
        await self.link.open(self.worker)
        self.nursery.start_soon(self.link.run, lambda link: self.ended.set())
        await trio.testing.wait_all_tasks_blocked()

    def set_path(self, path: str) -> None:
        self.worker.set_path(self.coordinator.peer_id, path)

    async def compute(self, *parts: bytes | memoryview) -> memoryview:
        assert self.calls is not None
        return await self.calls.call(int(ExpertsMethod.COMPUTE), *parts, timeout_s=5)

    def lease(self, part: SliceId = PART, name: str = "lease") -> Assignment:
        return Assignment(name, MODEL, "float32", part, self.coordinator.peer_id, (), PeerId("hub"))


@pytest.fixture
async def ends(autojump_clock, nursery):
    async with open_memory_network() as network:
        ends = Ends(network, nursery)
        await ends.open()
        yield ends


async def test_a_slice_is_offered_its_rows_are_answered_its_standing_is_heard_and_it_is_left(autojump_clock, ends):
    await ends.link.attach(ends.lease())
    request = request_for(PART, rows=3)
    sums = read_answer(await ends.compute(*request_parts(request)), rows=3, hidden_size=HIDDEN, dtype=torch.float32)
    assert torch.equal(sums, compute_here(tiny_shard(), request))
    await ends.calls.notify(int(ExpertsMethod.STANDING), Standing(PART, "proven").to_bytes())
    await ends.calls.notify(int(ExpertsMethod.STANDING), Standing(SliceId(0, 2, 3), "proven").to_bytes())
    await trio.sleep(0.1)
    assert await ends.link.detach(ends.lease())
    assert ends.told == [StandingTold("lease", proven=True)]
    assert ends.rows == [3]
    body = Attachment(MODEL, "float32", (PART,)).to_bytes()
    assert ends.log == [(int(ExpertsMethod.ATTACH), body), (int(ExpertsMethod.DETACH), body)]
    assert not await ends.link.detach(ends.lease())


@pytest.mark.parametrize("encoding", Encoding)
async def test_an_answer_comes_in_the_encoding_of_its_request_and_says_how_long_it_took(autojump_clock, ends, encoding):
    request = request_for(PART, rows=3)
    answer = await ends.compute(*request_parts(request, encoding))
    sums = read_answer(answer, rows=3, hidden_size=HIDDEN, dtype=encoding)
    seen = replace(request, rows=through_wire(request.rows, encoding))
    assert torch.equal(sums, through_wire(compute_here(tiny_shard(), seen), encoding))
    assert 0 < computed_s_of(answer) < 5


async def test_answers_of_a_far_worker_are_held_back_all_alike_and_a_drain_waits_for_them(autojump_clock, nursery):
    async with open_memory_network() as network:
        ends = Ends(network, nursery, answer_delay_s=0.04)
        await ends.open()
        await ends.link.attach(ends.lease())
        began_at = trio.current_time()
        async with trio.open_nursery() as callers:
            for _ in range(3):
                callers.start_soon(ends.compute, *request_parts(request_for(PART, rows=3)))
            await trio.sleep(0.02)
            await ends.link.finish_calls()
            assert trio.current_time() - began_at == pytest.approx(0.04, abs=0.005)
        assert trio.current_time() - began_at == pytest.approx(0.04, abs=0.005)


async def test_what_an_attach_was_answered_with_is_raised_and_the_slice_is_not_ours_to_detach(autojump_clock, ends):
    ends.refusal = Misbehaved(RejectReason.BAD_MESSAGE, "this coordinator does not serve 0:0-1")
    with pytest.raises(Misbehaved, match="does not serve"):
        await ends.link.attach(ends.lease())
    assert ends.link.leases() == ()


async def test_law_5_a_frozen_coordinator_costs_an_attach_its_timeout_and_is_told_of_the_leave_all_the_same(
    autojump_clock, ends
):
    ends.answers = False
    began_at = trio.current_time()
    with pytest.raises(CallTimeout):
        await ends.link.attach(ends.lease())
    assert trio.current_time() - began_at == pytest.approx(ATTACH_TIMEOUT_S)
    assert ends.link.leases() == ("lease",)  # it may have heard the offer
    assert not await ends.link.detach(ends.lease())
    assert [method for method, _ in ends.log] == [ExpertsMethod.ATTACH, ExpertsMethod.DETACH]


async def test_an_attach_that_is_cancelled_leaves_the_slice_to_be_detached(autojump_clock, ends):
    ends.answers = False
    with trio.move_on_after(1):
        await ends.link.attach(ends.lease())
    assert ends.link.leases() == ("lease",)
    ends.answers = True
    assert await ends.link.detach(ends.lease())


async def test_a_coordinator_that_vanishes_during_an_attach_ends_it_at_once(autojump_clock, ends):
    ends.answers = False
    began_at = trio.current_time()
    async with trio.open_nursery() as nursery:

        async def attach() -> None:
            with pytest.raises(Unreachable):
                await ends.link.attach(ends.lease())

        nursery.start_soon(attach)
        await trio.sleep(0.1)
        await ends.streams[0].reset()
    await ends.ended.wait()
    assert trio.current_time() - began_at < 1
    with pytest.raises(Unreachable):
        await ends.link.attach(ends.lease())


@pytest.mark.parametrize(
    "sent",
    [
        b"\xff" * 64,
        pack_header(Kind.NOTICE, ExpertsMethod.STANDING, 0, 1) + b"\xff",
        pack_header(Kind.NOTICE, 99, 0, 0),
        pack_header(Kind.RESULT, 0, 77, 0),
        pack_header(Kind.CALL, ExpertsMethod.COMPUTE, 1, 1 << 30),
        pack_header(Kind.CALL, ExpertsMethod.COMPUTE, 1, 100) + b"half",
    ],
    ids=["noise", "bad standing", "unknown notice", "answer to nothing", "too large", "mid-frame"],
)
async def test_a_coordinator_that_sends_anything_or_vanishes_mid_frame_ends_the_link_and_nothing_else(
    autojump_clock, ends, sent
):
    # distributed-llama issues/140; this nursery would end with whatever the link raised
    await ends.link.attach(ends.lease())
    await ends.streams[0].write(sent)
    if sent.endswith(b"half"):
        await trio.sleep(0.1)
        await ends.streams[0].reset()
    with trio.fail_after(1):
        await ends.ended.wait()
    assert ends.link.leases() == ("lease",)  # whoever hears of the end is told whom it concerns


async def test_random_bytes_never_leave_the_link(autojump_clock, nursery):
    rng = random.Random(11)
    async with open_memory_network() as network:
        for number in range(40):
            ends = Ends(network, nursery)
            await ends.open()
            kind = rng.choice(list(Kind))
            junk = rng.randbytes(rng.randrange(200))
            header = pack_header(kind, rng.randrange(6), rng.randrange(4), rng.randrange(300)) if number % 2 else b""
            await ends.streams[0].write(header + junk)
            await trio.sleep(0.1)
            await ends.streams[0].reset()
            with trio.fail_after(1):
                await ends.ended.wait()


async def test_law_7_a_flood_of_notices_fills_nothing(autojump_clock, ends):
    await ends.link.attach(ends.lease())
    notice = Standing(PART, "suspect").to_bytes()
    frame = pack_header(Kind.NOTICE, ExpertsMethod.STANDING, 0, len(notice)) + notice
    await ends.streams[0].write(frame * 20_000)
    await trio.sleep(0.1)
    assert not ends.ended.is_set()
    assert len(ends.told) == 20_000


@pytest.mark.parametrize("field", range(7))
def test_every_field_of_a_request_header_is_checked(field):
    """FIELD 52: a flipped header is refused, or is a right request of another shape; never a crash."""
    body = bytearray(b"".join(bytes(part) for part in request_parts(request_for(PART))))
    shape = "<HBBIIII"
    for value in (0, 1, 2, 255, 65_535, 2**31, 2**32 - 1):
        fields = list(struct.unpack_from(shape, body))
        size = {"H": 16, "B": 8, "I": 32}[shape[1 + field]]
        fields[field] = value % (1 << size)
        struct.pack_into(shape, mutated := bytearray(body), 0, *fields)

        async def answer(mutated: bytearray = mutated) -> None:
            async with open_memory_network() as network, trio.open_nursery() as nursery:
                link = Ends(network, nursery).link
                with suppress(Misbehaved, Overloaded):
                    await link._handle(int(ExpertsMethod.COMPUTE), memoryview(mutated))

        trio.run(answer)


async def test_pairs_that_repeat_are_refused_before_they_take_memory(autojump_clock, ends):
    await ends.link.attach(ends.lease())
    request = request_for(PART, rows=1)
    pairs = 60_000
    flood = ExpertRequest(
        0,
        request.rows,
        torch.zeros(pairs, dtype=torch.int32),
        torch.zeros(pairs, dtype=torch.int32),
        torch.ones(pairs),
    )
    with pytest.raises(Misbehaved, match="repeat some"):
        await ends.compute(*request_parts(flood))
    assert ends.rows == []
    await ends.compute(*request_parts(request))
    assert ends.rows == [1]


async def test_law_8_an_expert_that_is_not_held_is_an_overload_and_no_lie(autojump_clock, ends):
    await ends.link.attach(ends.lease())
    with pytest.raises(Overloaded, match="not held"):
        await ends.compute(*request_parts(request_for(SliceId(0, 1, EXPERTS - 1))))


async def test_a_bug_in_the_computation_costs_its_call_alone(autojump_clock, nursery, caplog):
    def broken(shard, request):
        raise ZeroDivisionError

    async with open_memory_network() as network:
        ends = Ends(network, nursery, compute=broken)
        await ends.open()
        await ends.link.attach(ends.lease())
        for _ in range(3):
            with pytest.raises(PeerError, match="ZeroDivisionError"):
                await ends.compute(*request_parts(request_for(PART)))
        await ends.link.finish_calls()
        assert not ends.ended.is_set()


async def test_a_coordinator_that_opens_no_stream_is_unreachable(autojump_clock, nursery):
    async with open_memory_network() as network:
        ends = Ends(network, nursery)
        with pytest.raises(Unreachable):
            await ends.link.open(ends.worker)


async def test_a_link_through_a_relay_moves_to_the_direct_way_and_loses_no_call(autojump_clock, nursery):
    async with open_memory_network() as network:
        ends = Ends(network, nursery, answer_delay_s=2.0)
        await ends.worker.connect(ends.coordinator.addresses())
        ends.set_path("relay")
        await ends.open()
        await ends.link.attach(ends.lease())
        await trio.sleep(5)
        assert not ends.ended.is_set()
        request = request_for(PART, rows=3)
        answers = []

        async def call():
            answers.append(await ends.compute(*request_parts(request)))

        nursery.start_soon(call)
        await trio.sleep(1)
        ends.set_path("direct")
        with trio.fail_after(10):
            await ends.ended.wait()
        assert len(answers) == 1
        methods = [method for method, _ in ends.log]
        assert methods == [ExpertsMethod.ATTACH, ExpertsMethod.DETACH]
        assert ends.link.leases() == ("lease",)  # so that whoever opened the link attaches them again


async def test_under_load_the_move_to_the_direct_way_loses_no_call_and_repeats_none(autojump_clock, nursery):
    computed = 0

    def counted(shard, request):
        nonlocal computed
        computed += 1
        return compute_here(shard, request)

    async with open_memory_network() as network:
        ends = Ends(network, nursery, compute=counted, answer_delay_s=0.3)
        await ends.worker.connect(ends.coordinator.addresses())
        ends.set_path("relay")
        await ends.open()
        await ends.link.attach(ends.lease())
        request = request_for(PART, rows=3)
        sent, answers = 0, []

        def is_attached():
            methods = [method for method, _ in ends.log]
            return methods.count(ExpertsMethod.ATTACH) > methods.count(ExpertsMethod.DETACH)

        async def call():
            answers.append(bytes(await ends.compute(*request_parts(request))))

        async def keep_calling():
            """As a coordinator does: to whoever is attached, all the time."""
            nonlocal sent
            while True:
                if is_attached():
                    sent += 1
                    nursery.start_soon(call)
                await trio.sleep(0.1)

        nursery.start_soon(keep_calling)
        await trio.sleep(3)
        ends.set_path("direct")
        with trio.fail_after(10):
            await ends.ended.wait()
        assert not is_attached()
        at_move = sent
        second = ends.new_link(counted)
        await second.open(ends.worker)
        nursery.start_soon(second.run, lambda link: None)
        await second.attach(ends.lease())
        await trio.sleep(3)
        ends.log.append((int(ExpertsMethod.DETACH), b""))  # no more calls
        await trio.sleep(1)
        assert sent > at_move > 20
        assert len(answers) == computed == sent
