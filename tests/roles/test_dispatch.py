from __future__ import annotations

import random
import time
from dataclasses import replace
from typing import Any

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
from hypothesis import given, settings
from hypothesis import strategies as st

from kvasir_node.base.errors import CallTimeout, Misbehaved, Overloaded, RejectReason, Unreachable
from kvasir_node.base.ids import ExpertId, PeerId
from kvasir_node.decide.dealing import fixed
from kvasir_node.decide.spot_checks import SpotChecks
from kvasir_node.model.missing import ExpertsMissing
from kvasir_node.model.pair_split import PairSplitter
from kvasir_node.model.tensor_file import read_tensor
from kvasir_node.model.trunk import LocalDispatch
from kvasir_node.roles.availability import PAUSED_MAX, Availability
from kvasir_node.roles.comparing import TOLERANCES, agrees, pick_pairs, rows_of
from kvasir_node.roles.heat import HEAT_EVERY
from kvasir_node.roles.own_experts import OwnExperts
from kvasir_node.wire.tensors import PAIRS_MAX, Encoding

PEERS = (ANN, BOB, CYD)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("experts"))


@pytest.fixture(scope="module")
def truth(checkpoint):
    return LocalDispatch(make_shard(checkpoint))


@pytest.fixture(scope="module")
def own_by_held(checkpoint):
    """How many experts of each layer are held -> our own way to compute all of them."""
    return {held: make_own(checkpoint, lambda index, held=held: index < held) for held in (0, 3, EXPERTS)}


@pytest.fixture
def own(own_by_held):
    return own_by_held[EXPERTS]


def noisy(sums: torch.Tensor) -> torch.Tensor:
    return sums + 1e-3 * sums.abs().max()


def with_nan(sums: torch.Tensor) -> torch.Tensor:
    sums = sums.clone()
    sums[-1, 0] = float("nan")
    return sums


def answer_of(own, kind):
    """What a worker of that kind makes of a call."""
    return {
        "honest": lambda call: memoryview(bytearray(honest_body(own, call.request))),
        "silent": lambda call: None,
        "gone": lambda call: Unreachable("the connection ended"),
        "full": lambda call: Overloaded("8 calls are under way here"),
        "refuses": lambda call: Misbehaved(RejectReason.BAD_FRAME, "we do not like it"),
        "noisy": lambda call: changed_body(own, call.request, noisy),
        "nan": lambda call: changed_body(own, call.request, with_nan),
        "long": lambda call: changed_body(own, call.request, lambda sums: torch.cat((sums, sums[:1]))),
        "empty": lambda call: memoryview(b""),
        "other dtype": lambda call: changed_body(own, call.request, lambda sums: sums.to(torch.bfloat16)),
    }[kind]


KINDS = ("honest", "silent", "gone", "full", "refuses", "noisy", "nan", "long", "empty", "other dtype")


@settings(max_examples=50, deadline=None, derandomize=True)
@given(
    rows=st.integers(1, 9),
    each=st.integers(1, 4),
    seed=st.integers(0, 1000),
    routes=st.dictionaries(
        st.sampled_from(LAYERS),
        st.lists(st.sampled_from([None, *PEERS]), min_size=EXPERTS, max_size=EXPERTS),
    ),
    kinds=st.tuples(*[st.sampled_from(KINDS)] * 3),
    held=st.sampled_from([0, 3, EXPERTS]),
)
def test_law_1_same_answer_whatever_the_route_and_whatever_the_workers_do(
    own_by_held, truth, rows, each, seed, routes, kinds, held
):
    own = own_by_held[held]
    crew = FakeCrew({peer: answer_of(own, kind) for peer, kind in zip(PEERS, kinds, strict=True)})
    dispatch = make_dispatch(own, crew, checks=True)
    follow(dispatch, {layer: tuple(row) for layer, row in routes.items()})
    dispatch.begin(rows)
    for layer in LAYERS:
        inputs = random_rows(seed + layer, rows, each)
        torch.testing.assert_close(dispatch(layer, *inputs), truth(layer, *inputs), atol=1e-5, rtol=1e-5)
    tally = dispatch.tally()
    pairs = len(LAYERS) * each
    assert all(here + there == pairs for here, there in zip(tally.local, tally.remote, strict=True))
    assert all(0 <= back <= here for back, here in zip(tally.fallback, tally.local, strict=True))
    assert len(tally.local) == rows
    counters = dispatch.counters
    assert (counters.local, counters.remote) == (sum(tally.local), sum(tally.remote))
    assert counters.fallbacks == sum(tally.fallback)
    right = sum(call.pairs for call in crew.calls if kinds[PEERS.index(call.peer)] == "honest")
    assert counters.remote == right


@pytest.mark.parametrize(
    ("kind", "error", "wrong"),
    [
        ("honest", None, False),
        ("silent", CallTimeout, False),
        ("gone", Unreachable, False),
        ("full", Overloaded, False),
        ("refuses", Misbehaved, False),
        ("noisy", Misbehaved, True),
        ("nan", Misbehaved, True),
        ("long", Misbehaved, True),
        ("other dtype", Misbehaved, True),
    ],
)
def test_law_8_the_crew_is_told_how_a_call_ended(own, kind, error, wrong):
    crew = FakeCrew({ANN: answer_of(own, kind)})
    dispatch = make_dispatch(own, crew, checks=True)
    follow(dispatch, route_of(ANN, None))
    dispatch.begin(5)
    dispatch(0, *random_rows(0))
    dispatch.tally()
    ((peer, told, told_wrong),) = crew.reports
    assert peer == ANN
    assert told is None if error is None else isinstance(told, error)
    assert told_wrong is wrong
    assert crew.calls[0].abandoned == (kind == "silent")


class Joins(PairSplitter):
    """Keeps how sums came to be added up, and whether they could be."""

    def __init__(self) -> None:
        super().__init__(torch.float32)
        self.made: list[tuple[str, bool]] = []

    def join(self, *given: Any) -> bool:
        self.made.append(("read", joined := super().join(*given)))
        return joined

    def join_values(self, *given: Any) -> bool:
        self.made.append(("frame", joined := super().join_values(*given)))
        return joined


@pytest.mark.parametrize(
    ("kind", "made", "blamed"),
    [
        ("honest", [("frame", True)], False),
        ("nan", [("frame", False), ("read", False)], True),
        ("long", [], True),
        ("other dtype", [], True),
        ("empty", [], True),
    ],
)
def test_an_answer_that_is_not_compared_is_added_up_out_of_its_frame_unless_it_is_wrong(own, truth, kind, made, blamed):
    crew = FakeCrew({ANN: answer_of(own, kind)})
    dispatch = make_dispatch(own, crew)
    dispatch._splitter = joins = Joins()
    follow(dispatch, route_of(ANN, None))
    dispatch.begin(5)
    inputs = random_rows(0)
    torch.testing.assert_close(dispatch(0, *inputs), truth(0, *inputs), atol=1e-5, rtol=1e-5)
    dispatch.tally()
    assert joins.made == made
    assert [wrong for _, _, wrong in crew.reports] == [blamed]
    assert dispatch.counters.remote == (0 if blamed else crew.calls[0].pairs)


@pytest.mark.parametrize("changes", [{"checks": True}, {"verifies_all": True}])
def test_an_answer_that_is_compared_is_read(own, truth, changes):
    dispatch = make_dispatch(own, FakeCrew({ANN: answer_of(own, "honest")}), **changes)
    dispatch._splitter = joins = Joins()
    follow(dispatch, route_of(ANN, None))
    dispatch.begin(5)
    inputs = random_rows(0)
    torch.testing.assert_close(dispatch(0, *inputs), truth(0, *inputs), atol=1e-5, rtol=1e-5)
    assert joins.made == [("read", True)]


def test_law_8_a_worker_is_not_to_blame_where_the_model_itself_overflows(tmp_path):
    own = make_own(make_checkpoint(tmp_path, scale=1e20))
    crew = FakeCrew({ANN: answer_of(own, "honest")})
    dispatch = make_dispatch(own, crew)
    follow(dispatch, route_of(ANN))
    dispatch.begin(5)
    total = dispatch(0, *random_rows(0))
    assert not bool(torch.isfinite(total).all())
    assert crew.reports == []


def test_law_2_without_a_route_nothing_leaves_and_nothing_is_copied_for_a_trial(own, truth):
    crew = FakeCrew({})
    dispatch = make_dispatch(own, crew)
    follow(dispatch, route_of(ANN))
    follow(dispatch, route_of(None))
    for seed in range(3):
        dispatch.begin(5)
        for layer in LAYERS:
            inputs = random_rows(seed)
            torch.testing.assert_close(dispatch(layer, *inputs), truth(layer, *inputs))
    assert (crew.batches, crew.offered, dispatch.counters.remote) == ([], [], 0)


def test_forwards_with_a_prompt_follow_routes_of_their_own(own):
    crew = FakeCrew({peer: answer_of(own, "honest") for peer in PEERS})
    dispatch = make_dispatch(own, crew)
    decode = fixed({**route_of(ANN), **route_of(None, layers=(2,))})
    dispatch.set_routes(decode, fixed(route_of(BOB, layers=(1,))), 5)
    for count in (5, 6):
        dispatch.begin(count)
        for layer in LAYERS:
            dispatch(layer, *random_rows(layer, count))
    assert [(call.layer, call.peer) for call in crew.calls] == [(0, ANN), (1, ANN), (1, BOB)]
    dispatch.set_routes({}, {}, 5)
    dispatch.begin(5)
    dispatch(0, *random_rows(0))
    assert len(crew.calls) == 3


def test_rows_are_offered_only_for_layers_that_want_a_trial(own):
    crew = FakeCrew({})
    dispatch = make_dispatch(own, crew)
    dispatch.set_trial_layers(frozenset({1}))
    dispatch.begin(5)
    for layer in LAYERS:
        dispatch(layer, *random_rows(layer))
    assert crew.offered == [1]


def test_all_frames_of_a_layer_fly_before_anything_is_waited_for(own):
    crew = FakeCrew({peer: answer_of(own, "honest") for peer in PEERS})
    dispatch = make_dispatch(own, crew)
    follow(dispatch, route_of(None, *PEERS))
    dispatch.begin(9)
    dispatch(0, *random_rows(0, 9, 4))
    assert [[call.peer for call in batch] for batch in crew.batches] == [[ANN, BOB, CYD]]
    assert crew.calls[0].pairs == dispatch.counters.remote - sum(call.pairs for call in crew.calls[1:])


def test_a_row_travels_once_however_many_of_its_experts_a_worker_computes(own):
    crew = FakeCrew({ANN: answer_of(own, "honest")})
    dispatch = make_dispatch(own, crew)
    follow(dispatch, route_of(ANN))
    dispatch.begin(6)
    dispatch(0, *random_rows(0, 6, 4))
    (call,) = crew.calls
    assert (call.request.rows.shape[0], call.pairs) == (6, 24)
    assert call.request.rows.device.type == call.request.pair_row.device.type == "cpu"


@pytest.mark.parametrize(("long_s", "noted"), [(60.0, 1), (0.0, len(LAYERS))])
def test_after_a_long_forward_every_call_tells_what_it_took(own, monkeypatch, long_s, noted):
    """A coordinator whose steps take seconds would know its workers only after minutes."""
    monkeypatch.setattr("kvasir_node.roles.dispatch.LONG_FORWARD_S", long_s)
    crew = FakeCrew({ANN: answer_of(own, "honest")})
    dispatch = make_dispatch(own, crew)
    follow(dispatch, route_of(ANN))
    for _ in range(2):
        dispatch.begin(5)
        for layer in LAYERS:
            dispatch(layer, *random_rows(layer))
        dispatch.tally()
    assert [len(served.experts) for served in crew.heard] == [1, noted]


def test_law_5_deadlines_of_one_layer_run_at_the_same_time(own):
    peers = tuple(PeerId(f"peer {number}") for number in range(EXPERTS))
    crew = FakeCrew({peer: answer_of(own, "silent") for peer in peers}, deadline_s=0.25)
    dispatch = make_dispatch(own, crew)
    follow(dispatch, route_of(*peers))
    dispatch.begin(8)
    started = time.monotonic()
    dispatch(0, *random_rows(0, 8, 4))
    assert len(crew.calls) == EXPERTS
    assert 0.25 <= time.monotonic() - started < 1.0  # 2 s, were they waited for one after the other


def test_law_5_deadlines_of_a_forward_do_not_add_up_and_the_next_forward_has_new_patience(own, truth):
    crew = FakeCrew({}, deadline_s=0.02)
    dispatch = make_dispatch(own, crew, patience_s=0.05)
    for step in range(40):  # each layer's worker is another one, and all of them are silent
        peer = PeerId(f"peer {step}")
        crew.answers[peer] = answer_of(own, "silent")
        if step in (0, 20):
            dispatch.begin(5)
        follow(dispatch, route_of(peer))
        inputs = random_rows(step)
        torch.testing.assert_close(dispatch(step % 3, *inputs), truth(step % 3, *inputs))
        if step == 19:
            assert 1 <= len(crew.calls) <= 3
    assert 2 <= len(crew.calls) <= 6


def test_law_5_nothing_more_is_sent_at_once_to_a_worker_that_failed_even_when_the_route_says_so(own):
    crew = FakeCrew({ANN: answer_of(own, "silent"), BOB: answer_of(own, "honest")})
    dispatch = make_dispatch(own, crew)
    for seed in range(10):
        follow(dispatch, route_of(ANN, BOB))  # who plans has not heard of the failure yet
        dispatch.begin(5)
        dispatch(seed % 3, *random_rows(seed))
    assert [call.peer for call in crew.calls].count(ANN) == 1
    assert [call.peer for call in crew.calls].count(BOB) == 10


def test_a_worker_that_was_full_is_asked_again_after_a_pause(own):
    crew = FakeCrew({ANN: answer_of(own, "full")})
    dispatch = make_dispatch(own, crew)
    follow(dispatch, route_of(ANN))
    dispatch.begin(5)
    dispatch(0, *random_rows(0))
    dispatch._common.availability._paused[ANN] = time.monotonic() - 1e-6
    dispatch(1, *random_rows(1))
    dispatch(2, *random_rows(2))
    assert len(crew.calls) == 2


def test_law_7_peers_in_a_pause_are_forgotten_when_it_is_over():
    availability = Availability()
    for number in range(1000):
        availability.pause(PeerId(f"peer {number}"))
        availability._paused[PeerId(f"peer {number}")] -= 1.0
    assert len(availability._paused) <= PAUSED_MAX + 1


def test_an_answer_that_came_while_our_own_share_took_longer_than_the_deadline_is_used(own):
    crew = FakeCrew({ANN: answer_of(own, "honest")}, deadline_s=-1.0)  # past before anything is waited for
    dispatch = make_dispatch(own, crew)
    follow(dispatch, route_of(ANN, None))
    dispatch.begin(5)
    dispatch(0, *random_rows(0))
    assert dispatch.counters.remote == crew.calls[0].pairs
    assert dispatch.counters.fallbacks == 0


@pytest.mark.parametrize("limit", ["body", "pairs", "no deadline"])
def test_what_cannot_travel_in_one_frame_or_in_time_is_computed_here_and_blamed_on_nobody(own, truth, limit):
    crew = FakeCrew({ANN: answer_of(own, "honest")}, deadline_s=None if limit == "no deadline" else 0.0)  # type: ignore[arg-type]
    dispatch = make_dispatch(own, crew, body_bytes_max=300 if limit == "body" else 1 << 25)
    follow(dispatch, route_of(ANN))
    count = PAIRS_MAX // 8 + 1 if limit == "pairs" else 8
    dispatch.begin(count)
    rows, chosen, weights = random_rows(0, 8, 8)
    inputs = tuple(each.repeat(-(-count // 8), 1)[:count] for each in (rows, chosen, weights))
    torch.testing.assert_close(dispatch(0, *inputs), truth(0, *inputs), atol=1e-4, rtol=1e-4)
    assert crew.calls == []
    assert crew.reports == []
    assert dispatch.counters.fallbacks == 0


def test_a_forward_that_raised_leaves_nothing_behind_for_the_next_one(own, truth):
    crew = FakeCrew({ANN: answer_of(own, "honest")})
    dispatch = make_dispatch(own, crew)
    follow(dispatch, route_of(ANN, None))
    dispatch.begin(9)
    dispatch(0, *random_rows(0, 9))  # ... and then the forward ends with an error
    dispatch.begin(2)
    for layer in LAYERS:
        dispatch(layer, *random_rows(layer, 2))
    tally = dispatch.tally()
    assert [a + b for a, b in zip(tally.local, tally.remote, strict=True)] == [6, 6]
    assert sum(dispatch.heat()[0]) in (0.0, 4.0)


def test_heat_is_counted_in_one_forward_of_some_and_fades(own):
    dispatch = make_dispatch(own, FakeCrew({}))
    dispatch._forwards = 0
    chosen = torch.tensor([[0, 3], [0, 5]])
    rows, _, weights = random_rows(0, 2)
    seen = []
    for _ in range(2 * HEAT_EVERY):
        dispatch.begin(2)
        for layer in LAYERS:
            dispatch(layer, rows, chosen, weights)
        dispatch.tally()
        seen.append(dispatch.heat())
    assert seen[0] == {layer: [2.0, 0.0, 0.0, 1.0, 0.0, 1.0, 0.0, 0.0] for layer in LAYERS}
    assert seen[HEAT_EVERY - 1] == seen[0]
    assert seen[HEAT_EVERY][1][0] == pytest.approx(2 + 2 * 0.96)


def test_heat_is_of_each_layer_when_all_of_them_choose_in_one_tensor(own):
    dispatch = make_dispatch(own, FakeCrew({}))
    dispatch._forwards = 0
    rows, chosen, weights = random_rows(0, 1)
    dispatch.begin(1)
    for layer in LAYERS:
        chosen.copy_(torch.tensor([[layer, 7]]))
        dispatch(layer, rows, chosen, weights)
    dispatch.tally()
    assert all(dispatch.heat()[layer][layer] == 1.0 for layer in LAYERS)


def test_agreement_is_judged_row_by_row_so_that_a_small_row_cannot_hide_behind_a_large_one():
    own = torch.tensor([[1000.0, -1000.0], [0.01, 0.02]])
    assert agrees(own * (1 + 1e-6), own, Encoding.FLOAT32)
    assert not agrees(own + torch.tensor([[0.0, 0.0], [0.001, 0.0]]), own, Encoding.FLOAT32)
    assert agrees(own + torch.tensor([[0.01, 0.0], [0.0, 0.0]]), own, Encoding.FLOAT32)
    assert agrees(torch.zeros(2, 2), torch.zeros(2, 2), Encoding.FLOAT32)
    assert not agrees(own.clone().fill_(float("nan")), own, Encoding.FLOAT32)


def test_a_fork_has_a_forward_of_its_own_and_knows_the_same_routes_pauses_heat_and_counters(own, truth):
    crew = FakeCrew({ANN: answer_of(own, "honest"), BOB: answer_of(own, "silent")})
    dispatch = make_dispatch(own, crew)
    fork = dispatch.fork()
    follow(dispatch, route_of(ANN))
    dispatch.begin(5)
    for _ in range(HEAT_EVERY):
        fork.begin(5)
    for lane, layer, seed in ((dispatch, 0, 1), (fork, 0, 2), (fork, 1, 3), (dispatch, 1, 4), (fork, 2, 5)):
        inputs = random_rows(seed)
        torch.testing.assert_close(lane(layer, *inputs), truth(layer, *inputs), atol=1e-4, rtol=1e-4)
    assert sum(fork.tally().remote) == 3 * sum(dispatch.tally().remote) // 2 > 0
    assert dispatch.counters == fork.counters
    assert dispatch.counters.remote == sum(fork.tally().remote) + sum(dispatch.tally().remote)
    assert sum(map(sum, dispatch.heat().values())) > 0
    assert dispatch.heat() == fork.heat()
    follow(fork, route_of(BOB))
    fork(0, *random_rows(6))
    assert len(crew.calls) == 6
    dispatch(0, *random_rows(7))  # the silent one is in a pause for both
    assert len(crew.calls) == 6


class Bringer:
    """Has the experts in `here`, and remembers what it was asked to bring."""

    def __init__(self, checkpoint) -> None:
        self.checkpoint = checkpoint
        self.here: set[int] = set()
        self.wanted: list[tuple[int, frozenset[int]]] = []

    def has(self, expert: ExpertId) -> bool:
        return expert.index in self.here

    def read(self, expert: ExpertId):
        return {part: read_tensor(tensor) for part, tensor in self.checkpoint.experts[expert].items()}

    def want(self, layer: int, experts) -> None:
        self.wanted.append((layer, frozenset(experts)))


@pytest.fixture
def lacking(checkpoint):
    """Our own experts without the last two of each layer, which are not even on the disk; and who could bring them."""
    bringer = Bringer(checkpoint)
    here = {expert: parts for expert, parts in checkpoint.experts.items() if expert.index < EXPERTS - 2}
    shard = make_shard(checkpoint, lambda index: index < 3)
    held = {layer: shard.held(layer) for layer in LAYERS}
    return OwnExperts(shard, replace(checkpoint, experts=here), held, 1 << 20, bringer), bringer


@pytest.mark.parametrize("kind", ["silent", "full", "nan"])
def test_rows_whose_worker_is_lost_are_named_when_nobody_else_has_their_experts(own, lacking, truth, kind):
    lacking, bringer = lacking
    crew = FakeCrew({ANN: answer_of(own, kind), BOB: answer_of(own, "honest")})
    dispatch = make_dispatch(lacking, crew)
    follow(dispatch, {0: (None,) * 5 + (BOB, ANN, BOB)})
    chosen = torch.tensor([[0, 7], [6, 1], [5, 4], [2, 6], [7, 3]])
    rows, _, weights = random_rows(0, 5)
    dispatch.begin(5)
    with pytest.raises(ExpertsMissing) as raised:
        dispatch(0, rows, chosen, weights)
    assert (raised.value.rows, raised.value.experts) == ((1, 3), {6})
    others = [0, 2, 4]
    dispatch.begin(3)
    sums = dispatch(0, rows[others], chosen[others], weights[others])
    torch.testing.assert_close(sums, truth(0, rows[others], chosen[others], weights[others]))
    bringer.here = {6}
    dispatch.begin(5)
    torch.testing.assert_close(dispatch(0, rows, chosen, weights), truth(0, rows, chosen, weights))


def test_a_sample_that_cannot_be_compared_yet_lets_the_experts_come_and_stops_no_token(own, lacking, truth):
    lacking, bringer = lacking
    crew = FakeCrew({ANN: answer_of(own, "honest")})
    dispatch = make_dispatch(lacking, crew, checks=True)
    follow(dispatch, {0: (None,) * 6 + (ANN, ANN)})
    rows, _, weights = random_rows(0, 2)
    chosen = torch.tensor([[0, 7], [6, 1]])
    dispatch.begin(2)
    torch.testing.assert_close(dispatch(0, rows, chosen, weights), truth(0, rows, chosen, weights))
    assert (dispatch.counters.spot_checks, bringer.wanted) == (0, [(0, {6, 7})])
    bringer.here = {6, 7}
    crew.answers[ANN] = answer_of(own, "noisy")
    torch.testing.assert_close(dispatch(0, rows, chosen, weights), truth(0, rows, chosen, weights))
    assert (dispatch.counters.spot_checks, dispatch.counters.mismatches) == (2, 1)


def test_some_rows_of_a_call_are_compared_and_not_all_of_it(own, truth):
    crew = FakeCrew({ANN: answer_of(own, "honest")})
    dispatch = make_dispatch(own, crew, spot_checks=SpotChecks(0.1, random.Random(5)))
    follow(dispatch, route_of(ANN, None))
    for seed in range(50):
        inputs = random_rows(seed, 16)
        dispatch.begin(16)
        torch.testing.assert_close(dispatch(0, *inputs), truth(0, *inputs), atol=1e-5, rtol=1e-5)
    sent = sum(call.request.rows.shape[0] for call in crew.calls)
    assert 0.05 * sent < dispatch.counters.spot_checks < 0.2 * sent
    assert (dispatch.counters.mismatches, {error for _, error, _ in crew.reports}) == (0, {None})


def test_one_bad_row_is_found_when_it_is_drawn_and_then_every_row_of_that_peer_is_compared(own, truth):
    crew = FakeCrew({ANN: lambda call: changed_body(own, call.request, lambda s: torch.cat((s[:1] + 1.0, s[1:])))})
    dispatch = make_dispatch(own, crew, spot_checks=SpotChecks(0.05, random.Random(6)))
    follow(dispatch, route_of(ANN))
    wrong_tokens = []
    for seed in range(200):
        inputs = random_rows(seed, 4)
        dispatch.begin(4)
        dispatch._common.availability._paused.clear()
        wrong_tokens.append(not torch.allclose(dispatch(0, *inputs), truth(0, *inputs), atol=1e-4))
    first = next(number for number, (_, error, wrong) in enumerate(crew.reports) if wrong)
    assert 0 < first < 100
    assert all(wrong_tokens[:first])
    assert not any(wrong_tokens[first:])
    assert all(wrong for _, _, wrong in crew.reports[first:])


def slightly_wrong(sums: torch.Tensor) -> torch.Tensor:
    return sums + 0.9 * TOLERANCES[Encoding.FLOAT32] * sums.abs().amax(1, keepdim=True)


def test_law_1_when_every_row_is_verified_not_even_a_lie_within_the_tolerance_changes_a_value(own, truth):
    lies = (noisy, with_nan, slightly_wrong, lambda s: s.flip(0), lambda s: s * 0)
    for number, lie in enumerate(lies):
        crew = FakeCrew({ANN: lambda call, lie=lie: changed_body(own, call.request, lie)})
        dispatch = make_dispatch(own, crew, checks=True, verifies_all=True)
        follow(dispatch, route_of(ANN, None))
        inputs = random_rows(number, 8)
        dispatch.begin(8)
        torch.testing.assert_close(dispatch(0, *inputs), truth(0, *inputs), atol=1e-6, rtol=1e-6)
        assert len(crew.calls) == 1


def test_when_every_row_is_verified_one_that_cannot_be_waits(own, lacking, truth):
    lacking, bringer = lacking
    crew = FakeCrew({ANN: answer_of(own, "noisy")})
    dispatch = make_dispatch(lacking, crew, checks=True, verifies_all=True)
    follow(dispatch, {0: (None,) * 6 + (ANN, ANN)})
    rows, _, weights = random_rows(0, 2)
    chosen = torch.tensor([[0, 7], [1, 2]])
    dispatch.begin(2)
    with pytest.raises(ExpertsMissing) as raised:
        dispatch(0, rows, chosen, weights)
    assert raised.value.rows == (0,)
    bringer.here = {6, 7}
    dispatch.begin(2)
    torch.testing.assert_close(dispatch(0, rows, chosen, weights), truth(0, rows, chosen, weights))


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.integers(0, 1000), st.sets(st.integers(0, 5), min_size=1))
def test_the_request_for_some_rows_gives_the_sums_of_these_rows(own_by_held, seed, rows):
    own = own_by_held[EXPERTS]
    inputs = random_rows(seed, 6, 3)
    request, _ = pick_pairs(1, *inputs, torch.ones(6, 3, dtype=torch.bool))
    some = torch.tensor(sorted(rows))
    torch.testing.assert_close(own.sums(rows_of(request, some)), own.sums(request)[some])
