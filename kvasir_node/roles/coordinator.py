"""The coordinator: one model served, alone while calm, wider while saturated.

It puts together the request desk (roles/desk.py), the dispatch on the computing thread (roles/dispatch.py) and the
crew of workers (roles/crew.py), and tells the market what it wants. It does not know HTTP, hubs' streams or how blocks
are served; every decision is made in decide/.
"""

from __future__ import annotations

import logging
import math
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path
from typing import Any

import trio

from kvasir_node.base.errors import CapacityError, UsageError
from kvasir_node.base.events import DemandChanged, FanoutChanged, LoadChanged, Tell, tell_nobody
from kvasir_node.base.generation import GenerationRequest
from kvasir_node.base.ids import PeerId, SliceId
from kvasir_node.base.settings import Settings
from kvasir_node.base.snapshot import ExpertLayerSnapshot, FanoutSnapshot, ModelSnapshot
from kvasir_node.decide.admission import AdmissionLimits
from kvasir_node.decide.dealing import Dealings
from kvasir_node.decide.demand import Demands, Wanted, missing_slices
from kvasir_node.decide.guests import carriers
from kvasir_node.decide.spot_checks import SpotChecks
from kvasir_node.model.engine import Engine
from kvasir_node.model.manifest import Manifest, slices_of
from kvasir_node.model.trunk import Trunk, load_trunk
from kvasir_node.roles.attendance import Invite
from kvasir_node.roles.costing import Costing
from kvasir_node.roles.crew import Crew, Ping, answers_at_once
from kvasir_node.roles.desk import Answer, Desk
from kvasir_node.roles.dispatch import FanoutDispatch
from kvasir_node.roles.expert_view import expert_layers
from kvasir_node.roles.ledger_file import LedgerFile
from kvasir_node.roles.loading import LoadedModel, check_slots, expert_dtype, free_bytes, is_out_of_memory
from kvasir_node.roles.measured import StepMeasured
from kvasir_node.roles.missing_experts import MissingExperts
from kvasir_node.roles.own_experts import OwnExperts
from kvasir_node.roles.residency import Residency
from kvasir_node.roles.slowdown import Pace, StretchedDispatch, StretchedExperts
from kvasir_node.roles.steering import Load, Shape, Steering
from kvasir_node.roles.trials import TrialScope
from kvasir_node.roles.wire_gate import WireChoice, measure_wire
from kvasir_node.roles.worker_news import WorkerNews
from kvasir_node.wire.messages import NEAR_RTT_S, DemandRecord
from kvasir_node.wire.tensors import Encoding

logger = logging.getLogger(__name__)

CONTEXT_MAX_DEFAULT = 4096
TICK_S = 0.25  # how often trials and proofs are looked at
DISK_BYTES_S = 1e9  # about what an expert is read with that nobody has in memory
NEAR_RTT_MAX_S = 0.1  # nobody is told to be near from further away, however slow this machine is
DEMAND_PAUSE_S = 0.05  # between two looks at whether demand changed
SendDemand = Callable[[DemandRecord], Awaitable[None]]


class Coordinator:
    """See the module. `run` it inside the node's nursery. `missing` brings experts that are not on this machine;
    `invite`, `rtt_of` and `ping` are of the transport: express channels to workers, how far away they are, and whether;
    `pace` makes it an emulated device; at `ledger_path` is kept which workers failed (None = it is forgotten)."""

    def __init__(
        self,
        settings: Settings,
        model: LoadedModel,
        missing: MissingExperts | None = None,
        *,
        name_of: Callable[[PeerId], str],
        address_of: Callable[[PeerId], str],
        is_guest: Callable[[PeerId], bool] = lambda _: False,
        invite: Invite = lambda peer, arrived: None,
        rtt_of: Callable[[PeerId], float | None] = lambda peer: None,
        ping: Ping = answers_at_once,
        pace: Pace | None = None,
        ledger_path: Path | None = None,
        tell: Tell = tell_nobody,
    ) -> None:
        self._settings = settings
        self._tell = tell
        self._worker_news = WorkerNews(tell)
        self._has_worker_news = False  # something may have changed among them
        self._model = model
        self._pace = pace
        self._is_guest = is_guest
        manifest = model.manifest
        self.slices = slices_of(manifest, settings.market.slice_bytes)
        private = settings.fanout.private_layers
        self._offered = tuple(part for part in self.slices if part.layer >= private)  # nobody may attach with others
        fits = sum(map(len, model.held.values())) == len(model.wanted)
        new_own = OwnExperts if pace is None else partial(StretchedExperts, pace)
        own = new_own(model.shard, model.checkpoint, model.held, model.borrowed_bytes_max, missing, moves=not fits)
        self._own, self._missing = own, missing
        self._shape = Shape(
            layers=manifest.layers,
            experts=manifest.experts_per_layer,
            chosen=manifest.chosen_per_row,
            row_bytes=manifest.hidden_size * model.shard.dtype.itemsize,
            decode_rows_max=settings.coordinator.slots,
            prompt_rows=settings.coordinator.prefill_chunk,
        )
        self._costing = Costing(
            decode_rows_max=self._shape.decode_rows_max,
            chosen=self._shape.chosen,
            borrow_s=model.shard.expert_bytes / DISK_BYTES_S,
        )
        self.crew = Crew(
            settings.fanout,
            manifest.model,
            expert_dtype(model.shard),
            frozenset(self._offered),
            model.held,
            own_sums=own.sums if missing is None else missing.patient(own.sums),
            changed=self._world_changed,
            trial_layers_changed=self._trials_planned,
            name_of=name_of,
            address_of=address_of,
            body_bytes_max=settings.network.frame_bytes_max,
            invite=invite,
            rtt_of=rtt_of,
            ping=ping,
            observer=self._costing,
        )
        self._ledger_file = None if ledger_path is None else LedgerFile(ledger_path, manifest.model)
        # A liar that could foretell the chance would be honest only when it is checked.
        verifies_all = settings.fanout.verify == "double"
        ratio = 1.0 if verifies_all else settings.fanout.spot_check_ratio
        self._spot_checks = SpotChecks(ratio, secrets.SystemRandom())
        self.dispatch = FanoutDispatch(
            own,
            manifest.layers,
            manifest.experts_per_layer,
            dtype=model.shard.dtype,
            crew=self.crew,
            spot_checks=self._spot_checks,
            verifies_all=verifies_all,
            patience_s=settings.fanout.deadline_ceiling_s,
            body_bytes_max=settings.network.frame_bytes_max,
            observer=self._costing,
        )
        self._residency = Residency(
            own,
            model.wanted,
            model.held,
            model.shard.expert_bytes,
            heat=self.dispatch.heat,
            changed=self._held_changed,
        )
        self._moves = not fits
        self._trunk = self._load_trunk()
        self._wire = WireChoice(Encoding.of(model.shard.dtype), settings.fanout.wire)
        limits = settings.coordinator
        self._engine = self._new_engine()
        self.desk = Desk(
            self._engine,
            model.text,
            AdmissionLimits(
                slots=limits.slots,
                queue=limits.queue,
                saturated_after_s=limits.saturated_after_s,
                calm_after_s=limits.calm_after_s,
                calm_busy_ratio=limits.calm_busy_ratio,
            ),
            load_changed=self._load_changed,
            stepped=self._stepped,
            missing=missing,
            tell=tell,
        )
        self.steering = Steering(
            settings.fanout,
            self._shape,
            model.held,
            self._costing,
            self._engine,
            proven=self._proven,
            heat=self.dispatch.heat,
            load=self._load,
            round_trips=self.crew.round_trips,
            has_channel=lambda peer: self.crew.channel(peer) is not None,
            set_routes=self._set_routes,
            changed=lambda on, reason, gain: tell(FanoutChanged(on, reason, round(gain, 3))),
        )
        self._mismatches = 0  # seen so far
        self._was_spread = False
        self._was_saturated = False
        self._on_disk: dict[int, set[int]] = {layer: set() for layer in manifest.layers}
        for expert in model.checkpoint.experts:
            self._on_disk[expert.layer].add(expert.index)
        self._demands = Demands(self._offered, settings.market.surge_copies_max, settings.market.surge_decay_s)
        self._work = 0.0  # that is asked for, as a share of what this machine could do alone, smoothed
        self._work_at = -math.inf
        self._demand_changed = trio.Event()
        self._told: tuple[Wanted, ...] | None = None  # what the hubs heard last
        self._sequence = 0
        self._epoch = time.time_ns() // 1_000_000

    def _load_trunk(self) -> Trunk:
        shard = self._model.shard
        path, threads = self._model.checkpoint.path, self._model.threads
        dispatch = self.dispatch if self._pace is None else StretchedDispatch(self.dispatch, self._pace)
        return load_trunk(path, shard.dtype, shard.device, dispatch, threads)

    def _new_engine(self) -> Engine:
        """Raises CapacityError when the memory of all slots cannot be had: it is taken at once, and not later."""
        limits, context = self._settings.coordinator, self._context()
        try:
            slot_bytes = self._trunk.new_cache(1, context).nbytes
            check_slots(limits.slots, context, slot_bytes, free_bytes(self._trunk.device))
            return Engine(
                self._trunk,
                limits.slots,
                context,
                limits.prefill_chunk,
                reuses_prefixes=limits.prefix_cache,
            )
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            raise CapacityError(
                f"there is no memory for coordinator.slots {limits.slots} of {context} tokens each "
                f"({str(error).splitlines()[0] if str(error) else 'out of memory'}); lower --slots or "
                "coordinator.context"
            ) from error

    def _context(self) -> int:
        wanted = self._settings.coordinator.context
        if wanted > self._trunk.context_max:
            raise UsageError(f"coordinator.context {wanted} is more than the model's {self._trunk.context_max} tokens")
        return wanted or min(self._trunk.context_max, CONTEXT_MAX_DEFAULT)

    @property
    def manifest(self) -> Manifest:
        return self._model.manifest

    def generate(self, request: GenerationRequest) -> AbstractAsyncContextManager[Answer]:
        return self.desk.generate(request)

    async def run(
        self,
        send_demand: SendDemand,
        addresses: Callable[[], Sequence[str]],
        *,
        task_status: Any = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Serves until cancelled. `send_demand` takes a record to every hub and never raises KvasirError."""
        await self._choose_wire()
        if self._ledger_file is not None:
            await trio.to_thread.run_sync(self._ledger_file.restore, self.crew.ledger, trio.current_time())
            for peer in self.crew.ledger.strikes():
                self._spot_checks.watch(peer)
        async with trio.open_nursery() as nursery:
            await nursery.start(self.crew.run)  # pyright: ignore[reportArgumentType]
            nursery.start_soon(self.desk.run)
            nursery.start_soon(self.desk.watch_load)
            nursery.start_soon(self._tick)
            nursery.start_soon(self.steering.run)
            if self._missing is not None:
                await nursery.start(self._missing.run)  # pyright: ignore[reportArgumentType]
            if self._moves:
                nursery.start_soon(self._residency.run)
            nursery.start_soon(self._report_demand, send_demand, addresses)
            if self._ledger_file is not None:
                nursery.start_soon(self._ledger_file.keep, self.crew.ledger)
            task_status.started()

    # Fan-out --------------------------------------------------------------------------------------------------

    async def _choose_wire(self) -> None:
        """Before anybody computes: a trunk has one forward at a time. A node that is stopped does not wait for it."""
        compute = partial(OwnExperts.compute, self._own)  # an emulated device gains nothing by being slow here
        self._wire = await trio.to_thread.run_sync(
            partial(measure_wire, self._trunk, compute, self._settings.fanout.wire),
            abandon_on_cancel=True,  # pyright: ignore[reportCallIssue]
        )
        self.dispatch.set_encoding(self._wire.encoding)
        self.crew.trials.set_encoding(self._wire.encoding)
        self.steering.set_row_bytes(self._wire.encoding.values_bytes(1, self.manifest.hidden_size))

    @property
    def _spread(self) -> bool:
        fanout = self._settings.fanout
        return fanout.enabled and (fanout.when != "saturated" or self.desk.saturated)

    @property
    def _lacks_experts(self) -> bool:
        return any(len(held) < self.manifest.experts_per_layer for held in self._model.held.values())

    @property
    def _trial_scope(self) -> TrialScope:
        """While calm, only rows that must leave anyway may leave for a trial."""
        if self._spread:
            return TrialScope.ALL
        return TrialScope.MISSING if self._settings.fanout.enabled and self._lacks_experts else TrialScope.NONE

    def _load_changed(self) -> None:
        saturated = self.desk.saturated
        if saturated != self._was_saturated:
            self._was_saturated = saturated
            slots = self.desk.slots()
            self._tell(LoadChanged(slots.state, slots.busy, slots.queued))
        self._observe_load()
        if self._spread != self._was_spread:
            self._was_spread = self._spread
            self.crew.trials.set_scope(self._trial_scope)
        self.steering.load_changed()
        if saturated or self._told:
            self._demand_changed.set()

    def _held_changed(self, layers: frozenset[int]) -> None:
        self.crew.trials.held_changed()
        self._world_changed(layers)

    def _world_changed(self, layers: frozenset[int]) -> None:
        """Who is proven for some layers, or what is held of them, may have changed."""
        self._has_worker_news = True
        self.steering.world_changed()
        self._tell_waiting()
        self._demand_changed.set()

    def _trials_planned(self, layers: frozenset[int]) -> None:
        self._has_worker_news = True
        self.dispatch.set_trial_layers(layers)

    def _proven(self) -> Sequence[tuple[PeerId, SliceId]]:
        """Who may carry load."""
        if not self._settings.fanout.enabled:
            return ()
        proven = self.crew.proven()
        guests = self._guests(proven)
        return carriers(proven, self._missing_slices(), guests) if guests else proven

    def _missing_slices(self) -> frozenset[SliceId]:
        return missing_slices(self._offered, self._model.held)

    def _guests(self, proven: Sequence[tuple[PeerId, SliceId]]) -> frozenset[PeerId]:
        return frozenset(peer for peer in {peer for peer, _ in proven} if self._is_guest(peer))

    def _load(self) -> Load:
        admission, enabled = self.desk.admission, self._settings.fanout.enabled
        return Load(
            wanted=self._spread,
            queued=admission.queued,
            rows=admission.busy,
            is_active=admission.busy > 0,
            calm="calm" if enabled else "switched off by fanout.enabled",
        )

    def _set_routes(self, decode: Dealings, prompt: Dealings, looks: Dealings) -> None:
        self.dispatch.set_routes(decode, prompt, self._shape.decode_rows_max, looks)
        self._tell_waiting()

    def _tell_waiting(self) -> None:
        if self.desk.waiting:
            for layer, row in self.steering.routes.items():
                elsewhere = {index for index, peer in enumerate(row) if peer is not None}
                self.desk.waiting.covered(layer, elsewhere | self._model.held.get(layer, frozenset()))

    def _stepped(self, step: StepMeasured) -> None:
        self.crew.stepped(step.requests)
        self.steering.stepped(step)

    async def _tick(self) -> None:
        """Proofs decay and cool-offs end: they are looked at for ever."""
        self.crew.trials.set_scope(self._trial_scope)
        while True:
            await trio.sleep(TICK_S)
            if self.dispatch.counters.mismatches > self._mismatches:
                self._mismatches = self.dispatch.counters.mismatches
                self._engine.forget()  # what a liar computed must not live on in the prompts of others
            if self.crew.ledger.tick(trio.current_time()):
                self._world_changed(frozenset(self.manifest.layers))
            if self._trial_scope is not TrialScope.NONE:
                self.crew.trials.plan()
            self._observe_load()
            if self._has_worker_news:
                self._has_worker_news = False
                self._worker_news.look(self.crew.snapshot())

    # Demand ---------------------------------------------------------------------------------------------------

    def demand(self) -> tuple[Wanted, ...]:
        proven = self.crew.ledger.proven()
        return self._demands.wants(self._missing_slices(), proven, self._guests(proven))

    def _kept(self) -> tuple[SliceId, ...]:
        """Ascending."""
        proven = self.crew.ledger.proven()
        return tuple(sorted(self._demands.kept(self._missing_slices(), proven, self._guests(proven))))

    def _observe_load(self) -> None:
        """How much of the surge is still justified. Without workers, who make us faster, more slots would be busy."""
        now, admission, demands = trio.current_time(), self.desk.admission, self._demands
        share = admission.busy / self._settings.coordinator.slots * (self.steering.measured_gain or 1.0)
        self._work += (share - self._work) * min(1.0, (now - self._work_at) / self._settings.market.surge_decay_s)
        self._work_at = now
        surge = demands.surge
        saturated = self._settings.fanout.enabled and self.desk.saturated
        demands.observe(now, saturated=saturated, pressure=admission.pressure, load=self._work)
        if demands.surge != surge:
            demands.note_heat(self.dispatch.heat())
            self._demand_changed.set()

    async def _report_demand(self, send: SendDemand, addresses: Callable[[], Sequence[str]]) -> None:
        """Tells the hubs: at once when demand changed (at most once per interval), and again before it expires."""
        market = self._settings.market
        while True:
            with trio.move_on_after(market.demand_ttl_s / 3):
                while self.demand() == self._told:
                    self._demand_changed = trio.Event()
                    await self._demand_changed.wait()
                    await trio.sleep(DEMAND_PAUSE_S)
            wanted = self.demand()
            if wanted != self._told:
                copies = sum(each.want for each in wanted)
                proven = sum(min(each.want, len(each.proven)) for each in wanted)
                self._tell(DemandChanged(self.manifest.name, len(wanted), copies, proven))
            self._told = wanted
            await send(self._record(self._told, tuple(addresses())))
            await trio.sleep(market.report_interval_s)

    def _record(self, wanted: tuple[Wanted, ...], addresses: tuple[str, ...]) -> DemandRecord:
        self._sequence += 1
        admission, near_rtt_s = self.desk.admission, self.steering.near_rtt_s
        return DemandRecord(
            epoch=self._epoch,
            sequence=self._sequence,
            issued_at=time.time(),
            ttl_s=self._settings.market.demand_ttl_s,
            model=self.manifest.model,
            model_name=self.manifest.name,
            dtype=expert_dtype(self._model.shard),
            slice_bytes=max(part.count for part in self.slices) * self._model.shard.expert_bytes,
            addresses=addresses,
            slots=self._settings.coordinator.slots,
            busy=admission.busy,
            queued=admission.queued,
            wants=wanted,
            refused=self.crew.ledger.refused(),
            kept=self._kept(),
            near_rtt_s=NEAR_RTT_S if near_rtt_s is None else min(near_rtt_s, NEAR_RTT_MAX_S),
        )

    def hubs_changed(self) -> None:
        """A hub came or went: a new one must hear our demand now, not at the next refresh."""
        self._told = None
        self._demand_changed.set()

    # Snapshots ------------------------------------------------------------------------------------------------

    def model_snapshot(self) -> ModelSnapshot:
        manifest = self.manifest
        held = sum(
            all(index in self._model.held[part.layer] for index in range(part.first, part.last + 1))
            for part in self.slices
        )
        return ModelSnapshot(
            id=manifest.model,
            name=manifest.name,
            family=manifest.family,
            layers=self._trunk.layer_count,
            experts_per_layer=manifest.experts_per_layer,
            slices=len(self.slices),
            slices_held=held,
            experts_held=sum(map(len, self._model.held.values())),
            experts_borrowed=self._own.borrowed,
            experts_mapped=self._own.mapped,
            experts_read=self._own.loads,
            expert_swaps=self._residency.swaps,
            expert_dtype=expert_dtype(self._model.shard),
            expert_error=self._model.expert_error,
        )

    def experts(self) -> tuple[ExpertLayerSnapshot, ...]:
        heat, held, routes = self.dispatch.heat(), self._model.held, self.steering.routes
        return expert_layers(heat, held, self._on_disk, routes, self.crew.ledger.proven())

    def fanout_snapshot(self) -> FanoutSnapshot:
        counters, steering, plan = self.dispatch.counters, self.steering, self.steering.plan
        return FanoutSnapshot(
            on=steering.on,
            reason=steering.reason,
            predicted_gain=round(steering.predicted_gain, 3),
            lanes=self._engine.lanes,
            local_pairs=counters.local,
            remote_pairs=counters.remote,
            trial_pairs=self.crew.trials.pairs,
            fallbacks=counters.fallbacks,
            hedges=counters.hedges,
            spot_checks=counters.spot_checks,
            mismatches=counters.mismatches,
            wire=self._wire.snapshot(),
            measured_gain=None if steering.measured_gain is None else round(steering.measured_gain, 3),
            shares={} if plan is None else {peer: round(share, 4) for peer, share in plan.shares.items()},
            layers_shared=0 if plan is None else plan.layers_shared,
        )
