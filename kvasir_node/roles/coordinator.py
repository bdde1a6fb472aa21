"""The coordinator: one model served, alone while calm, wider while saturated.

It puts together the request desk (roles/desk.py), the dispatch on the computing thread (roles/dispatch.py) and the
crew of workers (roles/crew.py), and tells the market what it wants. It does not know HTTP, hubs' streams or how blocks
are served; every decision is made in decide/.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

import torch
import trio

from kvasir_node.base.errors import UsageError
from kvasir_node.base.generation import GenerationRequest
from kvasir_node.base.ids import ExpertId, PeerId
from kvasir_node.base.settings import Settings
from kvasir_node.base.snapshot import FanoutSnapshot, ModelSnapshot
from kvasir_node.decide.admission import AdmissionLimits
from kvasir_node.decide.demand import Wanted, demand_for
from kvasir_node.decide.fanout import Route, plan_route, predicted_gain
from kvasir_node.model.engine import Engine
from kvasir_node.model.manifest import Manifest, slices_of
from kvasir_node.model.tensor_file import read_tensor
from kvasir_node.model.trunk import Trunk, load_trunk
from kvasir_node.roles.crew import Crew
from kvasir_node.roles.desk import Answer, Desk
from kvasir_node.roles.dispatch import FanoutDispatch, compute_with
from kvasir_node.roles.loading import LoadedModel
from kvasir_node.wire.messages import DemandRecord
from kvasir_node.wire.tensors import ExpertRequest

logger = logging.getLogger(__name__)

CONTEXT_MAX_DEFAULT = 4096
TICK_S = 0.25  # how often trials, proofs and the heat of experts are looked at while anything is going on
SendDemand = Callable[[DemandRecord], Awaitable[None]]


class Coordinator:
    """See the module. Made by `Coordinator.load`, then `run` inside the node's nursery."""

    def __init__(
        self,
        settings: Settings,
        model: LoadedModel,
        *,
        name_of: Callable[[PeerId], str],
        address_of: Callable[[PeerId], str],
    ) -> None:
        self._settings = settings
        self._model = model
        manifest = model.manifest
        self.slices = slices_of(manifest, settings.market.slice_bytes)
        self._rng = random.Random(0)
        self.crew = Crew(
            settings.fanout,
            manifest.model,
            frozenset(self.slices),
            own_sums=self._own_sums,
            changed=self._replan,
            trial_layers_changed=lambda layers: self.dispatch.set_trial_layers(layers),
            name_of=name_of,
            address_of=address_of,
            body_bytes_max=settings.network.frame_bytes_max,
        )
        self.dispatch = FanoutDispatch(
            model.shard,
            manifest.layers,
            manifest.experts_per_layer,
            crew=self.crew,
            load_missing=self._load_missing,
            deadline_s=self.crew.deadline_s,
            spot_check=lambda: self._rng.random() < settings.fanout.spot_check_ratio,
        )
        self._trunk = self._load_trunk()
        limits = settings.coordinator
        self.desk = Desk(
            Engine(self._trunk, limits.slots, self._context(), limits.prefill_chunk),
            model.text,
            AdmissionLimits(
                slots=limits.slots,
                queue=limits.queue,
                saturated_after_s=limits.saturated_after_s,
                calm_after_s=limits.calm_after_s,
                calm_busy_ratio=limits.calm_busy_ratio,
            ),
            load_changed=self._load_changed,
        )
        self._route = Route(False, "off: calm", {})
        self._was_spread = False
        self._peak_pressure = 0.0  # since saturation began: demand must not flap with every request that ends
        self._demand_changed = trio.Event()
        self._told: tuple[Wanted, ...] | None = None  # what the hubs heard last
        self._sequence = 0
        self._epoch = time.time_ns() // 1_000_000

    def _load_trunk(self) -> Trunk:
        shard = self._model.shard
        return load_trunk(self._model.checkpoint.path, shard.dtype, shard.device, self.dispatch)

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
        async with trio.open_nursery() as nursery:
            await nursery.start(self.crew.run)  # pyright: ignore[reportArgumentType]
            nursery.start_soon(self.desk.run)
            nursery.start_soon(self.desk.watch_load)
            nursery.start_soon(self._tick)
            nursery.start_soon(self._report_demand, send_demand, addresses)
            task_status.started()

    # Fan-out --------------------------------------------------------------------------------------------------

    @property
    def _spread(self) -> bool:
        fanout = self._settings.fanout
        return fanout.enabled and (fanout.when == "always" or self.desk.saturated)

    @property
    def _lacks_experts(self) -> bool:
        return any(len(held) < self.manifest.experts_per_layer for held in self._model.held.values())

    def _load_changed(self) -> None:
        saturated = self.desk.saturated
        self._peak_pressure = max(self._peak_pressure, self.desk.admission.pressure) if saturated else 0.0
        if self._spread != self._was_spread:
            self._was_spread = self._spread
            self.crew.plan_trials(allowed=self._spread or self._lacks_experts)
            self._replan()
        self._demand_changed.set()

    def _replan(self) -> None:
        """Works out the route anew; called whenever who is proven, or the load, may have changed."""
        proven = self.crew.ledger.proven()
        spread = self._spread and bool(proven)
        route = plan_route(
            layers=self.manifest.layers,
            experts_per_layer=self.manifest.experts_per_layer,
            held=self._model.held,
            proven=proven if self._settings.fanout.enabled else (),
            heat=self._heat(),
            spread=spread,
            reason=self._reason(len({peer for peer, _ in proven})),
        )
        if route.on != self._route.on:
            logger.info("fan-out %s", route.reason)
        self._route = route
        self.dispatch.set_route(route)
        self._demand_changed.set()

    def _reason(self, workers: int) -> str:
        if not self._settings.fanout.enabled:
            return "off: switched off by fanout.enabled"
        if not self._spread:
            return "off: calm"
        if not workers:
            return "off: no proven worker"
        return f"on: queue {self.desk.admission.queued}, {workers} worker{'s' if workers > 1 else ''}"

    def _heat(self) -> dict[int, list[float]]:
        return {layer: heat.tolist() for layer, heat in self.dispatch.heat.items()}

    async def _tick(self) -> None:
        """Proofs decay, cool-offs end, and the heat of experts moves: look at them while anything is going on."""
        while True:
            await trio.sleep(TICK_S)
            decayed = self.crew.ledger.tick(trio.current_time())
            allowed = self._spread or self._lacks_experts
            if allowed:
                self.crew.plan_trials(allowed=True)
            if decayed or (allowed and self.crew.ledger.proven()):
                self._replan()

    def _load_missing(self, layer: int, experts: Sequence[ExpertId]) -> None:
        """Takes experts in that nobody else can compute in time: from the checkpoint on this disk."""
        logger.info("loading experts %s of layer %d", [expert.index for expert in experts], layer)
        for expert in experts:
            parts = self._model.checkpoint.experts[expert]
            self._model.shard.add(expert, {part: read_tensor(tensor) for part, tensor in parts.items()})

    def _own_sums(self, request: ExpertRequest) -> torch.Tensor:
        pairs = (request.pair_row.long(), request.pair_expert.long(), request.pair_weight)
        return compute_with(self._model.shard, self._load_missing, request.layer, request.rows, *pairs)

    # Demand ---------------------------------------------------------------------------------------------------

    def demand(self) -> tuple[Wanted, ...]:
        return demand_for(
            slices=self.slices,
            held=self._model.held,
            proven=self.crew.ledger.proven(),
            heat=self._heat(),
            saturated=self._settings.fanout.enabled and self.desk.saturated,
            pressure=self._peak_pressure,
            surge_copies_max=self._settings.market.surge_copies_max,
        )

    async def _report_demand(self, send: SendDemand, addresses: Callable[[], Sequence[str]]) -> None:
        """Tells the hubs: at once when demand changed (at most once per interval), and again before it expires."""
        market = self._settings.market
        while True:
            with trio.move_on_after(market.demand_ttl_s / 3):
                while self.demand() == self._told:
                    self._demand_changed = trio.Event()
                    await self._demand_changed.wait()
            self._told = self.demand()
            await send(self._record(self._told, tuple(addresses())))
            await trio.sleep(market.report_interval_s)

    def _record(self, wanted: tuple[Wanted, ...], addresses: tuple[str, ...]) -> DemandRecord:
        self._sequence += 1
        admission = self.desk.admission
        return DemandRecord(
            epoch=self._epoch,
            sequence=self._sequence,
            issued_at=time.time(),
            ttl_s=self._settings.market.demand_ttl_s,
            model=self.manifest.model,
            model_name=self.manifest.name,
            slice_bytes=max(part.count for part in self.slices) * self.manifest.expert_bytes,
            addresses=addresses,
            slots=self._settings.coordinator.slots,
            busy=admission.busy,
            queued=admission.queued,
            wants=wanted,
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
        )

    def fanout_snapshot(self) -> FanoutSnapshot:
        counters = self.dispatch.counters
        workers = len({peer for peer, _ in self.crew.ledger.proven()})
        experts_s = self.dispatch.local_layer_s * len(self.manifest.layers)
        trunk_s = max(0.0, self.desk.times.step_s - experts_s)
        return FanoutSnapshot(
            on=self._route.on,
            reason=self._route.reason,
            predicted_gain=round(predicted_gain(trunk_s, experts_s, workers), 3),
            lanes=1,
            local_pairs=counters.local,
            remote_pairs=counters.remote,
            trial_pairs=self.crew.trial_pairs,
            fallbacks=counters.fallbacks,
            hedges=0,
            spot_checks=counters.spot_checks,
            mismatches=counters.mismatches,
        )
