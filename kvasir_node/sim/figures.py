"""What a simulated run amounts to: its figures, its phases, and one document of them.

It does not run anything. Each figure is computed from samples that are five seconds apart, and says the worst it saw.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvasir_node.decide.market_books import TOLD_TTL_S
from kvasir_node.sim.scenarios import HOUR_S, Scenario
from kvasir_node.sim.swarm import Swarm
from kvasir_node.sim.tally import Sample

SCHEMA = "kvasir.sim/1"
MET = 0.98  # share of the copies wanted that must be proven for demand to count as met


@dataclass(frozen=True, slots=True)
class Phase:
    at: float
    name: str


def phase_of(want: int, leased: int, proven: int, covered: int) -> str:
    """What a swarm is doing: calm, recruiting (wanted and not there), serving, or leaving (there and not wanted)."""
    if want and covered < MET * want:
        return "recruiting"
    if leased + proven > 1.1 * want:
        return "leaving"
    return "serving" if want else "calm"


def phases(samples: Sequence[Sample]) -> tuple[Phase, ...]:
    found: list[Phase] = []
    for sample in samples:
        name = phase_of(sample.want, sample.leased, sample.proven, sample.covered)
        if not found or found[-1].name != name:
            found.append(Phase(sample.at, name))
    return tuple(found)


def quantile(values: Sequence[float], share: float) -> float:
    """The least value that so great a share of them does not exceed; 0 of none."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else 0.0


def overshoot(samples: Sequence[Sample]) -> float:
    """Leases beyond the copies wanted, as a share of these, at worst; leases that are leaving do not count."""
    return max((sample.excess / sample.want for sample in samples if sample.want), default=0.0)


def _peak(samples: Sequence[Sample], begin: float, end: float) -> list[Sample]:
    return [sample for sample in samples if begin <= sample.at <= end]


def unmet_at_peak(samples: Sequence[Sample], scenario: Scenario, patience_s: float) -> float:
    """Share of the copies wanted that is not proven so long after nearly all of a peak's demand was there, at worst.

    Where a hub dies meanwhile, patience begins when the others have forgotten what it told of its leases: until then
    they leave to it what it had promised.
    """
    worst = 0.0
    for begin, end in scenario.peaks:
        inside = _peak(samples, begin, end)
        most = max(sample.want for sample in inside)
        risen_at = next(sample.at for sample in inside if sample.want >= 0.95 * most)
        dead = [at for at, what, _ in scenario.events if what == "hub dies" and begin <= at <= risen_at + patience_s]
        since = max([risen_at, *(at + TOLD_TTL_S for at in dead)])
        late = [sample for sample in inside if sample.at >= since + patience_s and sample.want]
        worst = max(worst, 1 - late[0].covered / late[0].want if late else 1.0)
    return worst


def surplus_after_s(samples: Sequence[Sample], scenario: Scenario) -> float:
    """From the end of a peak until no more is held than is wanted, and that is as little as before it, at worst."""
    worst = 0.0
    for begin, end in scenario.peaks:
        before = max((sample.want for sample in samples if sample.at < begin), default=0)
        before = min(before, _peak(samples, begin - 10.0, begin)[0].want)
        over = (
            sample.at - end
            for sample in samples
            if sample.at > end and sample.want <= before and sample.leased + sample.proven <= 1.01 * sample.want
        )
        worst = max(worst, next(over, samples[-1].at - end))
    return worst


def coverage_least(samples: Sequence[Sample], begin: float, end: float) -> float:
    """Copies proven as a share of those wanted, at worst within a time."""
    return min((sample.covered / sample.want for sample in _peak(samples, begin, end) if sample.want), default=1.0)


def document(swarm: Swarm, seed: int, wall_s: float) -> dict[str, Any]:
    """The figures of one run; all but `wall_s` are the same for the same scenario, size and seed."""
    scenario, tally, world = swarm.scenario, swarm.tally, swarm.world
    length_s = scenario.hours * HOUR_S
    fetch_s = quantile(tally.fetch_s, 0.99)
    patience_s = 2 * world.market.poll_interval_s + fetch_s
    traffic = world.network.traffic
    took_part = len(tally.joins)
    found: dict[str, Any] = {
        "schema": SCHEMA,
        "scenario": scenario.name,
        "seed": seed,
        "nodes": scenario.nodes,
        "hours": scenario.hours,
        "hubs": scenario.hubs,
        "overshoot": round(overshoot(tally.samples), 4),
        "unmet_at_peak": round(unmet_at_peak(tally.samples, scenario, patience_s), 4) if scenario.peaks else None,
        "unmet_mean": round(_mean_unmet(tally.samples), 4),
        "fetch_p99_s": round(fetch_s, 1),
        "wait_per_copy_s": round(tally.unmet_s / max(1, tally.copies_wanted), 2),
        "surplus_after_s": round(surplus_after_s(tally.samples, scenario), 1) if scenario.peaks else None,
        "flaps_per_node_hour": round(sum(tally.joins.values()) / max(1, took_part) / scenario.hours, 3),
        "flaps_per_node_hour_max": round(max(tally.joins.values(), default=0) / scenario.hours, 3),
        "nodes_that_worked": took_part,
        "copies_wanted_max": max(sample.want for sample in tally.samples),
        "layers_per_slice_near": _rounded(tally.near.layers_per_slice),
        "layers_per_slice_far": _rounded(tally.far.layers_per_slice),
        "gossip_bytes_per_node_s": round((tally.gossip_bytes + traffic.call_bytes / scenario.nodes) / length_s, 1),
        "hub_messages_per_s": traffic.busiest_second(),
        "doubled_leases_s": round(tally.doubled_s, 1),
        "liars_counted": len(tally.liars_counted),
        "liar_trials_max": _liar_trials(swarm),
        "honest_wait_ratio": None,
        "answered": sum(each.answered for each in world.coordinators.values()),
        "refused": sum(each.refused for each in world.coordinators.values()),
        "records_refused": {
            reason.value: sum(hub.refused.get(reason, 0) for hub in world.hubs.values())
            for reason in sorted({reason for hub in world.hubs.values() for reason in hub.refused})
        },
        "predicted_tokens_per_s": None,
        "predicted_token_s": None,
        "phases": [{"at_s": phase.at, "name": phase.name} for phase in phases(tally.samples)],
        "events": world.heap.count,
        "digest": tally.digest,
        "wall_s": round(wall_s, 2),
    }
    return found


def _rounded(figure: float | None) -> float | None:
    return None if figure is None else round(figure, 3)


def _mean_unmet(samples: Sequence[Sample]) -> float:
    wanted = sum(sample.want for sample in samples)
    return 1 - sum(sample.covered for sample in samples) / wanted if wanted else 0.0


def _liar_trials(swarm: Swarm) -> int:
    """Trials that one lying identity got from one coordinator, at most."""
    workers = swarm.world.workers
    return max(
        (
            count
            for coordinator in swarm.world.coordinators.values()
            for peer, count in coordinator.trials.items()
            if not workers[peer].manner.answers_right
        ),
        default=0,
    )
