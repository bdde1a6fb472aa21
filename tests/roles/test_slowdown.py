"""Emulated devices: as slow as they should be in all, whatever the grain of sleep, with the same answers."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from swarm import PROMPTS, ask, open_swarm

from kvasir_node.model.trunk import RowTally
from kvasir_node.roles.slowdown import GRAIN_S, LATE_MAX_S, Pace, StretchedDispatch, Turns, stretched


class Machine:
    """A clock, the CPU time of one thread, and sleep that ends `overshoot_s` late."""

    def __init__(self, overshoot_s: float = 0.0) -> None:
        self.now = 100.0
        self.used_s = 5.0
        self.slept: list[float] = []
        self._overshoot_s = overshoot_s

    def pace(self, slowdown: float) -> Pace:
        return Pace(slowdown, clock=lambda: self.now, used=lambda: self.used_s, sleep=self.sleep)

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds + self._overshoot_s

    def compute(self, seconds: float, waited_s: float = 0.0) -> None:
        self.now += seconds + waited_s
        self.used_s += seconds


def test_a_computation_lasts_slowdown_times_its_cpu_time():
    machine = Machine()
    pace = machine.pace(10)
    mark = pace.begin()
    machine.compute(0.01)
    pace.end(mark)
    assert machine.now == pytest.approx(100.1)


def test_waiting_for_a_core_is_not_stretched():
    machine = Machine()
    pace = machine.pace(10)
    mark = pace.begin()
    machine.compute(0.01, waited_s=0.04)
    pace.end(mark)
    assert machine.now == pytest.approx(100.1)
    assert machine.slept == [pytest.approx(0.05)]


def test_what_is_too_short_to_be_slept_adds_up():
    machine = Machine()
    pace = machine.pace(10)
    for _ in range(1000):
        mark = pace.begin()
        machine.compute(0.000_005)
        pace.end(mark)
    assert machine.now == pytest.approx(100.05, abs=GRAIN_S)
    assert len(machine.slept) < 300


@given(
    pieces=st.lists(st.tuples(st.floats(1e-6, 3e-3), st.floats(0, 1e-3)), min_size=50, max_size=200),
    slowdown=st.floats(2, 100),
    overshoot_s=st.floats(0, 0.000_1),
)
def test_sleeps_that_end_late_do_not_make_the_total_wrong(pieces, slowdown, overshoot_s):
    machine = Machine(overshoot_s)
    pace = machine.pace(slowdown)
    for seconds, waited_s in pieces:
        mark = pace.begin()
        machine.compute(seconds, waited_s if waited_s < (slowdown - 1) * seconds else 0.0)
        pace.end(mark)
    wanted_s = slowdown * sum(seconds for seconds, _ in pieces)
    assert machine.now - 100 == pytest.approx(wanted_s, abs=2 * GRAIN_S + LATE_MAX_S)


def test_idle_time_is_not_made_up_for():
    machine = Machine()
    pace = machine.pace(10)
    for _ in range(3):
        mark = pace.begin()
        machine.compute(0.01)
        pace.end(mark)
        machine.now += 1.0
    assert machine.now == pytest.approx(100 + 3 * 1.1)


def test_threads_that_compute_at_the_same_time_share_one_core():
    pace = Pace(1.0, used=lambda: used.seconds)
    used = threading.local()

    def compute() -> None:
        used.seconds = 0.0
        mark = pace.begin()
        used.seconds = 0.05
        pace.end(mark)

    threads = [threading.Thread(target=compute) for _ in range(4)]
    began_at = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert time.monotonic() - began_at >= 0.19


@pytest.fixture
def turns_of(tmp_path):
    """Makes `Turns` of one machine, each as another process has them."""
    return lambda: Turns(tmp_path / "turns.lock")


def test_emulated_devices_of_a_machine_compute_experts_one_after_the_other(turns_of):
    inside, most = 0, 0

    def compute(turns: Turns) -> None:
        nonlocal inside, most
        for _ in range(20):
            with turns.turn():
                inside += 1
                most = max(most, inside)
                time.sleep(0.000_1)
                inside -= 1

    first, second = turns_of(), turns_of()
    threads = [threading.Thread(target=compute, args=(turns,)) for turns in (first, first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (inside, most) == (0, 1)


def test_a_computation_that_fails_gives_its_turn_back(turns_of):
    with pytest.raises(ZeroDivisionError), turns_of().turn():
        raise ZeroDivisionError
    with turns_of().turn():
        pass


def test_the_wait_for_a_turn_is_part_of_the_sleep():
    class LateTurns(Turns):
        def __init__(self) -> None: ...

        @contextmanager
        def turn(self):
            machine.now += 0.03  # another device computed
            yield

    machine = Machine()
    pace = Pace(10, LateTurns(), clock=lambda: machine.now, used=lambda: machine.used_s, sleep=machine.sleep)
    stretched(lambda *_: machine.compute(0.01), pace)(None, None)
    assert machine.now == pytest.approx(100.1)


class SlowExperts:
    """An `ExpertDispatch` that waits 1 s for an answer and computes nothing."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.forks = 0

    def begin(self, rows: int) -> None:
        self.rows = rows

    def __call__(self, layer, rows, chosen, weights) -> torch.Tensor:
        self.machine.now += 1.0
        return rows + layer

    def tally(self) -> RowTally:
        return RowTally([self.rows], [0], [0], [0])

    def fork(self):
        self.forks += 1
        return SlowExperts(self.machine)


def test_the_trunk_is_stretched_and_not_its_waiting():
    machine = Machine()
    inner = SlowExperts(machine)
    dispatch = StretchedDispatch(inner, machine.pace(10))
    rows = torch.ones(1, 4)
    dispatch.begin(1)
    for layer in range(2):
        machine.compute(0.01)
        assert torch.equal(dispatch(layer, rows, rows, rows), rows + layer)
    machine.compute(0.02)
    assert dispatch.tally().local == [1]
    assert machine.now == pytest.approx(100 + 2 * 1.0 + 10 * 0.04)
    assert isinstance(dispatch.fork(), StretchedDispatch)
    assert inner.forks == 1


def test_a_forward_that_raised_leaves_nothing_behind():
    machine = Machine()
    dispatch = StretchedDispatch(SlowExperts(machine), machine.pace(10))
    dispatch.begin(1)
    machine.compute(0.5)  # and then it raised
    before = machine.now
    dispatch.begin(1)
    machine.compute(0.01)
    dispatch.tally()
    assert machine.now - before == pytest.approx(0.1)


def test_a_worker_answers_the_same_and_later():
    machine = Machine()

    def compute(shard, request):
        machine.compute(0.01)
        return torch.arange(3)

    slow = stretched(compute, machine.pace(10))
    assert torch.equal(slow(None, None), torch.arange(3))
    assert machine.now == pytest.approx(100.1)


async def test_a_node_says_that_it_is_emulated_and_answers_the_same(tmp_path):
    async with open_swarm(tmp_path, coordinator__slots=2) as swarm:
        expected = await ask(swarm.main, PROMPTS[0], 8)
        flags = {"compute__slowdown": 3, "compute__answer_delay_s": 0.02}
        slow = await swarm.add("coordinator,worker", **flags)
        assert (await ask(slow, PROMPTS[0], 8)).text == expected.text
        emulated = [words for words in slow.snapshot().warnings if words.startswith("emulated")]
        assert "3 times slower" in emulated[0]
        assert "held back 20 ms" in emulated[1]
        assert not [words for words in swarm.main.snapshot().warnings if words.startswith("emulated")]
