"""Calls that are late, computed twice, or carried by an express channel: the first right result is used."""

from __future__ import annotations

import socket
import threading
import time

import pytest
import torch
from fanout_fakes import (
    ANN,
    BOB,
    CYD,
    EXPERTS,
    LAYERS,
    FakeCrew,
    changed_body,
    follow,
    honest_body,
    make_checkpoint,
    make_dispatch,
    make_own,
    make_shard,
    random_rows,
    route_of,
)

from kvasir_node.base.errors import CallTimeout, Misbehaved, Unreachable
from kvasir_node.model.missing import ExpertsMissing
from kvasir_node.model.trunk import LocalDispatch
from kvasir_node.net.express import ECHO, DirectionKey, ExpressChannel, answer_body
from kvasir_node.roles.dispatch import TIMING_RESTS
from kvasir_node.roles.measured import CallMeasured, ForwardMeasured
from kvasir_node.wire.tensors import answer_parts, read_request

ALL = set(range(EXPERTS))
LONG_S = 30.0


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("experts"))


@pytest.fixture(scope="module")
def truth(checkpoint):
    return LocalDispatch(make_shard(checkpoint))


@pytest.fixture(scope="module")
def own(checkpoint):
    return make_own(checkpoint)


@pytest.fixture(scope="module")
def bare(checkpoint):
    """Our own experts where we hold none; they can be borrowed."""
    return make_own(checkpoint, lambda index: False)


def honest(own):
    return lambda call: memoryview(bytearray(honest_body(own, call.request)))


def lying(own):
    return lambda call: changed_body(own, call.request, lambda sums: sums + 1.0)


def silent(call):
    return None


def is_true(truth, dispatch, seed, layer=0, count=5):
    inputs = random_rows(seed, count)
    torch.testing.assert_close(dispatch(layer, *inputs), truth(layer, *inputs), atol=1e-5, rtol=1e-5)
    return True


# Late -----------------------------------------------------------------------------------------------------------


def test_law_5_a_late_call_is_computed_here_long_before_its_deadline_and_nobody_is_blamed(own, truth):
    crew = FakeCrew({ANN: silent}, LONG_S, hedge_s=0.01)
    dispatch = make_dispatch(own, crew)
    follow(dispatch, route_of(ANN, None))
    dispatch.begin(5)
    began = time.monotonic()
    assert is_true(truth, dispatch, 1)
    assert time.monotonic() - began < LONG_S / 3
    tally = dispatch.tally()
    assert crew.reports == []
    assert (dispatch.counters.hedges, dispatch.counters.fallbacks, dispatch.counters.remote) == (1, 0, 0)
    assert sum(tally.hedged) == crew.calls[0].pairs
    assert sum(tally.local) == 10


def test_who_owes_an_answer_gets_nothing_until_it_has_come_and_then_it_is_dropped_and_counted(own, truth):
    crew = FakeCrew({ANN: silent}, LONG_S, hedge_s=0.0)
    dispatch = make_dispatch(own, crew)
    follow(dispatch, route_of(ANN, None))
    dispatch.begin(5)
    assert all(is_true(truth, dispatch, seed) for seed in range(3))
    (late,) = crew.calls
    late.deliver(memoryview(bytearray(honest_body(own, late.request))))
    crew.answers[ANN] = honest(own)
    assert is_true(truth, dispatch, 4)
    assert len(crew.calls) == 2
    assert (dispatch.counters.late, dispatch.counters.hedges) == (1, 1)
    dispatch.tally()
    assert crew.reports == [(ANN, None, False)]


def test_law_8_who_does_not_answer_before_the_deadline_either_has_failed_once(own, truth):
    crew = FakeCrew({ANN: silent}, LONG_S, hedge_s=0.0)
    dispatch = make_dispatch(own, crew)
    follow(dispatch, route_of(ANN, None))
    dispatch.begin(5)
    assert is_true(truth, dispatch, 1)
    assert crew.reports == []
    crew.calls[0].sent_at -= LONG_S
    assert is_true(truth, dispatch, 2)
    ((peer, error, wrong),) = crew.reports
    assert (peer, wrong, isinstance(error, CallTimeout)) == (ANN, False, True)
    assert len(crew.calls) == 1  # and a pause follows


@pytest.mark.parametrize("answer", [honest, lying])
def test_what_we_do_not_hold_is_asked_of_another_worker_when_it_is_late(bare, own, truth, answer):
    crew = FakeCrew({ANN: silent, BOB: answer(own)}, LONG_S, hedge_s=0.0, able={ANN: ALL, BOB: ALL})
    dispatch = make_dispatch(bare, crew, checks=answer is lying)
    follow(dispatch, route_of(ANN))
    dispatch.begin(5)
    assert is_true(truth, dispatch, 1)
    assert [call.peer for call in crew.calls] == [ANN, BOB]
    dispatch.tally()
    assert [(peer, wrong) for peer, _, wrong in crew.reports] == [(BOB, answer is lying)]
    assert dispatch.counters.hedges == 1


def test_the_first_of_two_is_used_also_when_it_is_the_late_one(bare, own, truth):
    crew = FakeCrew({ANN: silent, BOB: silent}, LONG_S, hedge_s=0.0, able={ANN: ALL, BOB: ALL})
    dispatch = make_dispatch(bare, crew)
    follow(dispatch, route_of(ANN))

    def answer_late():
        while len(crew.calls) < 2:
            time.sleep(0.001)
        crew.calls[0].deliver(memoryview(bytearray(honest_body(own, crew.calls[0].request))))

    thread = threading.Thread(target=answer_late)
    thread.start()
    dispatch.begin(5)
    assert is_true(truth, dispatch, 1)
    thread.join()
    assert dispatch.counters.remote == crew.calls[0].pairs
    follow(dispatch, route_of(BOB))  # which owes an answer now
    assert is_true(truth, dispatch, 2)
    assert len(crew.calls) == 2


def test_a_worker_that_is_lost_while_another_is_asked_costs_only_the_wait(bare, own, truth):
    crew = FakeCrew({ANN: silent, BOB: lambda call: Unreachable("gone")}, 0.05, hedge_s=0.0, able={ANN: ALL, BOB: ALL})
    dispatch = make_dispatch(bare, crew)
    follow(dispatch, route_of(ANN))
    dispatch.begin(5)
    assert is_true(truth, dispatch, 1)
    assert dispatch.counters.fallbacks == 10


# Twice ----------------------------------------------------------------------------------------------------------


def test_double_two_workers_that_agree_are_believed_and_nothing_is_computed_here(own, truth):
    crew = FakeCrew({ANN: honest(own), BOB: honest(own)}, LONG_S, able={ANN: ALL, BOB: ALL})
    dispatch = make_dispatch(own, crew, verifies_all=True)
    follow(dispatch, route_of(ANN))
    dispatch.begin(5)
    assert is_true(truth, dispatch, 1)
    dispatch.tally()
    assert {call.peer for call in crew.calls} == {ANN, BOB}
    assert (dispatch.counters.local, dispatch.counters.remote, dispatch.counters.spot_checks) == (0, 10, 0)
    assert sorted(crew.reports) == [(ANN, None, False), (BOB, None, False)]


@pytest.mark.parametrize("liars", [{ANN}, {BOB}, {ANN, BOB}])
def test_law_1_double_where_two_differ_our_own_result_is_used_and_says_who_lied(own, truth, liars):
    lies = {ANN: lambda sums: sums + 1.0, BOB: lambda sums: sums.flip(0)}
    answers = {
        peer: (lambda call, lie=lie: changed_body(own, call.request, lie)) if peer in liars else honest(own)
        for peer, lie in lies.items()
    }
    crew = FakeCrew(answers, LONG_S, able={ANN: ALL, BOB: ALL})
    dispatch = make_dispatch(own, crew, verifies_all=True)
    follow(dispatch, route_of(ANN))
    dispatch.begin(5)
    assert is_true(truth, dispatch, 1)
    dispatch.tally()
    assert {peer for peer, _, wrong in crew.reports if wrong} == liars
    assert {peer for peer, error, _ in crew.reports if error is None} == {ANN, BOB} - liars


@pytest.mark.parametrize("second", [silent, lambda call: Unreachable("gone"), lambda call: memoryview(b"")])
def test_law_1_double_without_a_second_answer_every_row_is_computed_here(own, truth, second):
    crew = FakeCrew({ANN: lying(own), BOB: second}, 0.02, able={ANN: ALL, BOB: ALL})
    dispatch = make_dispatch(own, crew, verifies_all=True)
    follow(dispatch, route_of(ANN))
    dispatch.begin(5)
    assert is_true(truth, dispatch, 1)
    assert (ANN, True) in [(peer, wrong) for peer, _, wrong in crew.reports]
    assert dispatch.counters.spot_checks == 5


def test_double_the_second_worker_is_drawn_among_all_that_could(own):
    able = dict.fromkeys((ANN, BOB, CYD), ALL)
    crew = FakeCrew({peer: honest(own) for peer in able}, LONG_S, able=able)
    dispatch = make_dispatch(own, crew, verifies_all=True)
    follow(dispatch, route_of(ANN))
    for seed in range(30):
        dispatch.begin(5)
        dispatch(0, *random_rows(seed))
    assert {batch[1].peer for batch in crew.batches} == {BOB, CYD}
    assert all(batch[0].peer == ANN for batch in crew.batches)


# Express --------------------------------------------------------------------------------------------------------


class ExpressWorker:
    """The other end of a channel over a pair of sockets, in a thread, which answers as it is told; None = never."""

    def __init__(self, answer, crew, peer=ANN) -> None:
        ours, theirs = _connected()
        keys = [DirectionKey(bytes([number]) * 32) for number in (1, 2, 1, 2)]
        self.channel = ExpressChannel(ours, peer, keys[0], keys[1], body_bytes_max=1 << 20)
        self.far = ExpressChannel(theirs, peer, keys[3], keys[2], body_bytes_max=1 << 20)
        self.answer = answer
        self.requests = 0
        crew.channels[peer] = self.channel
        self.thread = threading.Thread(target=self._serve, daemon=True)
        self.thread.start()

    def _serve(self) -> None:
        try:
            while True:
                frame = self.far.receive(10.0)
                if frame is None:
                    return
                if frame[0] == ECHO:
                    self.far.send(ECHO, [frame[1]], 5.0)
                    continue
                self.requests += 1
                result = self.answer(read_request(frame[1], hidden_size=16))
                if result is not None:
                    self.far.send(frame[0], answer_body(result), 5.0)
        except Unreachable:
            return

    def close(self) -> None:
        self.channel.close()
        self.far.close()
        self.thread.join()


def _connected() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = socket.create_connection(server.getsockname())
        theirs, _ = server.accept()
        return ours, theirs


@pytest.fixture
def express():
    workers: list[ExpressWorker] = []

    def open_one(answer, crew, peer=ANN):
        workers.append(ExpressWorker(answer, crew, peer))
        return workers[-1]

    yield open_one
    for worker in workers:
        worker.close()


class Heard:
    def __init__(self) -> None:
        self.forwards: list[ForwardMeasured] = []

    def forward_measured(self, measured: ForwardMeasured) -> None:
        self.forwards.append(measured)

    def call_measured(self, measured: CallMeasured) -> None:
        raise AssertionError("the crew tells of calls")


def test_a_call_goes_by_the_express_channel_and_what_it_took_is_told(own, truth, express):
    crew, heard = FakeCrew({}, LONG_S), Heard()
    worker = express(lambda request: answer_parts(own.sums(request), computed_s=0.5e-3), crew)
    dispatch = make_dispatch(own, crew, observer=heard, checks=True)
    follow(dispatch, route_of(ANN, None))
    for seed in range(2 * len(LAYERS)):
        dispatch.begin(5)
        assert all(is_true(truth, dispatch, seed + layer, layer) for layer in LAYERS)
        dispatch.tally()
    assert crew.batches == []
    assert worker.requests == len(crew.timed) == 2 * len(LAYERS) * len(LAYERS)
    measured = [each for served in crew.heard for each in served.measured]
    assert len(measured) == 2 * len(LAYERS)
    assert {each.computed_s for each in measured} == {0.5e-3}
    assert all(each.took_s > 0 and each.activated <= each.pairs for each in measured)
    assert len(heard.forwards) == 2 * len(LAYERS)
    assert all(each.layer is not None and each.own_call_s and each.trunk_s > 0 for each in heard.forwards)


def test_how_far_a_channel_reaches_is_found_out_before_a_forward_and_not_beside_a_call(own, truth, express):
    crew = FakeCrew({}, LONG_S)
    worker = express(lambda request: answer_parts(own.sums(request)), crew)
    dispatch = make_dispatch(own, crew)
    crew.untimed.append(worker.channel)
    dispatch._common.availability.take_channel(ANN, "a call")
    dispatch.begin(5)
    assert crew.echoed == []
    dispatch._common.availability.leave_channel(ANN, "a call")
    dispatch.begin(5)
    assert len(crew.echoed) == 1
    follow(dispatch, route_of(ANN))
    assert is_true(truth, dispatch, 1)
    assert worker.requests == 1


class FarCrew(FakeCrew):
    """Its channel is never timed for good, and takes a while each time."""

    def time_channel(self, channel: ExpressChannel) -> None:
        began = time.monotonic()
        time.sleep(0.002)
        self.echoed.append(time.monotonic() - began)


def test_looking_how_far_peers_are_takes_a_small_part_of_the_time(own, express):
    crew = FarCrew({}, LONG_S)
    worker = express(lambda request: answer_parts(own.sums(request)), crew)
    crew.untimed.append(worker.channel)
    dispatch = make_dispatch(own, crew)
    for _ in range(10):
        dispatch.begin(5)
    assert len(crew.echoed) == 1
    time.sleep(2 * crew.echoed[0] * TIMING_RESTS + 0.05)
    dispatch.begin(5)
    assert len(crew.echoed) == 2


def test_a_second_forward_beside_it_goes_by_the_loop(own, truth, express):
    crew = FakeCrew({ANN: honest(own)}, LONG_S)
    entered, leave = threading.Event(), threading.Event()

    def slow(request):
        entered.set()
        assert leave.wait(10)
        return answer_parts(own.sums(request))

    express(slow, crew)
    dispatch = make_dispatch(own, crew)
    fork = dispatch.fork()
    follow(dispatch, route_of(ANN))
    dispatch.begin(5)
    fork.begin(5)
    thread = threading.Thread(target=lambda: is_true(truth, dispatch, 1))
    thread.start()
    assert entered.wait(10)
    assert is_true(truth, fork, 2)
    leave.set()
    thread.join()
    assert len(crew.calls) == 1
    assert dispatch.counters.remote == 20


def test_a_late_answer_of_an_express_channel_is_passed_over_by_the_next_call(own, truth, express):
    crew = FakeCrew({}, LONG_S, hedge_s=0.03)
    leave = threading.Event()

    def first_slow(request):
        leave.wait(10)
        return answer_parts(own.sums(request))

    worker = express(first_slow, crew)
    dispatch = make_dispatch(own, crew)
    follow(dispatch, route_of(ANN))
    dispatch.begin(5)
    assert is_true(truth, dispatch, 1)
    assert dispatch.counters.hedges == 1
    leave.set()
    until = time.monotonic() + 10
    while dispatch.counters.late == 0 and time.monotonic() < until:
        assert is_true(truth, dispatch, 2)
    crew.hedge = LONG_S
    assert is_true(truth, dispatch, 3)
    assert worker.requests >= 2
    assert dispatch.counters.remote > 0
    assert dispatch.counters.late == 1


@pytest.mark.parametrize("kind", ["closed", "error", "noise", "nan"])
def test_law_1_whatever_comes_of_an_express_call_the_sums_are_the_same(own, truth, express, kind):
    crew = FakeCrew({ANN: honest(own)}, LONG_S)

    def answer(request):
        sums = own.sums(request)
        if kind == "closed":
            worker.far.close()
            return None
        return {
            "error": Unreachable("no experts here"),
            "noise": answer_parts(sums + 1.0),
            "nan": answer_parts(sums * float("nan")),
        }[kind]

    worker = express(answer, crew)
    dispatch = make_dispatch(own, crew, checks=kind == "noise")
    follow(dispatch, route_of(ANN, None))
    dispatch.begin(5)
    assert is_true(truth, dispatch, 1)
    ((peer, error, wrong),) = crew.reports
    assert (peer, wrong) == (ANN, kind in ("noise", "nan"))
    assert isinstance(error, Misbehaved if wrong else Unreachable)


def test_a_forward_that_ends_with_an_error_leaves_the_channel_usable(checkpoint, own, truth, express):
    crew = FakeCrew({}, LONG_S)
    express(lambda request: answer_parts(own.sums(request)), crew)
    bare = make_own(checkpoint)
    dispatch = make_dispatch(bare, crew)
    follow(dispatch, route_of(ANN, None))
    compute = bare.compute

    def missing(layer, rows, pair_row, pair_expert, pair_weight):
        raise ExpertsMissing(layer, {1}, [0])

    bare.compute = missing  # as when an expert of our own share is nowhere
    dispatch.begin(5)
    with pytest.raises(ExpertsMissing):
        dispatch(0, *random_rows(1))
    bare.compute = compute
    until = time.monotonic() + 10
    while dispatch.counters.remote == 0 and time.monotonic() < until:
        dispatch.begin(5)
        assert is_true(truth, dispatch, 2)
    assert dispatch.counters.remote > 0
