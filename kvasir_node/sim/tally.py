"""What happened in a simulated swarm, counted as it happens and sampled at even times.

It does not judge: bounds are in the tests. All is what a bystander who sees everything would count: leases as their
workers hold them, proofs as their coordinators list them.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvasir_node.base.ids import ModelId, PeerId, SliceId
from kvasir_node.decide.market import Key
from kvasir_node.decide.placement import Assignment

if TYPE_CHECKING:
    from kvasir_node.sim.coordinators import CoordinatorNode
    from kvasir_node.sim.workers import WorkerNode
    from kvasir_node.sim.world import World

SETTLED_S = 300.0  # after demand fell, what is held beyond it is leaving, not doubled
PROVIDERS_MAX = 4  # workers that are looked at for a fetch


@dataclass(frozen=True, slots=True)
class Sample:
    """Copies over all slices: `covered` = proven and wanted; `excess` = leases at all hubs that its coordinator can
    reach, beyond the copies wanted of each slice, unless its demand has just fallen."""

    at: float
    want: int
    leased: int  # held and not proven
    proven: int
    covered: int
    excess: int
    queued: int
    busy_nodes: int
    up_nodes: int
    tokens_s: float


@dataclass(slots=True)
class Shapes:
    """What workers with several slices hold; each layer that one has a part in costs a round trip per token."""

    slices: int = 0
    layers: int = 0  # over all workers

    @property
    def layers_per_slice(self) -> float | None:
        return self.layers / self.slices if self.slices else None


class Tally:
    def __init__(self) -> None:
        self.samples: list[Sample] = []
        self.gossip_bytes = 0.0  # heard by each node
        self.joins: Counter[PeerId] = Counter()  # idle nodes that took up work
        self.fetch_s: list[float] = []
        self.liars_counted: set[PeerId] = set()
        self.copies_wanted = 0  # each time a want rose, by as much as it rose
        self.unmet_s = 0.0  # copies × seconds that were wanted and not proven
        self.doubled_s = 0.0  # the longest that a slice had more copies than wanted though demand had not fallen
        self.near, self.far = Shapes(), Shapes()
        self.up_nodes = 0
        self._busy = 0
        self._held_count = 0
        self._world: World
        self._digest = hashlib.sha256()
        self._proven: dict[tuple[ModelId, SliceId], dict[PeerId, WorkerNode]] = {}
        self._want: dict[Key, int] = {}
        self._wants: dict[PeerId, int] = {}  # by coordinator, in all
        self._fell_at: dict[PeerId, float] = {}
        self._doubled_since: dict[Key, float] = {}

    def begin(self, world: World) -> None:
        self._world = world

    @property
    def digest(self) -> str:
        """Of every lease and proof with its time: the same for the same seed, and for no other."""
        return self._digest.hexdigest()

    def _note(self, what: str, worker: WorkerNode, assignment: Assignment) -> None:
        line = f"{self._world.now:.6f} {what} {worker.peer.id} {assignment.coordinator} {assignment.slice}\n"
        self._digest.update(line.encode())

    def gained(self, worker: WorkerNode, assignment: Assignment) -> None:
        self._note("lease", worker, assignment)
        self._held_count += 1
        if worker.leases == 1:
            self.joins[worker.peer.id] += 1
            self._busy += 1

    def dropped(self, worker: WorkerNode, assignment: Assignment) -> None:
        self._note("end", worker, assignment)
        self._held_count -= 1
        self._busy -= not worker.leases
        self._proven.get((assignment.model, assignment.slice), {}).pop(worker.peer.id, None)

    def proven(self, worker: WorkerNode, assignment: Assignment) -> None:
        self._note("proof", worker, assignment)
        self._proven.setdefault((assignment.model, assignment.slice), {})[worker.peer.id] = worker

    def holders(self, assignment: Assignment) -> list[WorkerNode]:
        """Some workers that could pass the blocks of a slice on."""
        return list(self._proven.get((assignment.model, assignment.slice), {}).values())[:PROVIDERS_MAX]

    def fetched(self, took_s: float) -> None:
        self.fetch_s.append(took_s)

    def gossiped(self, heard_bytes: float) -> None:
        self.gossip_bytes += heard_bytes

    def wanted(self, coordinator: CoordinatorNode) -> None:
        """Its demand has changed."""
        issuer, model = coordinator.peer.id, coordinator.model.id
        total = 0
        gone = {key for key in self._want if key[0] == issuer}
        for wanted in coordinator.wants:
            key = (issuer, model, wanted.slice)
            gone.discard(key)
            self.copies_wanted += max(0, wanted.want - self._want.get(key, 0))
            self._want[key] = wanted.want
            total += wanted.want
        for key in gone:
            del self._want[key]
        if total < self._wants.get(issuer, 0):
            self._fell_at[issuer] = self._world.now
        self._wants[issuer] = total

    def note_shapes(self, coordinator: CoordinatorNode) -> None:
        """How its workers' slices lie now: those of near workers and those of far ones."""
        held: dict[PeerId, list[SliceId]] = {}
        for peer, part in coordinator.proven:
            held.setdefault(peer, []).append(part)
        for peer, parts in held.items():
            rtt_s = self._world.network.round_trip_s(self._world.workers[peer].peer, coordinator.peer)
            shapes = self.near if rtt_s < coordinator.near_rtt_s else self.far
            if len(parts) > 1:
                shapes.slices += len(parts)
                shapes.layers += len({part.layer for part in parts})

    def healed(self) -> None:
        """What could not be known on both sides of a partition is over: doubled leases count from now."""
        self.doubled_s = 0.0
        self._doubled_since.clear()

    def sample(self, every_s: float) -> None:
        """Looks at everything, and again in so many seconds."""
        world, now = self._world, self._world.now
        proven_of: Counter[Key] = Counter()
        for coordinator in world.coordinators.values():
            for peer, part in coordinator.proven:
                proven_of[coordinator.peer.id, coordinator.model.id, part] += 1
                if not world.workers[peer].manner.answers_right:
                    self.liars_counted.add(peer)
        covered = sum(min(want, proven_of[key]) for key, want in self._want.items())
        held = self._held_count
        want, proven = sum(self._want.values()), proven_of.total()
        self.samples.append(
            Sample(
                at=now,
                want=want,
                leased=max(0, held - proven),
                proven=proven,
                covered=covered,
                excess=self._excess(now),
                queued=sum(each.admission.queued for each in world.coordinators.values()),
                busy_nodes=self._busy,
                up_nodes=self.up_nodes,
                tokens_s=sum(each.engine.tokens_s for each in world.coordinators.values()),
            )
        )
        self.unmet_s += (want - covered) * every_s
        world.heap.after(every_s, self.sample, every_s)

    def _excess(self, now: float) -> int:
        excess, doubled = 0, self._doubled_since
        held: Counter[Key] = Counter()
        for hub in self._world.hubs.values():
            for key, leases in hub.market.held() if hub.peer.is_up else ():
                if self._world.network.reach(hub.peer, self._world.coordinators[key[0]].peer):
                    held[key] += leases
        for key in [key for key in doubled if key not in held]:
            del doubled[key]
        for key, leases in held.items():
            beyond = leases - self._want.get(key, 0)
            fell_at = self._fell_at.get(key[0])
            if beyond <= 0 or (fell_at is not None and now - fell_at < SETTLED_S):
                doubled.pop(key, None)
                continue
            excess += beyond
            self.doubled_s = max(self.doubled_s, now - doubled.setdefault(key, now))
        return excess
