"""A simulated coordinator: requests, saturation, demand and the ledger, by the machines of decide/.

It does what roles/coordinator.py and roles/crew.py do, with computing that only takes time. It does not know hubs'
minds, nor which of its workers will lie: that shows in their trials.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING

from kvasir_node.base.ids import PeerId, SliceId
from kvasir_node.decide.admission import Admission, AdmissionLimits, Admitted, Load, Refused
from kvasir_node.decide.demand import Demands, Wanted
from kvasir_node.decide.ledger import Ledger, LedgerLimits, Standing
from kvasir_node.decide.market import Demand
from kvasir_node.sim.network import CALL_TIMEOUT_S, Peer
from kvasir_node.sim.workload import SharedEngine, SimModel, gain
from kvasir_node.sim.world import World

if TYPE_CHECKING:
    from kvasir_node.sim.workers import WorkerNode

TICK_S = 0.5  # while requests wait, demand stands or workers are to be tried
LOAD_S = 20.0  # over which the load is averaged
LEDGER_TICK_S = 10.0
SERVED_S = 60.0  # each worker in use has answered a call within this
TRIAL_S = (0.2, 1.0)  # how long one trial takes
TRIALS_PER_TICK = 256
SATURATED_AFTER_S, CALM_AFTER_S, CALM_BUSY_RATIO = 0.5, 5.0, 0.75  # CoordinatorSettings

Pair = tuple[PeerId, SliceId]


class CoordinatorNode:
    """`rate` = requests per second at a moment, at most `rate_max`."""

    def __init__(
        self, world: World, peer: Peer, model: SimModel, rate: Callable[[float], float], rate_max: float
    ) -> None:
        self.peer = peer
        self.model = model
        self._world = world
        self._rate, self._rate_max = rate, rate_max
        self._chance = random.Random(world.chance.getrandbits(64))
        self.slices = model.slices()
        self.near_rtt_s = model.near_rtt_s(world.fanout.max_slowdown)
        self._missing = frozenset() if model.is_held else frozenset(self.slices)
        self.demands = Demands(self.slices, world.market.surge_copies_max, world.market.surge_decay_s)
        limits = AdmissionLimits(model.slots, model.queue, SATURATED_AFTER_S, CALM_AFTER_S, CALM_BUSY_RATIO)
        self.admission = Admission(limits)
        self.engine = SharedEngine(model.alone_tokens_s, model.slots, gain(0.0, is_held=model.is_held))
        fanout = world.fanout
        self.ledger = Ledger(
            LedgerLimits(
                cool_off_s=fanout.cool_off_s,
                cool_off_max_s=fanout.cool_off_max_s,
                ban_after=fanout.ban_after,
                proof_ttl_s=fanout.proof_ttl_s,
                trials_per_address_max=fanout.trials_per_address_max,
                trial_window_s=fanout.trial_window_s,
            )
        )
        self.trials: dict[PeerId, int] = {}
        self.upload_free_at = 0.0  # our uplink serves one fetch after another
        self.answered = self.refused = 0
        self.wants: tuple[Wanted, ...] = ()
        self.proven: tuple[Pair, ...] = ()
        self._refused: tuple[PeerId, ...] = ()
        self._attached: dict[Pair, WorkerNode] = {}
        self._untried: dict[Pair, None] = {}
        self._on_trial: set[SliceId] = set()
        self._waiting: dict[int, float] = {}  # request -> tokens
        self._requests = 0
        self._ends = 0  # number of the latest plan for the next end of a request
        self._load = 0.0
        self._load_at = 0.0
        self._ticking = False
        self._changed = True
        self._proofs_changed = False
        self._told_at = float("-inf")
        self._sequence = 0
        for act in (self._arrive, self._report_again, self._keep_ledger, self._move_heat):
            world.heap.after(self._chance.random(), act)

    # Requests -------------------------------------------------------------------------------------------------

    def _arrive(self) -> None:
        """Thinning: candidates come at the greatest rate, and as many are requests as the rate of the moment says."""
        now = self._world.now
        self._world.heap.after(self._chance.expovariate(self._rate_max), self._arrive)
        if self._chance.random() * self._rate_max > self._rate(now):
            return
        self._requests += 1
        tokens = self.model.request_tokens * self._chance.gammavariate(2.0, 0.5)
        answer = self.admission.arrive(self._requests, now)
        if isinstance(answer, Refused):
            self.refused += 1
            return
        self._wake()
        if isinstance(answer, Admitted):
            self._start([(self._requests, tokens)])
        else:
            self._waiting[self._requests] = tokens

    def _start(self, requests: list[tuple[int, float]]) -> None:
        self.engine.advance(self._world.now)
        for request, tokens in requests:
            self.engine.start(request, tokens)
        self._plan_end()

    def _plan_end(self) -> None:
        self._ends += 1
        end_at = self.engine.next_end_at()
        if end_at is not None:
            self._world.heap.at(end_at, self._end, self._ends)

    def _end(self, number: int) -> None:
        if number != self._ends:
            return
        self.engine.advance(self._world.now)
        admitted = self.admission.leave(self.engine.finish(), self._world.now)
        self.answered += 1
        self._start([(request, self._waiting.pop(request)) for request in admitted])

    # Demand ---------------------------------------------------------------------------------------------------

    @property
    def is_spread(self) -> bool:
        """Whether workers are used: also while nobody waits only thanks to them."""
        return self.admission.load is Load.SATURATED or self.demands.surge > 0

    def _wake(self) -> None:
        if not self._ticking:
            self._ticking = True
            self._load_at = self._world.now
            self._world.heap.after(TICK_S, self._tick)

    def _tick(self) -> None:
        now, admission = self._world.now, self.admission
        admission.tick(now)
        self._load += (self.engine.load - self._load) * min(1.0, (now - self._load_at) / LOAD_S)
        self._load_at = now
        surge = self.demands.surge
        if self._proofs_changed:
            self.proven, self._proofs_changed, self._changed = self.ledger.proven(), False, True
            self._count_gain()
        saturated = admission.load is Load.SATURATED
        self.demands.observe(now, saturated=saturated, pressure=admission.pressure, load=self._load)
        if self.demands.surge != surge:
            self._changed = True
            self._count_gain()
        if self._untried and (self.is_spread or self._missing):
            self._try_some()
        if self._changed and now - self._told_at >= self._world.market.report_interval_s:
            self._report()
        waits = admission.queued or self._untried or self._changed or self._proofs_changed
        self._ticking = bool(waits) or self.is_spread
        if self._ticking:
            self._world.heap.after(TICK_S, self._tick)

    def _report_again(self) -> None:
        """Demand must be repeated before it expires."""
        every_s = self._world.market.demand_ttl_s / 3
        if self._world.now - self._told_at >= every_s - 1e-9:
            self._report()
        self._world.heap.after(every_s, self._report_again)

    def _report(self) -> None:
        world, now = self._world, self._world.now
        if self._changed:
            self._refused = self.ledger.refused()
            wants = self.demands.wants(self._missing, self.proven)
            if wants != self.wants:
                self.wants = wants
                world.tally.wanted(self)
            self._changed = False
        self._told_at = now
        self._sequence += 1
        demand = self.demand()
        for hub in world.hubs.values():
            world.network.send(self.peer, hub.peer, hub.report, self.peer.id, demand)

    def demand(self) -> Demand:
        return Demand(
            issuer=self.peer.id,
            epoch=self.peer.life,
            sequence=self._sequence,
            issued_at=self._world.network.wall(self.peer),
            ttl_s=self._world.market.demand_ttl_s,
            model=self.model.id,
            dtype="bfloat16",
            slice_bytes=self.model.slice_bytes,
            addresses=(self.peer.address,),
            wants=self.wants,
            near_rtt_s=self.near_rtt_s,
            refused=self._refused,
        )

    def hub_came(self, hub: PeerId) -> None:
        """A hub that is new, or knows nothing any more, hears our demand at once."""
        node = self._world.hubs[hub]
        self._sequence += 1
        self._world.network.send(self.peer, node.peer, node.report, self.peer.id, self.demand())

    def _move_heat(self) -> None:
        """Traffic shifts slowly: the heat of slices is a walk around a fixed shape, in which a few are hot."""
        if self.is_spread:
            heat: dict[int, list[float]] = {}
            for place, part in enumerate(self.slices):
                row = heat.setdefault(part.layer, [])
                row += [(0.5 + 1.0 / (1 + place % 7)) * self._chance.uniform(0.8, 1.2)] * part.count
            self.demands.note_heat(heat)
            self._changed = True
        self._world.heap.after(30.0, self._move_heat)

    # Workers --------------------------------------------------------------------------------------------------

    def attach(self, worker: WorkerNode, part: SliceId) -> None:
        pair = (worker.peer.id, part)
        self.ledger.attach(*pair)
        self._attached[pair] = worker
        if self.ledger.standing(*pair) is Standing.PROVEN:
            self._proven_changed()
            self._tell(worker, part, proven=True)
        else:
            self._untried[pair] = None
        self._wake()

    def detach(self, worker: WorkerNode, part: SliceId) -> None:
        self._forget((worker.peer.id, part))

    def lose(self, worker: WorkerNode, life: int) -> None:
        """The worker's connection has ended without a word; it is noticed after a while."""
        self._world.heap.after(CALL_TIMEOUT_S, self._lost, worker, life)

    def _lost(self, worker: WorkerNode, life: int) -> None:
        reachable = self._world.network.reach(self.peer, worker.peer)
        for pair in [pair for pair, node in self._attached.items() if node is worker]:
            if worker.peer.life != life or not reachable:
                self._forget(pair)

    def _forget(self, pair: Pair) -> None:
        self.ledger.detach(*pair)
        self._attached.pop(pair, None)
        self._untried.pop(pair, None)
        self._proven_changed()

    def _try_some(self) -> None:
        now = self._world.now
        for pair in list(self._untried)[:TRIALS_PER_TICK]:
            worker = self._attached[pair]
            del self._untried[pair]
            if pair[1] in self._on_trial or not self.ledger.may_try(*pair, worker.peer.address, now):
                if self.ledger.standing(*pair) is not Standing.BANNED:
                    self._untried[pair] = None  # at the end
                continue
            self.ledger.begin_trial(*pair, worker.peer.address, now)
            self.trials[pair[0]] = self.trials.get(pair[0], 0) + 1
            self._on_trial.add(pair[1])
            took_s = self._chance.uniform(*TRIAL_S) + self._world.network.round_trip_s(self.peer, worker.peer)
            self._world.heap.after(took_s, self._trial_ends, pair, worker, worker.peer.life)

    def _trial_ends(self, pair: Pair, worker: WorkerNode, life: int) -> None:
        now = self._world.now
        self._on_trial.discard(pair[1])
        if self._attached.get(pair) is not worker or worker.peer.life != life:
            return
        if worker.manner.answers_right:
            self.ledger.right(*pair, now)
            self._proven_changed()
            self._tell(worker, pair[1], proven=True)
        else:
            self.ledger.failed(*pair, now, "its answer differs", wrong=worker.manner.answers)
            self._changed = True
            if self.ledger.standing(*pair) is not Standing.BANNED:
                self._untried[pair] = None

    def _tell(self, worker: WorkerNode, part: SliceId, *, proven: bool) -> None:
        self._world.network.send(self.peer, worker.peer, worker.standing_told, self.peer.id, part, proven)

    def _proven_changed(self) -> None:
        self._proofs_changed = True
        self._wake()

    def _count_gain(self) -> None:
        """Copies beyond those wanted do not help: the mean is over what each slice can use."""
        copies: dict[SliceId, int] = {}
        for _, part in self.proven:
            copies[part] = copies.get(part, 0) + 1
        most = self.demands.surge + (1 if self._missing else 0)
        useful = sum(min(most, count) for count in copies.values()) / len(self.slices) if self.is_spread else 0.0
        if self._missing and not self.is_spread:
            useful = sum(min(1, count) for count in copies.values()) / len(self.slices)
        self.engine.advance(self._world.now)
        self.engine.gain = gain(useful, is_held=self.model.is_held)
        self._plan_end()

    def _keep_ledger(self) -> None:
        """Proofs in use are kept alive by served calls; the others decay."""
        now = self._world.now
        if (self.is_spread or self._missing) and now % SERVED_S < LEDGER_TICK_S:
            for pair in self.proven:
                self.ledger.right(*pair, now, served=True)
        before = self.ledger.proven()
        if self.ledger.tick(now):
            self._proven_changed()
            still = set(self.ledger.proven())
            for pair in before:
                if pair not in still:
                    self._tell(self._attached[pair], pair[1], proven=False)
        self._world.heap.after(LEDGER_TICK_S, self._keep_ledger)
