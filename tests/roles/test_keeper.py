"""A worker that is kept to its owner's wishes: it drains, drops nothing, says why, and comes back."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
import trio
from role_fakes import SLICES, open_world, settings_with, with_slices

from kvasir_node.base.errors import UsageError
from kvasir_node.decide.manners import Senses
from kvasir_node.decide.placement import Stage
from kvasir_node.roles.manners import LOOK_S, Keeper, Sensor

FREE = Senses(on_battery=False, others_load=0.0, minute_of_day=600)


class Listener:
    """Stands for a worker and notes what it is told."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def pause(self, reason: str) -> None:
        self.told.append(reason)

    def resume(self) -> None:
        self.told.append("resume")


@pytest.mark.parametrize(
    ("wish", "forbidden", "reason", "busy_s"),
    [
        ({"worker__only_on_ac": True}, {"on_battery": True}, "on battery", 0.0),
        (
            {"worker__only_when_idle": True},
            {"others_load": 0.5},
            "this machine is in use: others take 50% of its processors",
            75.0,
        ),
        ({"worker__quiet_hours": "22:00-07:00"}, {"minute_of_day": 1320}, "quiet hours until 07:00", 0.0),
        ({"worker__metered_interfaces": "wwan0"}, {"metered": "wwan0"}, "the metered network wwan0 is up", 0.0),
    ],
)
async def test_a_worker_whose_owner_wishes_it_drains_drops_nothing_says_why_and_comes_back(
    autojump_clock, tmp_path, wish, forbidden, reason, busy_s
):
    """`busy_s` = how long load is watched before it counts, both ways."""
    async with open_world(tmp_path) as world:
        carl = world.coordinator
        carl.wants = with_slices()
        world.nursery.start_soon(world.keep_reporting)
        ann = await world.add_worker()
        machine = [FREE]
        keeper = Keeper(settings_with(**wish).worker, ann.worker, lambda: machine[0])
        world.nursery.start_soon(keeper.run)
        await world.until(lambda: ann.stages().count(Stage.SERVING) == len(SLICES))
        machine[0] = replace(FREE, **forbidden)
        await world.until(lambda: ann.worker.snapshot().state == "draining", LOOK_S + 1 + busy_s)
        assert ann.worker.snapshot().reason == reason
        await world.until(lambda: ann.worker.snapshot().state == "paused", 30)
        assert sorted(carl.log)[-len(SLICES) :] == [("detach", str(part)) for part in SLICES]
        assert world.hub.snapshot().leases == 0
        await trio.sleep(30)
        assert ann.stages() == []
        machine[0] = FREE
        await world.until(lambda: ann.stages().count(Stage.SERVING) == len(SLICES), 60 + busy_s)
        assert ann.worker.snapshot().reason == ""


async def test_an_owners_pause_holds_until_resume_and_nobody_resumes_a_worker_that_leaves(autojump_clock, tmp_path):
    async with open_world(tmp_path) as world:
        world.coordinator.wants = with_slices(SLICES[:1])
        world.nursery.start_soon(world.keep_reporting)
        ann = await world.add_worker()
        keeper = Keeper(settings_with().worker, ann.worker)
        keeper.pause()
        await trio.sleep(60)
        assert ann.stages() == []
        assert (ann.worker.snapshot().state, ann.worker.snapshot().reason) == ("paused", "paused by its owner")
        keeper.resume()
        await world.until(lambda: ann.stages() == [Stage.SERVING])
        keeper.pause()
        await ann.worker.drain()
        keeper.resume()
        await trio.sleep(60)
        assert ann.stages() == []


async def test_a_worker_is_told_once_and_again_when_the_reason_is_another(autojump_clock, nursery):
    listener, machine = Listener(), [replace(FREE, on_battery=True)]
    keeper = Keeper(settings_with(worker__only_on_ac=True).worker, listener, lambda: machine[0])
    nursery.start_soon(keeper.run)
    await trio.sleep(10 * LOOK_S)
    keeper.pause()
    machine[0] = FREE
    await trio.sleep(2 * LOOK_S)
    keeper.resume()
    keeper.resume()
    assert listener.told == ["on battery", "paused by its owner", "resume"]


async def test_without_wishes_nothing_is_sensed(autojump_clock, nursery):
    looks: list[float] = []

    def sense() -> Senses:
        looks.append(trio.current_time())
        return FREE

    nursery.start_soon(Keeper(settings_with().worker, Listener(), sense).run)
    await trio.sleep(100)
    assert looks == []


def test_quiet_hours_that_cannot_be_read_are_refused():
    with pytest.raises(UsageError, match="got 'late'"):
        Keeper(settings_with(worker__quiet_hours="late").worker, Listener())


def test_this_machine_can_be_sensed():
    senses = Sensor(("no such interface", "lo"))()
    assert 0 <= senses.others_load <= 1
    assert 0 <= senses.minute_of_day < 1440
    assert senses.metered == "lo"
    assert Sensor(())().metered == ""


def test_a_process_that_gives_way_is_never_made_more_urgent():
    script = (
        "import psutil, kvasir_node.roles.manners as m; own = psutil.Process(); before = own.nice(); found = []\n"
        "for niceness in (before + 3, before + 1, 0): m.lower_priority(niceness); found.append(own.nice() - before)\n"
        "print(found)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[3, 3, 3]"
