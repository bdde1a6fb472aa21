"""A simulated worker: `decide/placement` behind simulated messages, disks and links; and those who cheat.

It does what roles/worker.py does. A node that has nothing to do costs nothing: it wakes for its next poll, and is told
only of demand that it would act on.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from kvasir_node.base.ids import ModelId, PeerId, SliceId
from kvasir_node.decide import placement
from kvasir_node.decide.market import LeaseOffer, LeaseReport
from kvasir_node.decide.placement import Assignment, Placement, PlacementLimits
from kvasir_node.sim.network import CALL_TIMEOUT_S, Peer
from kvasir_node.sim.world import Seen, World

UNLOAD_GRACE_S = 1.0  # calls that were on their way when we detached are still answered
LOAD_S = (0.3, 1.5)
REJOIN_S = (0.5, 8.0)  # until a hub that came back is connected again
DISK_SLICES = 64  # kept for next time; the eldest makes room
SLICES_MAX = 64
_TICK = placement.Tick()


@dataclass(frozen=True, slots=True)
class Manner:
    """What a node really does with a lease."""

    name: str = "honest"
    fetches: bool = True  # else it never gets anywhere ...
    claims_progress: bool = True  # ... and says so, or not
    answers: bool = True  # calls of its trial
    answers_right: bool = True


HONEST = Manner()


class WorkerNode:
    def __init__(self, world: World, peer: Peer, memory_bytes: int, seed: int, manner: Manner = HONEST) -> None:
        self.peer = peer
        self.manner = manner
        self.upload_free_at = 0.0
        self._world = world
        self._memory_bytes = memory_bytes
        self._chance = random.Random(seed)
        self._disk: dict[tuple[ModelId, SliceId], None] = {}
        self._round_trips: dict[PeerId, float] = {}
        self._mind = self._new_mind()
        self._wakes_at: float | None = None
        self._seen = 0  # number of the newest tables that the mind knows
        self._begun_at: dict[str, float] = {}  # by lease
        self._taken_bytes = 0

    def _new_mind(self) -> Placement:
        market = self._world.market
        limits = PlacementLimits(SLICES_MAX, market.poll_interval_s, market.renew_interval_s)
        return Placement(limits, self._chance)

    @property
    def leases(self) -> int:
        """How many it holds, those that are draining included."""
        return len(self._begun_at)

    # Life -----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        self.peer.is_up = True
        self.peer.life += 1
        self._world.tally.up_nodes += 1
        self._mind = self._new_mind()
        self._wakes_at = None
        self.hubs_changed()

    def stop(self) -> None:
        """The machine is switched off: nobody is told."""
        self.peer.is_up = False
        self._world.tally.up_nodes -= 1
        for assignment, _ in self._mind.stages().values():
            self._drop(assignment)
            self._world.coordinators[assignment.coordinator].lose(self, self.peer.life)
        self.peer.life += 1
        self._mind = self._new_mind()

    def hubs_changed(self) -> None:
        self._tell(placement.HubsKnown(self._world.hubs_of(self.peer)))

    def cut_off(self) -> None:
        """A partition began: connections across it end, which both sides notice after a while."""
        for assignment, _ in self._mind.stages().values():
            coordinator = self._world.coordinators[assignment.coordinator]
            if not self._world.network.reach(self.peer, coordinator.peer):
                coordinator.lose(self, self.peer.life)
                self._later(CALL_TIMEOUT_S, self._tell, placement.CoordinatorLost(assignment.lease))
        self._later(CALL_TIMEOUT_S, self.hubs_changed)

    def hub_came(self) -> None:
        self._later(self._chance.uniform(*REJOIN_S), self.hubs_changed)

    # The mind -------------------------------------------------------------------------------------------------

    def hear(self, seen: Seen) -> None:
        """Gossip that may be acted on."""
        if self.peer.is_up and self._room() > 0:
            self._see(seen)
            self._arm()

    def _see(self, seen: Seen) -> None:
        self._seen = seen.number
        room = self._room()
        copies = sum(copies for size, copies in seen.open if size <= room)
        self._mind.handle(placement.DemandSeen(copies, seen.idle), self._world.now)

    def _room(self) -> int:
        return self._memory_bytes - self._taken_bytes

    def _tell(self, event: placement.Event) -> None:
        for command in self._mind.handle(event, self._world.now):
            self._do(command)
        self._arm()

    def _arm(self) -> None:
        at = self._mind.next_at()
        if at is not None and (self._wakes_at is None or at < self._wakes_at):
            self._wakes_at = at
            self._world.heap.at(at, self._wake, at, self.peer.life)

    def _wake(self, at: float, life: int) -> None:
        if at != self._wakes_at or life != self.peer.life:
            return
        self._wakes_at = None
        seen = self._world.board.seen(self.peer.side)
        if seen is not None and seen.number != self._seen:
            self._see(seen)
        self._tell(_TICK)

    def _later(self, delay_s: float, act: Callable[..., None], *arguments: object) -> None:
        """Unless the machine is switched off meanwhile."""
        self._world.heap.after(delay_s, self._still, self.peer.life, act, arguments)

    def _still(self, life: int, act: Callable[..., None], arguments: tuple[object, ...]) -> None:
        if life == self.peer.life and self.peer.is_up:
            act(*arguments)

    def _do(self, command: placement.Command) -> None:
        match command:
            case placement.PollHub(hub):
                self._poll(hub)
            case placement.RenewLeases(hub, leases):
                self._renew(hub, leases)
            case placement.Fetch(assignment):
                self._fetch(assignment)
            case placement.LoadSlice(assignment):
                self._later(self._chance.uniform(*LOAD_S), self._tell, placement.StepDone(assignment.lease))
            case placement.Attach(assignment):
                self._attach(assignment)
            case placement.Drain(assignment):
                self._drain(assignment)
            case placement.Release(hub, assignments):
                node = self._world.hubs[hub]
                leases = tuple(assignment.lease for assignment in assignments)
                self._world.network.send(self.peer, node.peer, node.release, self.peer.id, leases)

    # The market -----------------------------------------------------------------------------------------------

    def _poll(self, hub: PeerId) -> None:
        node, room = self._world.hubs[hub], self._room()
        busy = placement.offered(self._mind.stages().values())
        ask = partial(node.poll, self.peer, room, tuple(self._disk), busy, tuple(self._round_trips.items()))
        failed = partial(self._tell, placement.PollFailed(hub))
        self._world.network.call(self.peer, node.peer, ask, partial(self._poll_answered, hub), failed)

    def _poll_answered(self, hub: PeerId, answer: LeaseOffer | float) -> None:
        if not isinstance(answer, LeaseOffer):
            self._tell(placement.NothingOffered(answer))
            return
        assignment = Assignment(
            answer.lease, answer.model, answer.dtype, answer.slice, answer.coordinator, answer.addresses, hub
        )
        self._tell(placement.OfferReceived(assignment, answer.ttl_s))

    def _renew(self, hub: PeerId, leases: Sequence[tuple[Assignment, bool]]) -> None:
        node = self._world.hubs[hub]
        reports = [
            LeaseReport(each.lease, (each.coordinator, each.model, each.slice), self._progress(each.lease))
            for each, _ in leases
        ]
        names = [each.lease for each, _ in leases]
        ask = partial(node.renew, self.peer.id, reports)
        answered = partial(self._renewed, names)
        failed = partial(self._not_renewed, names, hub)
        self._world.network.call(self.peer, node.peer, ask, answered, failed)

    def _progress(self, lease: str) -> int:
        if not self.manner.claims_progress:
            return 0
        return 1 + int(self._world.now - self._begun_at.get(lease, self._world.now))

    def _renewed(self, leases: Sequence[str], verdicts: Sequence[tuple[float, str]]) -> None:
        for lease, (ttl_s, _) in zip(leases, verdicts, strict=True):
            for command in self._mind.handle(placement.Renewed(lease, ttl_s), self._world.now):
                self._do(command)
        self._arm()

    def _not_renewed(self, leases: Sequence[str], hub: PeerId) -> None:
        for lease in leases:
            self._mind.handle(placement.RenewFailed(lease, hub), self._world.now)
        self._arm()

    # One lease ------------------------------------------------------------------------------------------------

    def _fetch(self, assignment: Assignment) -> None:
        world, lease = self._world, assignment.lease
        self._begun_at[lease] = world.now
        self._taken_bytes += world.models[assignment.model].slice_bytes
        world.tally.gained(self, assignment)
        if not self.manner.fetches:
            return
        took_s = 0.1 if (assignment.model, assignment.slice) in self._disk else self._fetch_s(assignment)
        world.tally.fetched(took_s)
        self._later(took_s, self._fetched, assignment)

    def _fetch_s(self, assignment: Assignment) -> float:
        """From whoever is done with it first: the coordinator or a worker that holds it; each serves in turn."""
        world = self._world
        size = world.models[assignment.model].slice_bytes
        coordinator = world.coordinators[assignment.coordinator]
        providers = [coordinator, *world.tally.holders(assignment)]
        sent = [(max(each.upload_free_at, world.now) + size / each.peer.link.up_bytes_s) for each in providers]
        sent_at = min(sent)
        best = providers[sent.index(sent_at)]
        best.upload_free_at = sent_at
        arrives_at = max(sent_at, world.now + size / self.peer.link.down_bytes_s)
        return arrives_at - world.now + 2 * world.network.round_trip_s(self.peer, best.peer)

    def _fetched(self, assignment: Assignment) -> None:
        pair = (assignment.model, assignment.slice)
        self._disk.pop(pair, None)
        self._disk[pair] = None
        if len(self._disk) > DISK_SLICES:
            del self._disk[next(iter(self._disk))]
        self._tell(placement.StepDone(assignment.lease))

    def _attach(self, assignment: Assignment) -> None:
        coordinator = self._world.coordinators[assignment.coordinator]
        self._round_trips[assignment.coordinator] = self._world.network.round_trip_s(self.peer, coordinator.peer)
        self._world.network.call(
            self.peer,
            coordinator.peer,
            partial(coordinator.attach, self, assignment.slice),
            partial(self._attached, assignment),
            partial(self._tell, placement.StepFailed(assignment.lease, retry=True)),
        )

    def _attached(self, assignment: Assignment, _: None) -> None:
        self._tell(placement.StepDone(assignment.lease))

    def standing_told(self, coordinator: PeerId, part: SliceId, proven: bool) -> None:
        for lease, (assignment, _) in self._mind.stages().items():
            if (assignment.coordinator, assignment.slice) == (coordinator, part):
                if proven:
                    self._world.tally.proven(self, assignment)
                self._tell(placement.StandingTold(lease, proven))
                return

    def _drain(self, assignment: Assignment) -> None:
        coordinator = self._world.coordinators[assignment.coordinator]
        self._world.network.send(self.peer, coordinator.peer, coordinator.detach, self, assignment.slice)
        self._later(UNLOAD_GRACE_S, self._drained, assignment)

    def _drained(self, assignment: Assignment) -> None:
        self._drop(assignment)
        self._tell(placement.Drained(assignment.lease))

    def _drop(self, assignment: Assignment) -> None:
        if self._begun_at.pop(assignment.lease, None) is not None:
            self._taken_bytes -= self._world.models[assignment.model].slice_bytes
            self._world.tally.dropped(self, assignment)
