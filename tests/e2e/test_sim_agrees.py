"""The simulation and a real swarm of five processes go through the same phases, in the same order."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace

import httpx
import pytest
import trio
from local_swarm import PROMPTS, Process, ask, node

from kvasir_node.sim.figures import phase_of, phases
from kvasir_node.sim.scenarios import HOME, HOUR_S, SLICE_BYTES, Asked, Crowd, scenario
from kvasir_node.sim.swarm import Swarm
from kvasir_node.sim.workload import SimModel

TIMEOUT_S = 60
TOKENS = 24


def in_order(seen: list[str]) -> list[str]:
    """Each phase where it came first, and the last one: demand comes in steps, so recruiting may begin again."""
    return [*dict.fromkeys(seen), seen[-1]]


def simulated(slices: int) -> list[str]:
    """One coordinator with so many slices, four workers, one hub and one burst."""
    model = SimModel("demo", 1, slices, 4, SLICE_BYTES, alone_tokens_s=400.0)

    def rate(now: float) -> float:
        return 3.4 if 200 <= now < 500 else 0.2

    peaks = ((200.0, 500.0),)
    crowd = (Crowd(1.0, HOME, (slices, slices)),)
    small = replace(
        scenario("flash-crowd", 50, 0.25), asked=(Asked(model, rate, 3.4),), peaks=peaks, hubs=1, crowd=crowd
    )
    swarm = Swarm(replace(small, nodes=4), 1)
    swarm.run(0.25 * HOUR_S)
    return [phase.name for phase in phases(swarm.tally.samples)]


class Watch:
    """What the hub of a running node sees, as phases."""

    def __init__(self, main: Process) -> None:
        self.main = main
        self.seen: list[str] = []

    async def look(self) -> None:
        rows = (await trio.to_thread.run_sync(self.main.status))["hub"]["demand"]
        want, leased, proven = (sum(row[name] for row in rows) for name in ("want", "leased", "proven"))
        phase = phase_of(want, leased, proven, sum(min(row["want"], row["proven"]) for row in rows))
        if not self.seen or self.seen[-1] != phase:
            self.seen.append(phase)

    async def until(self, phase: str) -> None:
        with trio.fail_after(TIMEOUT_S):
            while not self.seen or self.seen[-1] != phase:
                await self.look()
                await trio.sleep(0.05)


@pytest.mark.soak  # five processes take longer to start than all simulated tests together
@pytest.mark.timeout(600)
async def test_a_burst_has_the_same_phases_in_virtual_time_and_in_five_processes(
    tmp_path, monkeypatch: pytest.MonkeyPatch
):
    with ExitStack() as stack:
        main = stack.enter_context(node(tmp_path, "main", "--role", "coordinator,hub", "--slots", "2"))
        monkeypatch.setenv("KVASIR_NETWORK__JOIN", str(main.ready["ticket"]))
        for number in range(4):
            stack.enter_context(node(tmp_path, f"worker-{number}", "--role", "worker"))
        watch = Watch(main)
        await watch.until("calm")
        async with httpx.AsyncClient() as client, trio.open_nursery() as nursery:

            async def burst(number: int) -> None:
                while True:
                    await ask(client, main.ready["api"], PROMPTS[number % len(PROMPTS)], TOKENS)

            for number in range(8):
                nursery.start_soon(burst, number)
            await watch.until("serving")
            nursery.cancel_scope.cancel()
        await watch.until("leaving")
        await watch.until("calm")
        slices = main.status()["model"]["slices"]
    assert in_order(watch.seen) == in_order(simulated(slices)) == ["calm", "recruiting", "serving", "leaving", "calm"]
