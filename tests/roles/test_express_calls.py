"""A worker's link over an express channel: a thread computes, the loop drains, and the stream takes over at its end."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import trio
import trio.testing
from role_fakes import EXPERTS, HIDDEN, INNER, request_for

from kvasir_node.base.errors import Misbehaved, Overloaded, PeerError, RejectReason, Unreachable
from kvasir_node.base.ids import DAG_CBOR_CODEC, ExpertId, ModelId, PeerId, SliceId, cid_of
from kvasir_node.base.settings import NetworkSettings
from kvasir_node.decide.placement import Assignment
from kvasir_node.model.checkpoint import ExpertMaths
from kvasir_node.model.experts import ExpertShard
from kvasir_node.model.kernels.library import is_able
from kvasir_node.net.express import ExpressChannel, result_of
from kvasir_node.net.libp2p_host import Libp2pTransport, open_libp2p_transport
from kvasir_node.net.rpc import CallStream
from kvasir_node.net.transport import Stream
from kvasir_node.roles import express_calls
from kvasir_node.roles import link as links
from kvasir_node.roles.content import run_inline
from kvasir_node.roles.express_calls import ExpressCalls
from kvasir_node.roles.link import Compute, Link, compute_here
from kvasir_node.wire.messages import EXPERTS_PROTOCOL, ExpertsMethod
from kvasir_node.wire.tensors import Encoding, ExpertRequest, answer_parts, read_answer, read_request, request_parts

MODEL = ModelId(cid_of(b"model", DAG_CBOR_CODEC))
PART = SliceId(0, 0, 1)
RETRY_S = 0.1
LEASE = Assignment("lease", MODEL, "float32", PART, PeerId("carl"), (), PeerId("hub"))


def tiny_shard(hidden: int = HIDDEN, inner: int = INNER) -> ExpertShard:
    shard = ExpertShard(ExpertMaths(), hidden, inner)
    generator = torch.Generator().manual_seed(1)
    for index in range(2):
        wide, tall = torch.randn(inner, hidden, generator=generator), torch.randn(hidden, inner, generator=generator)
        shard.add(ExpertId(0, index), {"gate": wide, "up": wide, "down": tall})
    return shard


class Coordinator:
    """A coordinator's end, in the hands of a test."""

    def __init__(self, transport: Libp2pTransport) -> None:
        self.transport = transport
        self.offers = True
        self.invitation: bytes | None = None  # instead of a right one
        self.asked: list[str] = []
        self.channels: list[ExpressChannel] = []
        self.calls: CallStream | None = None
        self.came = trio.Event()
        transport.set_handler(EXPERTS_PROTOCOL, self.serve)

    async def serve(self, stream: Stream) -> None:
        async def handle(method: int, body: memoryview) -> Sequence[bytes]:
            self.asked.append(ExpertsMethod(method).name)
            if method != ExpertsMethod.EXPRESS:
                return ()
            if not self.offers:
                return (b"",)
            return (self.invitation or self.transport.invite(stream.peer, self.arrived) or b"",)

        self.calls = CallStream(stream, handler=handle, in_flight_max=8, body_bytes_max=1 << 20)
        await self.calls.run()

    def arrived(self, channel: ExpressChannel) -> None:
        self.channels.append(channel)
        self.came.set()
        self.came = trio.Event()

    async def ask(self, *parts: bytes | memoryview, call_id: int = 1) -> memoryview:
        """One call over the newest channel. Raises the error it is answered with."""
        channel = self.channels[-1]
        channel.send(call_id, parts, 1.0)
        got = await trio.to_thread.run_sync(channel.receive, 5.0)
        assert got is not None
        assert got[0] == call_id
        result = result_of(got[1])
        if not isinstance(result, memoryview):
            raise result
        return result


class Ends:
    def __init__(self, coordinator: Coordinator, link: Link, worker: Libp2pTransport, rows: list[int]) -> None:
        self.coordinator, self.link, self.worker, self.rows = coordinator, link, worker, rows
        self.ended = trio.Event()

    async def attached(self) -> ExpressChannel:
        came = self.coordinator.came
        await self.link.attach(LEASE)
        with trio.fail_after(5):
            await came.wait()
        return self.coordinator.channels[-1]


OpenEnds = Callable[..., Ends]


@asynccontextmanager
async def ends_with(
    folder: Path,
    *,
    compute: Compute = compute_here,
    express: bool = True,
    answer_delay_s: float = 0.0,
    shard: ExpertShard | None = None,
) -> AsyncIterator[Ends]:
    settings = NetworkSettings(listen=("/ip4/127.0.0.1/tcp/0",))
    async with AsyncExitStack() as stack:
        worker, carl = [
            await stack.enter_async_context(open_libp2p_transport(settings, folder / name)) for name in ("ann", "carl")
        ]
        changes = carl.watch()
        await worker.connect(carl.addresses())
        await changes.receive()
        rows: list[int] = []
        link = Link(
            carl.peer_id,
            MODEL,
            "float32",
            shard or tiny_shard(),
            body_bytes_max=1 << 20,
            in_flight_max=4,
            compute=compute,
            run_blocking=run_inline,
            computed=rows.append,
            standing_told=lambda told: None,
            answer_delay_s=answer_delay_s,
            express=express,
        )
        ends = Ends(Coordinator(carl), link, worker, rows)
        await link.open(worker)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(link.run, lambda link: ends.ended.set())
            yield ends
            link.close()
            with trio.fail_after(5):
                await ends.ended.wait()


def express_threads() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name.startswith("express ")]


def assert_no_thread_is_left() -> None:
    for thread in express_threads():
        thread.join(5)  # its last act is to tell the loop, which may be quicker
        assert not thread.is_alive()


async def test_a_link_answers_over_its_channel_with_the_very_sums_and_its_loop_hears_the_rows(tmp_path):
    async with ends_with(tmp_path) as ends:
        await ends.attached()
        for rows in (1, 3, 2):
            request = request_for(PART, rows)
            answer = await ends.coordinator.ask(*request_parts(request), call_id=rows)
            sums = read_answer(answer, rows=rows, hidden_size=HIDDEN, dtype=torch.float32)
            assert torch.equal(sums, compute_here(tiny_shard(), request))
        assert len(express_threads()) == 1
    assert ends.rows == [1, 3, 2]
    assert ends.coordinator.asked == ["ATTACH", "EXPRESS"]
    assert_no_thread_is_left()


def with_pair(request: ExpertRequest, row: int, expert: int) -> ExpertRequest:
    """Its last pair is this one."""
    pair_row, pair_expert = request.pair_row.clone(), request.pair_expert.clone()
    pair_row[-1], pair_expert[-1] = row, expert
    return replace(request, pair_row=pair_row, pair_expert=pair_expert)


@pytest.mark.skipif(not is_able(), reason="no kernels for this processor")
async def test_where_a_kernel_answers_whole_requests_a_link_says_the_same_as_in_parts(tmp_path):
    shard = tiny_shard(64, 32)
    assert shard.answer_kernel() is not None
    request = replace(request_for(PART, 3), rows=torch.randn(3, 64, generator=torch.Generator().manual_seed(5)))
    bad_rows = request.rows.clone()
    bad_rows[1, 7] = float("nan")
    refused = (
        (with_pair(request, 3, 0), Misbehaved, "outside the 3 rows"),
        (with_pair(request, 0, -1), Misbehaved, "outside the 3 rows"),
        (with_pair(request, 0, 2), Overloaded, "not held"),
        (with_pair(request, 0, 2**31 - 1), Overloaded, "not held"),
        (replace(request, rows=bad_rows), Misbehaved, "NaN"),
        (replace(request, layer=1), Overloaded, "not held"),
    )
    async with ends_with(tmp_path, shard=shard) as ends:
        await ends.attached()
        for encoding in (Encoding.FLOAT32, Encoding.BFLOAT16, Encoding.INT8):
            parts = request_parts(request, encoding)
            answer = await ends.coordinator.ask(*parts)
            read = read_request(memoryview(bytearray(b"".join(parts))), hidden_size=64)
            expected = answer_parts(compute_here(shard, replace(read, rows=read.rows.float())), encoding)
            assert answer[16:] == b"".join(expected)[16:]
        for bad, error, match in refused:
            with pytest.raises(error, match=match):
                await ends.coordinator.ask(*request_parts(bad))
    assert ends.rows == [3, 3, 3]


@pytest.mark.parametrize("why", ["not offered", "not wanted", "nonsense"])
async def test_without_a_channel_the_stream_serves_as_before(tmp_path, why):
    async with ends_with(tmp_path, express=why != "not wanted") as ends:
        coordinator = ends.coordinator
        coordinator.offers = why != "not offered"
        coordinator.invitation = b"nonsense" if why == "nonsense" else None
        await ends.link.attach(LEASE)
        for _ in range(3):
            assert coordinator.calls is not None
            await coordinator.calls.call(int(ExpertsMethod.COMPUTE), *request_parts(request_for(PART)), timeout_s=5)
        await ends.link.finish_calls()
    assert ends.rows == [2, 2, 2]
    assert coordinator.asked == ["ATTACH"] if why == "not wanted" else ["ATTACH", "EXPRESS"]
    assert not coordinator.channels


async def test_law_8_what_is_wrong_with_a_call_is_its_answer_and_the_channel_goes_on(tmp_path, caplog):
    broken = [True]

    def compute(shard: ExpertShard, request: ExpertRequest) -> torch.Tensor:
        if broken.pop():
            raise ZeroDivisionError
        return compute_here(shard, request)

    async with ends_with(tmp_path, compute=compute) as ends:
        await ends.attached()
        right = request_parts(request_for(PART))
        with pytest.raises(Overloaded, match="not held"):
            await ends.coordinator.ask(*request_parts(request_for(SliceId(0, 1, EXPERTS - 1))))
        with pytest.raises(Misbehaved, match="header") as refused:
            await ends.coordinator.ask(b"\xff" * 100)
        assert refused.value.reason is RejectReason.BAD_FRAME
        with pytest.raises(PeerError, match="ZeroDivisionError"):
            await ends.coordinator.ask(*right)
        broken.append(False)
        await ends.coordinator.ask(*right)
    assert ends.rows == [2]


async def test_a_drain_waits_for_what_is_computed_and_for_what_came_behind_it(tmp_path):
    began, go_on = threading.Event(), threading.Event()

    def compute(shard: ExpertShard, request: ExpertRequest) -> torch.Tensor:
        began.set()
        go_on.wait(5)
        return compute_here(shard, request)

    async with ends_with(tmp_path, compute=compute) as ends:
        channel = await ends.attached()
        with trio.fail_after(5):
            await ends.link.finish_calls()  # nothing is under way
        for call_id in (1, 2, 3):
            channel.send(call_id, request_parts(request_for(PART)), 1.0)
        await trio.to_thread.run_sync(began.wait, 5)
        with trio.move_on_after(0.05) as waiting:
            await ends.link.finish_calls()
        assert waiting.cancelled_caught
        go_on.set()
        with trio.fail_after(5):
            await ends.link.finish_calls()
        got = [channel.receive_now() for _ in range(3)]
        assert [frame and frame[0] for frame in got] == [1, 2, 3]


async def test_a_call_without_rows_is_answered_and_not_counted(tmp_path):
    async with ends_with(tmp_path) as ends:
        ends.link._express_answer = lambda: lambda body: (0, (b"here",))  # pyright: ignore[reportAttributeAccessIssue]
        await ends.attached()
        assert await ends.coordinator.ask() == b"here"
    assert ends.rows == []


async def test_an_echo_comes_back_as_late_as_any_answer_and_is_not_counted(tmp_path):
    async with ends_with(tmp_path, answer_delay_s=0.05) as ends:
        channel = await ends.attached()
        for size in (0, 10_000):
            assert 0.05 <= await trio.to_thread.run_sync(channel.echo_s, size, 5.0) < 5.0
    assert ends.rows == []


async def test_answers_of_a_far_worker_are_held_back(tmp_path):
    async with ends_with(tmp_path, answer_delay_s=0.05) as ends:
        await ends.attached()
        began_at = trio.current_time()
        await ends.coordinator.ask(*request_parts(request_for(PART)))
        assert trio.current_time() - began_at >= 0.05


@pytest.mark.parametrize("fault", ["close", "garbage"])
async def test_a_channel_that_ends_costs_nothing_else_and_is_asked_for_again(tmp_path, monkeypatch, fault):
    monkeypatch.setattr(links, "EXPRESS_RETRY_S", RETRY_S)
    async with ends_with(tmp_path) as ends:
        channel = await ends.attached()
        came = ends.coordinator.came
        ended_at = trio.current_time()
        if fault == "garbage":
            channel._socket.send(b"\xff" * 100)
        else:
            channel.close()
        assert ends.coordinator.calls is not None
        await ends.coordinator.calls.call(int(ExpertsMethod.COMPUTE), *request_parts(request_for(PART)), timeout_s=5)
        with trio.fail_after(5):
            await came.wait()
        assert trio.current_time() - ended_at >= RETRY_S
        await ends.coordinator.ask(*request_parts(request_for(PART)))
        channel.close()
    assert ends.rows == [2, 2]
    assert_no_thread_is_left()


async def test_a_link_that_ends_ends_its_channel_and_its_thread(tmp_path):
    async with ends_with(tmp_path) as ends:
        channel = await ends.attached()
        assert ends.coordinator.calls is not None
        await ends.coordinator.calls.stream.reset()
        with trio.fail_after(5):
            await ends.ended.wait()
        with pytest.raises(Unreachable):
            await trio.to_thread.run_sync(channel.receive, 5.0)
    assert_no_thread_is_left()


async def test_a_thread_that_still_computes_is_given_up_after_a_while(tmp_path, monkeypatch):
    monkeypatch.setattr(express_calls, "JOIN_S", 0.05)
    go_on = threading.Event()

    def compute(shard: ExpertShard, request: ExpertRequest) -> torch.Tensor:
        go_on.wait(5)
        return compute_here(shard, request)

    async with ends_with(tmp_path, compute=compute) as ends:
        channel = await ends.attached()
        channel.send(1, request_parts(request_for(PART)), 1.0)
    go_on.set()
    assert_no_thread_is_left()


async def test_a_drain_after_the_end_returns_at_once(tmp_path):
    async with ends_with(tmp_path) as ends:
        await ends.attached()
        await ends.coordinator.ask(*request_parts(request_for(PART)))
        express = ends.link._express
        assert isinstance(express, ExpressCalls)
        ends.coordinator.channels[-1].close()
        with trio.fail_after(5):
            await express.finish()
            await express.finish()
