"""Where experts are shown to be, and how changes among workers are told."""

from __future__ import annotations

import time
from dataclasses import replace

from kvasir_node.base.events import WorkerChanged
from kvasir_node.base.ids import PeerId, SliceId
from kvasir_node.base.snapshot import WorkerPeerSnapshot
from kvasir_node.roles.expert_view import expert_layers
from kvasir_node.roles.worker_news import WorkerNews

ANN, BOB = PeerId("ann"), PeerId("bob")


def test_each_expert_has_one_place_and_its_share_of_the_heat():
    layers = expert_layers(
        {0: [1.0, 4.0, 0.0, 2.0], 3: [0.0, 0.0, 0.0, 8.0]},
        held={0: {0, 1}, 3: {3}},
        on_disk={0: {0, 1, 2, 3}},
        routes={0: (None, ANN, None, BOB), 3: (ANN, None, None, None)},
        proven=[(ANN, SliceId(0, 0, 2)), (BOB, SliceId(0, 1, 3)), (ANN, SliceId(3, 0, 0))],
    )
    assert [(each.layer, each.where) for each in layers] == [(0, "hwmw"), (3, "w..h")]
    assert [each.copies for each in layers] == [(1, 2, 2, 1), (1, 0, 0, 0)]
    assert [each.use for each in layers] == [(12, 50, 0, 25), (0, 0, 0, 100)]


def test_a_model_that_was_never_used_has_no_heat():
    (layer,) = expert_layers({0: [0.0, 0.0]}, held={}, on_disk={}, routes={}, proven=[])
    assert (layer.use, layer.where, layer.copies) == ((0, 0), "..", (0, 0))


def test_a_large_model_is_shown_in_milliseconds():
    heat = {layer: [float(index) for index in range(128)] for layer in range(48)}
    held = {layer: frozenset(range(64)) for layer in heat}
    on_disk = {layer: set(range(128)) for layer in heat}
    routes = dict.fromkeys(heat, (None, ANN) * 64)
    proven = [
        (peer, SliceId(layer, first, first + 7)) for layer in heat for first in range(0, 128, 8) for peer in (ANN, BOB)
    ]
    began_s = time.process_time()
    assert len(expert_layers(heat, held, on_disk, routes, proven)) == 48
    assert time.process_time() - began_s < 0.1  # 3 ms on an idle core


def worker(peer: str, state: str, *slices: str, reason: str = "") -> WorkerPeerSnapshot:
    return WorkerPeerSnapshot(peer, peer.title(), slices, state, "direct", None, 0, 0, 0, reason)


def test_what_changed_among_the_workers_is_told_once():
    told: list[WorkerChanged] = []
    news = WorkerNews(told.append)
    news.look([worker("ann", "new", "0:0-7")])
    news.look([worker("ann", "new", "0:0-7")])
    assert [(each.state, each.was, each.slices) for each in told] == [("new", "", 1)]
    news.look([worker("ann", "proven", "0:0-7", "1:0-7"), worker("bob", "trial", "2:0-7")])
    assert [(each.name, each.state, each.was) for each in told[1:]] == [("Ann", "proven", "new"), ("Bob", "trial", "")]
    news.look([worker("ann", "suspect", "0:0-7", reason="timed out"), worker("bob", "trial", "2:0-7")])
    assert (told[-1].state, told[-1].was, told[-1].reason) == ("suspect", "proven", "timed out")


def test_a_worker_that_left_is_gone_whether_it_is_remembered_or_not():
    told: list[WorkerChanged] = []
    news = WorkerNews(told.append)
    ann, bob = worker("ann", "proven", "0:0-7"), worker("bob", "new", "1:0-7")
    news.look([ann, bob])
    news.look([replace(ann, slices=())])  # it has a history, so it is still shown
    assert [(each.name, each.state, each.was) for each in told[2:]] == [
        ("Ann", "gone", "proven"),
        ("Bob", "gone", "new"),
    ]
    news.look([])
    assert len(told) == 4
    news.look([ann])
    assert (told[-1].state, told[-1].was) == ("proven", "")


def test_a_banned_worker_is_told_as_banned_and_not_as_gone():
    told: list[WorkerChanged] = []
    news = WorkerNews(told.append)
    news.look([worker("ann", "proven", "0:0-7")])
    news.look([worker("ann", "banned", reason="it lied")])
    assert (told[-1].state, told[-1].reason) == ("banned", "it lied")
