"""One simulated run from a scenario's name to its document and its timeline.

It does not know what is printed where.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from kvasir_node.sim.figures import document
from kvasir_node.sim.scenarios import HOUR_S, scenario
from kvasir_node.sim.swarm import Swarm
from kvasir_node.sim.timeline import timeline

STEPS = 20  # of the progress that is told


@dataclass(frozen=True, slots=True)
class Outcome:
    document: dict[str, Any]
    timeline: str


def simulate(
    name: str,
    seed: int,
    nodes: int | None = None,
    hours: float | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Outcome:
    """Runs a scenario; `say` hears how far it is. Raises UsageError for a scenario or size that is not there.

    With liars the same swarm is run a second time, all honest, to say how much longer the honest ones wait.
    """
    chosen = scenario(name, nodes, hours)
    swarm, found = _run(Swarm(chosen, seed), seed, say)
    if chosen.liars:
        say("the same swarm without liars")
        _, honest = _run(Swarm(replace(chosen, liars=0.0), seed), seed, say)
        found["honest_wait_ratio"] = round(found["wait_per_copy_s"] / honest["wait_per_copy_s"], 3)
        found["wall_s"] = round(found["wall_s"] + honest["wall_s"], 2)
    if swarm.forecast is not None:
        found["predicted_tokens_per_s"] = round(swarm.forecast.tokens_per_s, 2)
        found["predicted_token_s"] = round(swarm.forecast.token_s, 3)
    events = [(at, what) for at, what, _ in chosen.events]
    events += [(at, word) for span in chosen.peaks for at, word in zip(span, ("much is asked", "little"), strict=True)]
    return Outcome(found, timeline(swarm.tally.samples, events))


def _run(swarm: Swarm, seed: int, say: Callable[[str], None]) -> tuple[Swarm, dict[str, Any]]:
    began_at = time.perf_counter()
    length_s = swarm.scenario.hours * HOUR_S
    for step in range(1, STEPS + 1):
        swarm.run(length_s * step / STEPS)
        say(f"{100 * step // STEPS} %")
    return swarm, document(swarm, seed, time.perf_counter() - began_at)
