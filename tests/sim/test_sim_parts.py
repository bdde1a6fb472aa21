"""Heap, network, shared engine and figures, each by itself."""

import random
from dataclasses import replace

import pytest

from kvasir_node.base.ids import PeerId
from kvasir_node.sim.figures import overshoot, phase_of, phases, quantile, unmet_at_peak
from kvasir_node.sim.heap import Heap
from kvasir_node.sim.message_sizes import NO_OFFER_BYTES, OFFER_BYTES, POLL, RENEWALS, VERDICTS
from kvasir_node.sim.network import CALL_TIMEOUT_S, Link, Network, Peer
from kvasir_node.sim.scenarios import scenario
from kvasir_node.sim.tally import Sample
from kvasir_node.sim.timeline import LEGEND, timeline
from kvasir_node.sim.workload import SharedEngine, gain

LINK = Link("home", 0.01, 1e6, 2e6)


def test_what_is_asked_for_the_same_moment_happens_in_the_order_of_asking():
    heap, seen = Heap(), []
    heap.at(2.0, seen.append, "c")
    heap.at(1.0, seen.append, "a")
    heap.at(1.0, seen.append, "b")
    heap.after(5.0, seen.append, "later")
    heap.run(3.0)
    assert (seen, heap.now) == (["a", "b", "c"], 3.0)
    heap.at(0.0, seen.append, "late")  # counts as now
    heap.run(3.0)
    assert (seen[-1], heap.now) == ("late", 3.0)


class Two:
    """Two peers, and what was heard of a call between them."""

    def __init__(self) -> None:
        self.heap = Heap()
        self.network = Network(self.heap, random.Random(1), loss_ratio=0.0)
        self.a, self.b = Peer(PeerId("a"), LINK), Peer(PeerId("b"), LINK)
        self.heard: list[tuple[str, float]] = []

    def call(self) -> None:
        def note(what: str) -> None:
            self.heard.append((what, self.heap.now))

        self.network.call(self.a, self.b, lambda: "answer", note, lambda: note("failed"))


def test_a_call_takes_a_round_trip():
    two = Two()
    two.call()
    two.heap.run(1.0)
    ((what, at),) = two.heard
    assert what == "answer"
    assert at == pytest.approx(two.network.round_trip_s(two.a, two.b), rel=0.06)


@pytest.mark.parametrize("happens", ["down", "partition", "restart"])
def test_a_call_to_somebody_who_is_gone_fails_after_a_while(happens):
    two = Two()
    two.call()
    if happens == "down":
        two.b.is_up = False
    elif happens == "partition":
        two.b.side = 1
    else:
        two.b.life += 1
    two.heap.run(60.0)
    ((what, at),) = two.heard
    assert what == "failed"
    assert CALL_TIMEOUT_S <= at < CALL_TIMEOUT_S + 0.1
    two.heard.clear()
    two.b.side, two.b.is_up = 1, True
    two.call()
    two.a.life += 1  # who was restarted hears no answer to what it asked before
    two.heap.run(120.0)
    assert two.heard == []


def test_messages_are_as_large_as_the_real_ones():
    assert 150 < POLL.of(0) < POLL.of(10) < POLL.of(0) + 10 * 20
    assert RENEWALS.of(64) - RENEWALS.of(0) < 64 * 64
    assert VERDICTS.of(64) - VERDICTS.of(0) < 64 * 16
    assert NO_OFFER_BYTES < OFFER_BYTES < 700


def test_requests_share_an_engine_and_end_when_their_tokens_are_done():
    engine = SharedEngine(alone_tokens_s=100.0, slots=1)
    engine.start(1, 100.0)
    engine.start(2, 50.0)
    rate = engine.tokens_s
    assert engine.next_end_at() == pytest.approx(100.0 / rate)
    engine.advance(100.0 / rate)
    assert engine.finish() == 2
    assert engine.next_end_at() == pytest.approx(100.0 / rate + 50.0 / engine.tokens_s)
    engine.gain = 2.0
    assert engine.next_end_at() == pytest.approx(100.0 / rate + 25.0 / 100.0)


def test_workers_take_over_all_but_the_trunk():
    assert gain(0.0, is_held=True) == 1.0
    assert gain(1.0, is_held=True) == pytest.approx(1 / 0.6)
    assert gain(1e9, is_held=True) == pytest.approx(5.0)
    assert gain(0.0, is_held=False) < 0.1 < gain(0.5, is_held=False) < gain(1.0, is_held=False) == 1.0


def sample(at: float, want: int, leased: int, proven: int, excess: int = 0) -> Sample:
    return Sample(at, want, leased, proven, min(want, proven), excess, 0, 0, 0, 0.0)


def test_phases():
    told = [
        sample(0, 0, 0, 0), sample(5, 100, 50, 0), sample(10, 100, 3, 97), sample(15, 100, 2, 98), sample(20, 0, 0, 98),
        sample(25, 0, 0, 0),
    ]  # fmt: skip
    assert [(phase.at, phase.name) for phase in phases(told)] == [
        (0, "calm"), (5, "recruiting"), (15, "serving"), (20, "leaving"), (25, "calm"),
    ]  # fmt: skip
    assert phase_of(0, 0, 0, 0) == "calm"


def test_the_worst_overshoot_counts_and_quantiles_are_values_that_were_there():
    assert overshoot([sample(0, 0, 0, 0), sample(5, 10, 0, 11, 1), sample(10, 100, 0, 105, 5)]) == 0.1
    assert quantile([], 0.5) == 0.0
    assert quantile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert quantile([3.0, 1.0, 2.0], 1.0) == 3.0


def test_a_timeline_shows_copies_as_bars_and_events_between_its_lines():
    told = [sample(5.0 * n, 40, 10, 20) for n in range(3)]
    lines = timeline(told, [(7.0, "a hub dies")]).splitlines()
    assert lines[1].split("|")[1] == "█" * 20 + "▒" * 10 + "·" * 10
    assert "recruiting" in lines[1]
    assert lines[3].strip() == "0:00:07  -- a hub dies"
    assert lines[-1] == LEGEND
    (line,) = timeline([sample(0.0, 10, 0, 20)], []).splitlines()[1:-1]
    assert line.split("|")[1] == "█" * 20 + "+" * 20


@pytest.mark.parametrize(("dies_at", "unmet"), [(None, 0.1), (10.0, 0.0), (90.0, 0.1)])
def test_what_a_dead_hub_had_promised_is_waited_for_until_the_others_have_forgotten_it(dies_at, unmet):
    """Demand for 100 copies; 90 are proven at once, the rest after 45 seconds; 20 may pass."""
    events = () if dies_at is None else ((dies_at, "hub dies", 0),)
    peak = replace(scenario("hub-death"), peaks=((0.0, 120.0),), events=events)
    samples = [Sample(5.0 * n, 100, 0, 90, 90 if n < 9 else 100, 0, 0, 9, 9, 1.0) for n in range(24)]
    assert unmet_at_peak(samples, peak, 20.0) == pytest.approx(unmet)
