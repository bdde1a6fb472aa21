"""A real crew, real call streams, scripted workers, a virtual clock."""

from __future__ import annotations

import logging
from collections import Counter

import pytest
import torch
import trio
from fanout_fakes import (
    EXPERTS,
    LAYERS,
    MODEL,
    SLICES,
    Loop,
    ScriptedWorker,
    make_checkpoint,
    make_own,
    open_loop,
    random_rows,
)

from kvasir_node.base.errors import CallTimeout, DataError, Misbehaved, Overloaded, Unreachable, UsageError
from kvasir_node.base.ids import ModelId, SliceId, cid_of
from kvasir_node.base.settings import FanoutSettings
from kvasir_node.net.memory_net import SILENCE_S, Link, open_memory_network
from kvasir_node.roles.crew import MORE_TIME_MAX, REFUSALS_MAX, SLOW_FORGET_S
from kvasir_node.roles.peer_counts import TOUCHED_MAX
from kvasir_node.roles.trials import TrialScope, trial_request
from kvasir_node.wire.messages import Attachment, ExpertsMethod
from kvasir_node.wire.tensors import answer_parts

FIRST, SECOND, OTHER_LAYER = SliceId(0, 0, 3), SliceId(0, 4, 7), SliceId(1, 0, 3)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("experts"))


@pytest.fixture
async def network():
    async with open_memory_network() as network:
        yield network


@pytest.fixture
async def loop(network, checkpoint):
    async with open_loop(network, make_own(checkpoint)) as loop:
        loop.crew.trials.set_scope(TrialScope.ALL)
        yield loop


@pytest.fixture
async def worker(loop, network, nursery):
    return await join(loop, network, nursery)


async def join(loop: Loop, network, nursery, name="worker", compute=None) -> ScriptedWorker:
    worker = ScriptedWorker(loop, network.transport(name), compute)
    await nursery.start(worker.run)
    return worker


async def prove(loop: Loop, worker: ScriptedWorker, *slices: SliceId) -> None:
    await worker.attach(*slices)
    for seed in range(20):
        await loop.forward(seed)
    assert all(loop.standing(worker.peer, part) == "proven" for part in slices)


def deadline_s(crew, peer, pairs, own_s):
    limits = crew.limits_of(peer, pairs, own_s)
    return None if limits is None else limits.deadline_s


def seen(loop: Loop):
    (view,) = loop.crew.snapshot()
    return view


# Coming ---------------------------------------------------------------------------------------------------------


async def test_an_attached_worker_is_new_and_hears_so(autojump_clock, loop, worker):
    await worker.attach(FIRST, SECOND)
    await trio.sleep(0.1)
    assert worker.told == [(FIRST, "new"), (SECOND, "new")]
    assert loop.crew.ledger.proven() == ()
    assert seen(loop).slices == ("0:0-3", "0:4-7")
    assert loop.trial_layers == {0}


@pytest.mark.parametrize(
    ("model", "part"),
    [(ModelId(cid_of(b"another model")), FIRST), (MODEL, SliceId(0, 0, 2)), (MODEL, SliceId(9, 0, 3))],
)
async def test_what_this_coordinator_does_not_serve_is_refused_and_the_worker_may_go_on(
    autojump_clock, loop, worker, model, part
):
    with pytest.raises(Misbehaved, match="does not serve"):
        await worker.say(ExpertsMethod.ATTACH, part, model=model)
    assert loop.crew.snapshot() == ()
    await prove(loop, worker, FIRST)


async def test_a_worker_may_call_nothing_else(autojump_clock, loop, worker):
    with pytest.raises(Misbehaved, match="may not call"):
        await worker.say(ExpertsMethod.COMPUTE)


# Trials ---------------------------------------------------------------------------------------------------------


async def test_law_3_a_worker_is_proven_by_a_trial_on_real_rows_and_by_nothing_else(autojump_clock, loop, worker):
    await worker.attach(FIRST)
    await trio.sleep(5)
    assert loop.standing(worker.peer, FIRST) == "new"
    await loop.forward()
    assert loop.standing(worker.peer, FIRST) == "proven"
    assert [state for _, state in worker.told] == ["new", "trial", "proven"]
    assert loop.changed[-1] == {0}
    (request,) = worker.requests
    assert set(request.pair_expert.tolist()) <= {0, 1, 2, 3}
    assert loop.crew.trials.pairs == request.pair_row.shape[0] > 0
    await loop.forward()
    assert len(worker.requests) == 1


async def test_one_trial_at_a_time_so_that_a_silent_worker_costs_one_deadline_and_not_one_per_slice(
    autojump_clock, loop, worker
):
    worker.silent = True
    await worker.attach(*SLICES)
    for seed in range(5):
        await loop.forward(seed)
    assert len(worker.requests) == 1
    assert worker.answering == 1
    await trio.sleep(3)
    assert worker.answering == 0  # the call was taken back
    assert {loop.standing(worker.peer, part) for part in SLICES} == {"suspect"}
    assert seen(loop).failures == 1
    assert "did not answer" in seen(loop).reason
    await loop.forward()
    assert len(worker.requests) == 1  # cooling off


@pytest.mark.parametrize("lie", [lambda s: s + 0.01 * s.abs().max(), lambda s: s * float("nan"), lambda s: s[:1]])
async def test_law_3_a_wrong_result_proves_nothing_and_enough_of_them_ban(autojump_clock, loop, network, nursery, lie):
    liar = await join(
        loop, network, nursery, compute=lambda request: answer_parts(lie(loop.own.sums(request)).contiguous())
    )
    await liar.attach(FIRST)
    for seed in range(400):
        await loop.forward(seed)
        await trio.sleep(1)
        assert loop.crew.ledger.proven() == ()
    assert loop.standing(liar.peer, FIRST) == "banned"
    assert len(liar.requests) == 5
    assert seen(loop).state == "banned"


@pytest.mark.parametrize("error", [Overloaded("full"), UsageError("no"), Unreachable("gone"), DataError("bad disk")])
async def test_law_8_who_is_full_or_refuses_is_not_to_blame_and_who_breaks_is(
    autojump_clock, loop, network, nursery, error
):
    def compute(request):
        raise error

    worker = await join(loop, network, nursery, compute=compute)
    await worker.attach(FIRST)
    await loop.forward()
    is_fault = isinstance(error, (Unreachable, DataError))
    assert loop.standing(worker.peer, FIRST) == ("suspect" if is_fault else "new")
    assert seen(loop).failures == int(is_fault)


async def test_law_8_a_trial_that_cannot_be_checked_here_is_nobodys_fault(
    autojump_clock, loop, network, nursery, checkpoint, tmp_path
):
    own = make_own(make_checkpoint(tmp_path), lambda index: False)
    (tmp_path / "experts.safetensors").unlink()
    loop.crew.trials._own_sums = own.sums
    worker = await join(loop, network, nursery)
    await worker.attach(FIRST)
    await loop.forward()
    assert len(worker.requests) == 1
    assert loop.standing(worker.peer, FIRST) == "new"
    assert seen(loop).failures == 0


async def test_law_2_no_trial_begins_once_it_is_calm_not_even_on_rows_that_were_offered_before(
    autojump_clock, loop, worker
):
    await worker.attach(FIRST)
    rows, chosen, weights = random_rows(0, 8)
    loop.crew.offer_trial(0, rows, chosen, weights)
    loop.crew.trials.set_scope(TrialScope.NONE)
    await trio.sleep(1)
    assert loop.trial_layers == frozenset()
    assert worker.requests == []
    loop.crew.trials.set_scope(TrialScope.ALL)
    await loop.forward()
    assert len(worker.requests) == 1


async def test_law_2_while_calm_a_trial_takes_only_rows_of_experts_that_are_not_held_here(
    autojump_clock, network, nursery, checkpoint
):
    own = make_own(checkpoint, lambda index: index % 2 == 0 or index >= 4)
    async with open_loop(network, own) as loop:
        loop.crew.trials.set_scope(TrialScope.ALL)
        worker = await join(loop, network, nursery)
        await worker.attach(FIRST, SECOND)
        rows, chosen, weights = random_rows(0, 16)
        loop.crew.offer_trial(0, rows, chosen, weights)  # with rows of held experts ...
        loop.crew.trials.set_scope(TrialScope.MISSING)  # ... and then it became calm
        await trio.sleep(0.5)
        assert worker.requests == []
        for seed in range(10):
            await loop.forward(seed)
        assert {index for request in worker.requests for index in request.pair_expert.tolist()} <= {1, 3}
        assert (loop.standing(worker.peer, FIRST), loop.standing(worker.peer, SECOND)) == ("proven", "new")


async def test_a_slice_whose_experts_nobody_uses_does_not_keep_others_of_its_layer_from_their_trial(
    autojump_clock, loop, worker
):
    await worker.attach(FIRST, SECOND)
    rows, chosen, weights = random_rows(0, 8)
    for _ in range(3):
        loop.crew.offer_trial(0, rows, chosen % 4 + 4, weights)
        await trio.sleep(0.1)
    assert loop.standing(worker.peer, SECOND) == "proven"
    assert loop.standing(worker.peer, FIRST) == "new"


async def test_law_3_a_right_answer_after_the_worker_left_proves_nothing(autojump_clock, loop, worker):
    sums = loop.own.sums

    def leave_first(request):
        member = loop.crew._here.member(worker.peer)
        loop.crew._here.lose(member, "gone", by_us=True)
        return sums(request)

    loop.crew.trials._own_sums = leave_first
    await worker.attach(FIRST)
    await loop.forward()
    assert loop.crew.ledger.proven() == ()
    assert loop.standing(worker.peer, FIRST) != "proven"


async def test_law_8_experts_in_another_dtype_are_refused_before_a_trial_could_call_them_wrong(
    autojump_clock, loop, worker
):
    with pytest.raises(UsageError, match="loaded in bfloat16, this coordinator computes in float32"):
        await worker.say(ExpertsMethod.ATTACH, FIRST, dtype="bfloat16")
    await loop.forward()
    assert worker.requests == []
    assert loop.crew.snapshot() == ()
    await worker.attach(FIRST)
    await loop.forward()
    assert loop.standing(worker.peer, FIRST) == "proven"


async def test_attaching_again_every_second_buys_no_trial(autojump_clock, loop, network, nursery):
    liar = await join(loop, network, nursery, compute=lambda request: answer_parts(loop.own.sums(request) + 1.0))
    for second in range(20):
        await nursery.start(liar.run) if liar.stopped.is_set() else None
        await liar.attach(FIRST)
        await loop.forward(second)
        await trio.sleep(0.8)
        assert liar.calls is not None
        await liar.calls.stream.reset()
        await liar.stopped.wait()
    # 18 s with pauses of 5, 10, 20 s between trials: at 0, 5 and 15 s
    assert len(liar.requests) == 3
    assert loop.crew.ledger.proven() == ()


async def test_law_7_a_hundred_identities_of_one_address_buy_no_more_trials_than_the_cap(
    autojump_clock, loop, network, nursery
):
    liars = []
    for number in range(100):
        liar = await join(
            loop, network, nursery, f"liar-{number}", lambda request: answer_parts(loop.own.sums(request) + 1.0)
        )
        loop.addresses[liar.peer] = "/ip4/192.0.2.1"
        await liar.attach(FIRST)
        liars.append(liar)
    for seed in range(100):
        await loop.forward(seed)
    assert sum(len(liar.requests) for liar in liars) == 8
    honest = await join(loop, network, nursery, "honest")
    await prove(loop, honest, FIRST)
    assert len(loop.crew.snapshot()) == 101


def test_a_trial_takes_the_first_rows_that_use_its_experts_and_no_more_than_allowed():
    rows, chosen, weights = random_rows(1, 40, 2)
    experts = torch.tensor([False, False, True, True])
    request = trial_request(2, experts, rows, chosen, weights, rows_max=5)
    assert request is not None
    uses = ((chosen == 2) | (chosen == 3)).any(1).nonzero().reshape(-1)[:5]
    torch.testing.assert_close(request.rows, rows[uses])
    assert request.rows.data_ptr() != rows.data_ptr()
    assert set(request.pair_expert.tolist()) <= {2, 3}
    assert request.layer == 2
    assert trial_request(2, torch.tensor([True]), rows, chosen.clamp_min(1), weights, rows_max=5) is None


# Calls ----------------------------------------------------------------------------------------------------------


async def test_a_call_is_answered_measured_and_counted(autojump_clock, loop, worker):
    await prove(loop, worker, FIRST)
    call = loop.call(worker.peer, FIRST)
    await trio.sleep(0.1)
    assert call.done.is_set
    assert isinstance(call.result, memoryview)
    loop.ended(call)
    await trio.sleep(0.1)
    view = seen(loop)
    assert (view.calls, view.rows, view.failures, view.state) == (1, 4, 0, "proven")
    assert view.rtt_ms is not None


async def test_a_call_to_nobody_fails_at_once(autojump_clock, loop):
    call = loop.call(loop.transport.peer_id, FIRST)
    await trio.sleep(0.01)
    assert isinstance(call.result, Unreachable)
    assert call.done.is_set
    loop.ended(call, call.result)
    await trio.sleep(0.01)
    assert loop.crew.snapshot() == ()


async def late(loop: Loop, call) -> None:
    await trio.sleep(0.05)
    call.abandoned = True
    loop.ended(call, CallTimeout("no answer within 50 ms"))


async def test_law_5_silence_is_one_failure_of_all_slices_and_the_call_is_taken_back(autojump_clock, loop, worker):
    await prove(loop, worker, FIRST, OTHER_LAYER)
    worker.silent = True
    await late(loop, loop.call(worker.peer, FIRST))
    await trio.sleep(0.1)
    assert {loop.standing(worker.peer, part) for part in (FIRST, OTHER_LAYER)} == {"suspect"}
    assert loop.changed[-1] == {0, 1}
    assert (seen(loop).failures, worker.answering) == (1, 1)
    await trio.sleep(2.1)
    assert worker.answering == 0
    assert loop.crew._here.member(worker.peer).calls.in_flight == 0


async def test_law_8_a_call_that_we_were_too_slow_to_send_is_nobodys_fault(autojump_clock, loop, worker):
    await prove(loop, worker, FIRST)
    call = loop.call(worker.peer, FIRST)
    call.abandoned = True  # before the loop came to it
    loop.ended(call, CallTimeout("no answer within 50 ms"))
    await trio.sleep(0.1)
    assert (seen(loop).failures, loop.standing(worker.peer, FIRST)) == (0, "proven")
    assert len(worker.requests) == 1


async def test_a_late_answer_makes_the_next_deadline_longer(autojump_clock, loop, worker, network):
    await prove(loop, worker, FIRST)
    for seed in range(20):
        loop.ended(loop.call(worker.peer, FIRST, seed))
        await trio.sleep(0.1)
    before = deadline_s(loop.crew, worker.peer, 4, 0.0)
    assert before == FanoutSettings().deadline_floor_s
    worker.held_back = trio.Event()
    await late(loop, loop.call(worker.peer, FIRST))
    await trio.sleep(1.5)
    worker.held_back.set()
    await trio.sleep(0.1)
    after = deadline_s(loop.crew, worker.peer, 4, 0.0)
    assert after is not None
    assert after > 1.0


async def test_law_5_a_call_that_is_expected_to_be_late_is_not_made_and_is_tried_again_later(
    autojump_clock, loop, worker
):
    await prove(loop, worker, FIRST)
    crew = loop.crew
    assert deadline_s(crew, worker.peer, 1000, 0.0) == 2.0  # nothing like it is known: the ceiling
    crew._times.observe(worker.peer, 1000, 3.0)
    assert deadline_s(crew, worker.peer, 1000, 0.0) is None
    assert deadline_s(crew, worker.peer, 4000, 0.0) is None  # as many pairs take longer
    assert deadline_s(crew, worker.peer, 4, 0.0) is not None
    assert deadline_s(crew, worker.peer, 1000, 2.0) == 4.0  # ... unless we would need long ourselves
    assert deadline_s(crew, loop.transport.peer_id, 100_000, 1e9) == 2.0 * (1 + MORE_TIME_MAX)  # never without bound
    loop.now_s += SLOW_FORGET_S
    assert deadline_s(crew, worker.peer, 1000, 0.0) == 2.0


async def test_law_8_a_worker_that_is_full_keeps_its_proof_and_one_that_only_refuses_gets_a_pause(
    autojump_clock, loop, worker
):
    await prove(loop, worker, FIRST)
    for number in range(REFUSALS_MAX):
        assert loop.standing(worker.peer, FIRST) == "proven"
        assert seen(loop).failures == 0
        loop.ended(loop.call(worker.peer, FIRST, number), Overloaded("full"))
        await trio.sleep(0.1)
    assert loop.standing(worker.peer, FIRST) == "suspect"
    assert "refused" in seen(loop).reason


async def test_an_answer_between_refusals_begins_their_count_anew(autojump_clock, loop, worker):
    await prove(loop, worker, FIRST)
    for number in range(3 * REFUSALS_MAX):
        error = None if number % REFUSALS_MAX == REFUSALS_MAX - 1 else Overloaded("full")
        loop.ended(loop.call(worker.peer, FIRST, number), error)
        await trio.sleep(0.1)
    assert loop.standing(worker.peer, FIRST) == "proven"


async def serve_wrongly(loop: Loop, worker: ScriptedWorker, part: SliceId) -> None:
    call = loop.call(worker.peer, part)
    await trio.sleep(0.1)
    loop.ended(call, Misbehaved("bad_result", "differs"), wrong=True)
    await trio.sleep(0.1)


async def test_a_wrong_answer_to_served_work_costs_all_slices_and_the_second_one_bans(
    autojump_clock, loop, worker, network, nursery
):
    other = await join(loop, network, nursery, "another worker")
    await prove(loop, other, SECOND)
    await prove(loop, worker, FIRST, OTHER_LAYER)
    loop.changed.clear()
    await serve_wrongly(loop, worker, FIRST)
    assert {loop.standing(worker.peer, part) for part in (FIRST, OTHER_LAYER)} == {"suspect"}
    assert loop.standing(other.peer, SECOND) == "proven"
    assert loop.changed == [{0, 1}]
    await trio.sleep(6)
    await prove(loop, worker, FIRST, OTHER_LAYER)  # it behaves in its trials
    await serve_wrongly(loop, worker, OTHER_LAYER)
    await worker.attach(SLICES[-1])
    assert {loop.standing(worker.peer, part) for part in (FIRST, OTHER_LAYER, SLICES[-1])} == {"banned"}
    asked = len(worker.requests)
    for seed in range(20):
        await loop.forward(seed)
        await trio.sleep(100)
    assert len(worker.requests) == asked


async def test_the_requests_that_a_caught_liar_may_have_touched_are_named_and_no_others(
    autojump_clock, loop, worker, network, nursery, caplog
):
    other = await join(loop, network, nursery, "another worker")
    await prove(loop, other, SECOND)
    await prove(loop, worker, FIRST)
    for peer, part, requests in (
        (worker.peer, FIRST, range(1, 400)),
        (other.peer, SECOND, (400, 401)),
        (worker.peer, FIRST, (7, 402)),
    ):
        loop.ended(loop.call(peer, part))
        await trio.sleep(0.1)
        loop.crew.stepped(requests)
    loop.crew.stepped((500,))  # a step without workers
    with caplog.at_level(logging.WARNING):
        await serve_wrongly(loop, worker, FIRST)
    (said,) = [record.getMessage() for record in caplog.records]
    named = said.partition("before: ")[2].split(", ")
    assert named == [*map(str, range(146, 400)), "7", "402"]  # the latest TOUCHED_MAX
    assert len(named) == TOUCHED_MAX


async def test_law_7_a_worker_that_fails_at_the_rate_of_tokens_does_not_fill_the_log(
    autojump_clock, loop, worker, caplog
):
    await prove(loop, worker, FIRST)
    with caplog.at_level(logging.WARNING):
        for number in range(200):
            loop.ended(loop.call(worker.peer, FIRST, number), Overloaded("full"))
            await trio.sleep(0.01)
    assert len(caplog.records) <= 2


# Going ----------------------------------------------------------------------------------------------------------


async def test_law_8_leaving_in_good_order_is_no_fault_even_when_the_connection_ends_at_once(
    autojump_clock, loop, worker
):
    await prove(loop, worker, FIRST, SECOND)
    loop.changed.clear()
    await worker.say(ExpertsMethod.DETACH, FIRST, SECOND)
    assert loop.crew.ledger.proven() == ()
    assert loop.changed[0] == {0}  # before the answer: nothing more is sent
    call = loop.call(worker.peer, FIRST)  # what was on its way is still answered
    await trio.sleep(0.1)
    assert isinstance(call.result, memoryview)
    await worker.calls.stream.reset()
    await trio.sleep(0.1)
    assert seen(loop).failures == 0
    assert loop.standing(worker.peer, FIRST) == "proven"  # it may come back


async def test_law_8_leaving_without_a_word_is_no_fault_however_many_calls_it_cuts_off(autojump_clock, loop, worker):
    await prove(loop, worker, FIRST, SECOND)
    worker.silent = True
    calls = [loop.call(worker.peer, part) for part in (FIRST, SECOND, FIRST, SECOND)]
    await trio.sleep(0.1)
    await worker.calls.stream.reset()
    await trio.sleep(0.1)
    for call in calls:
        assert isinstance(call.result, Unreachable)
        loop.ended(call, call.result)
    await trio.sleep(0.1)
    view = seen(loop)
    assert (view.failures, view.state) == (0, "proven")
    assert {each.failures for each in loop.crew.ledger.pairs()} == {0}
    assert "left without draining" in view.reason
    assert loop.crew.proven() == loop.crew.ledger.proven() == ()


async def test_a_worker_that_sends_garbage_is_blamed_for_a_wrong_answer(autojump_clock, loop, worker):
    await prove(loop, worker, FIRST)
    await worker.calls.stream.write(b"\xff" * 64)
    await worker.stopped.wait()
    await trio.sleep(0.1)
    assert loop.standing(worker.peer, FIRST) == "suspect"
    assert next(iter(loop.crew.ledger._records.values())).wrong == 1


async def test_a_worker_that_connects_again_replaces_itself_and_nothing_is_sent_into_the_old_stream(
    autojump_clock, loop, worker, nursery
):
    await prove(loop, worker, FIRST)
    worker.silent = True
    old_calls, old_stopped = worker.calls, worker.stopped
    call = loop.call(worker.peer, FIRST)
    await trio.sleep(0.1)
    await nursery.start(worker.run)
    await trio.sleep(0.1)
    assert isinstance(call.result, Unreachable)  # not at its deadline: at once
    await old_stopped.wait()
    assert old_calls.end_reason is not None
    worker.silent = False
    asked = len(worker.requests)
    await worker.attach(FIRST)
    assert loop.crew.proven() == ((worker.peer, FIRST),)
    await loop.forward()
    assert len(worker.requests) == asked  # no new trial
    assert len(loop.crew.members()) == 1
    assert loop.call(worker.peer, FIRST).peer == worker.peer
    await trio.sleep(0.1)
    assert worker.requests[-1].layer == 0


async def test_law_8_a_coordinator_that_stops_blames_nobody(autojump_clock, network, checkpoint, nursery):
    async with open_loop(network, make_own(checkpoint)) as loop:
        loop.crew.trials.set_scope(TrialScope.ALL)
        worker = await join(loop, network, nursery)
        await prove(loop, worker, FIRST)
        network.kill(loop.transport.peer_id)
        await trio.sleep(1)
        assert loop.standing(worker.peer, FIRST) == "proven"
        assert Counter(view.failures for view in loop.crew.snapshot()) == {0: 1}


@pytest.mark.parametrize("away", ["asleep", "overloaded", "neither"])
async def test_law_8_a_machine_that_slept_or_was_overloaded_blames_nobody_for_what_failed_meanwhile(
    autojump_clock, loop, worker, nursery, away
):
    await prove(loop, worker, FIRST)
    await worker.attach(SECOND)  # its trial is under way meanwhile
    worker.silent = True
    rows, chosen, weights = random_rows(0, 8)
    loop.crew.offer_trial(0, rows, chosen % 4 + 4, weights)
    call = loop.call(worker.peer, FIRST)
    await trio.sleep(1.9)
    if away == "asleep":
        loop.slept_s = 3600.0
    if away == "overloaded":
        loop.crew._stalls.look(trio.current_time() - 1.5, trio.current_time() - 1.5)  # ... and not since
    call.abandoned = True
    loop.ended(call, CallTimeout("no answer within 1000 ms"))
    await trio.sleep(0.2)  # the deadline of the trial passes
    await worker.calls.stream.reset()  # the other end had given us up
    await worker.stopped.wait()
    await trio.sleep(0.1)
    if away == "neither":
        assert {loop.standing(worker.peer, part) for part in (FIRST, SECOND)} == {"suspect"}
        return
    if away == "asleep":  # too long an absence for an overload
        assert (seen(loop).failures, loop.standing(worker.peer, FIRST)) == (0, "proven")
    assert loop.standing(worker.peer, SECOND) == "new"


async def test_law_8_a_worker_that_fails_long_after_this_machine_slept_is_to_blame(autojump_clock, loop, worker):
    await prove(loop, worker, FIRST)
    loop.slept_s = 3600.0
    await trio.sleep(11)
    worker.silent = True
    await late(loop, loop.call(worker.peer, FIRST))
    await trio.sleep(0.1)
    assert loop.standing(worker.peer, FIRST) == "suspect"


# Out of reach ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("outage_s", [2.0, 20.0, 30.0])
async def test_law_8_an_outage_costs_no_standing_and_no_new_trial(
    autojump_clock, loop, worker, network, nursery, outage_s
):
    await prove(loop, worker, FIRST, OTHER_LAYER)
    asked = len(worker.requests)
    ends = (loop.transport.peer_id, worker.peer)
    network.partition(*ends)
    calls = [loop.call(worker.peer, part) for part in (FIRST, OTHER_LAYER)]
    for call in calls:
        await late(loop, call)
    await trio.sleep(0.1)
    assert loop.crew.proven() == ()  # nothing more is sent, before anybody knows why nothing comes
    assert loop.changed[-1] == {0, 1}
    await trio.sleep(outage_s)
    network.heal(*ends)
    if outage_s > SILENCE_S:
        assert loop.crew.ledger.proven() == ()  # and no coverage
        await nursery.start(worker.run)
        await worker.attach(FIRST, OTHER_LAYER)
    await trio.sleep(0.1)
    assert set(loop.crew.proven()) == {(worker.peer, FIRST), (worker.peer, OTHER_LAYER)}
    assert seen(loop).failures == 0
    assert worker.told[-1][1] == "proven"
    await loop.forward()
    before = len(worker.requests)
    assert before in (asked, asked + len(calls))  # those that came through at last, and no trial
    call = loop.call(worker.peer, FIRST)
    await trio.sleep(0.1)
    assert isinstance(call.result, memoryview)


async def test_law_8_proof_ends_when_an_absence_is_longer_than_it_lasts(autojump_clock, loop, worker, nursery):
    await prove(loop, worker, FIRST)
    await worker.calls.stream.reset()
    await trio.sleep(FanoutSettings().proof_ttl_s)
    loop.crew.ledger.tick(trio.current_time())
    await nursery.start(worker.run)
    await worker.attach(FIRST)
    assert loop.crew.proven() == ()
    await prove(loop, worker, FIRST)


async def test_who_leaves_in_good_order_while_its_connection_is_being_asked_is_not_away_for_ever(
    autojump_clock, loop, worker, network, nursery
):
    await prove(loop, worker, FIRST)
    worker.silent = True
    network.set_link(loop.transport.peer_id, worker.peer, Link(latency_s=1.0))
    await late(loop, loop.call(worker.peer, FIRST))
    await trio.sleep(0.1)
    assert loop.crew.proven() == ()
    member = loop.crew._here.member(worker.peer)
    loop.crew._here._detach(member, Attachment(MODEL, "float32", (FIRST,)))
    loop.crew._here.lose(member, "it moved")
    await worker.stopped.wait()
    network.set_link(loop.transport.peer_id, worker.peer, Link())
    await nursery.start(worker.run)
    await worker.attach(FIRST)
    assert loop.crew.proven() == ((worker.peer, FIRST),)
    await trio.sleep(5)
    assert loop.crew.proven() == ((worker.peer, FIRST),)


async def test_law_8_a_machine_that_sleeps_often_gives_its_workers_no_rest_for_it(
    autojump_clock, loop, worker, nursery
):
    await prove(loop, worker, FIRST)
    for _ in range(6):
        loop.slept_s += 30.0
        await trio.sleep(0.5)
        await worker.calls.stream.reset()  # the other end had given us up
        await worker.stopped.wait()
        await nursery.start(worker.run)
        await worker.attach(FIRST)
        assert loop.crew.proven() == ((worker.peer, FIRST),)


async def test_who_moves_to_another_way_in_good_order_is_never_away(autojump_clock, loop, worker, nursery):
    await prove(loop, worker, FIRST)
    for _ in range(6):
        await worker.say(ExpertsMethod.DETACH, FIRST)
        await worker.calls.stream.reset()
        await worker.stopped.wait()
        await nursery.start(worker.run)
        await worker.attach(FIRST)
        assert loop.crew.proven() == ((worker.peer, FIRST),)


async def test_who_leaves_again_and_again_keeps_its_proof_and_gets_no_work_for_a_while(
    autojump_clock, loop, worker, nursery
):
    await prove(loop, worker, FIRST)
    for _ in range(3):
        assert loop.crew.proven()
        await trio.sleep(2)
        await worker.calls.stream.reset()
        await worker.stopped.wait()
        await nursery.start(worker.run)
        await worker.attach(FIRST)
    assert loop.standing(worker.peer, FIRST) == "proven"
    assert loop.crew.proven() == ()
    loop.changed.clear()
    await trio.sleep(FanoutSettings().cool_off_s + 0.3)
    assert loop.crew.proven() == ((worker.peer, FIRST),)
    assert loop.changed == [{0}]


async def test_a_worker_that_is_silent_while_its_connection_lives_is_to_blame_once_for_all_that_was_sent_before(
    autojump_clock, loop, worker
):
    await prove(loop, worker, FIRST)
    worker.silent = True
    calls = [loop.call(worker.peer, FIRST, number) for number in range(4)]
    await trio.sleep(0.05)
    for call in calls:
        call.abandoned = True
        loop.ended(call, CallTimeout("no answer within 50 ms"))
    await trio.sleep(0.1)
    assert (seen(loop).failures, loop.standing(worker.peer, FIRST)) == (1, "suspect")


async def test_a_step_that_outlives_the_crew_waits_for_nobody_and_blames_nobody(
    autojump_clock, network, checkpoint, nursery
):
    async with open_loop(network, make_own(checkpoint)) as loop:
        loop.crew.trials.set_scope(TrialScope.ALL)
        worker = await join(loop, network, nursery)
        await prove(loop, worker, FIRST)
        await worker.attach(SECOND)
        worker.silent = True
        before = loop.call(worker.peer, FIRST)
        await trio.sleep(0.1)
        assert not before.done.is_set
    after = loop.call(worker.peer, FIRST)
    await trio.sleep(0.1)
    for call in (before, after):
        assert isinstance(call.result, Unreachable)
        assert call.done.is_set
    await late(loop, before)
    await loop.forward()
    assert len(loop.crew._in_flight) == 0


async def test_law_7_tables_do_not_grow_with_workers_that_come_and_go(autojump_clock, loop, network, nursery):
    for number in range(30):
        worker = await join(loop, network, nursery, f"worker-{number}")
        await prove(loop, worker, FIRST)
        await worker.say(ExpertsMethod.DETACH, FIRST)
        await worker.calls.stream.reset()
        await worker.stopped.wait()
    await trio.sleep(0.1)
    crew = loop.crew
    assert len(crew.members()) == len(crew._times._estimates) == len(crew._slow_since) == 0
    assert loop.trial_layers == frozenset()
    assert len(crew._nursery.child_tasks) == len(crew._in_flight) == 0
    assert len(crew.trials._masks) <= len(LAYERS) * EXPERTS
