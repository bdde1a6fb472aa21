"""The worker: carries out what `decide/placement` decides, and computes experts for coordinators.

It pulls: it asks hubs, fetches, connects out, and leaves when its lease ends. It does not know the market's rules,
how blocks are chosen, or what a coordinator does with the sums. Whatever goes wrong becomes an event for the mind.
"""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import trio

from kvasir_node.base.errors import CapacityError, DataError, KvasirError, PeerError
from kvasir_node.base.ids import ExpertId, ModelId, PeerId
from kvasir_node.base.settings import Settings
from kvasir_node.base.snapshot import WorkerSnapshot
from kvasir_node.decide import placement
from kvasir_node.decide.placement import Assignment, Placement, PlacementLimits, Stage
from kvasir_node.model.checkpoint import ExpertMaths
from kvasir_node.model.experts import ExpertShard
from kvasir_node.model.manifest import Manifest
from kvasir_node.model.tensor_file import parse_expert_file
from kvasir_node.net.transport import Transport
from kvasir_node.roles.content import Fetcher, read_blob
from kvasir_node.roles.link import Compute, Link, compute_here
from kvasir_node.roles.loading import compute_dtype, pick_device
from kvasir_node.wire.blobs import BlobRef
from kvasir_node.wire.messages import LeaseVerdict, MarketMethod, Offer, Poll, Renewal, read_poll_answer

logger = logging.getLogger(__name__)

AskHub = Callable[[PeerId, MarketMethod, bytes], Awaitable[bytes | memoryview]]
"""One request to a hub, wherever it is; raises PeerError."""

RequireMember = Callable[[PeerId], Awaitable[None]]
"""Returns when the peer has proven its membership; raises PeerError."""

EVENTS_MAX = 1024
UNLOAD_GRACE_S = 1.0  # calls that were on their way when we detached are still answered
_STATE_ORDER = (Stage.SERVING, Stage.TRIAL, Stage.LOADING, Stage.FETCHING, Stage.DRAINING)


@dataclass(slots=True)
class _Work:
    """What the worker holds of one model."""

    manifest: Manifest
    shard: ExpertShard
    leases: set[str] = field(default_factory=set[str])


class Worker:
    """See the module. `compute` is replaced only by the shipped faults (roles/faults.py)."""

    def __init__(
        self,
        settings: Settings,
        transport: Transport,
        fetcher: Fetcher,
        *,
        ask_hub: AskHub,
        require_member: RequireMember,
        compute: Compute = compute_here,
        seed: int | None = None,
    ) -> None:
        self._settings = settings
        self._transport = transport
        self._fetcher = fetcher
        self._ask_hub = ask_hub
        self._require_member = require_member
        self._compute = compute
        market, worker = settings.market, settings.worker
        limits = PlacementLimits(worker.slices_max, market.poll_interval_s, market.renew_interval_s)
        self._mind = Placement(limits, random.Random(seed))
        self._send, self._events = trio.open_memory_channel[placement.Event](EVENTS_MAX)
        self._fetched: dict[str, tuple[Manifest, Mapping[ExpertId, BlobRef]]] = {}
        self._work: dict[ModelId, _Work] = {}
        self._links: dict[tuple[PeerId, ModelId], Link] = {}
        self._linking = trio.Lock()
        self._progress: dict[str, int] = {}
        self._limiter = trio.CapacityLimiter(1)  # one computing thread; torch uses node.threads inside it
        self._emptied = trio.Event()
        self._steps: dict[str, trio.CancelScope] = {}
        self.calls = 0
        self.rows = 0

    def post(self, event: placement.Event) -> None:
        """Tells the mind something. A full queue would mean that it is stuck, which is our bug, so it raises."""
        self._send.send_nowait(event)

    async def run(self) -> None:
        """Asks, fetches, serves and leaves, until cancelled."""
        async with trio.open_nursery() as nursery:
            while True:
                event: placement.Event = placement.Tick()
                deadline = self._mind.next_at()
                with trio.move_on_at(float("inf") if deadline is None else deadline):
                    event = await self._events.receive()
                for command in self._mind.handle(event, trio.current_time()):
                    nursery.start_soon(self._carry_out, command, nursery)
                if self._mind.paused and not self._mind.stages():
                    self._emptied.set()

    async def drain(self) -> None:
        """Gives everything back in good order. Cancel-safe; returns when nothing is held."""
        self._emptied = trio.Event()
        self.post(placement.Paused())
        await self._emptied.wait()

    async def _carry_out(self, command: placement.Command, nursery: trio.Nursery) -> None:
        match command:
            case placement.PollHub(hub):
                await self._poll(hub)
            case placement.RenewLease(hub, assignment, serving):
                await self._renew(hub, assignment, serving)
            case placement.Release(hub, assignment):
                await self._release(hub, assignment)
            case placement.Drain(assignment):
                await self._drain(assignment)
            case placement.Fetch(assignment):
                await self._step(assignment, lambda: self._fetch(assignment))
            case placement.LoadSlice(assignment):
                await self._step(assignment, lambda: self._load(assignment))
            case placement.Attach(assignment):
                await self._step(assignment, lambda: self._attach(assignment, nursery))

    async def _step(self, assignment: Assignment, act: Callable[[], Awaitable[None]]) -> None:
        scope = self._steps[assignment.lease] = trio.move_on_after(math.inf)
        try:
            with scope:
                await act()
            if scope.cancelled_caught:
                return  # the lease ended meanwhile
        except KvasirError as error:
            logger.warning("slice %s: %s", assignment.slice, error)
            self.post(placement.StepFailed(assignment.lease, retry=isinstance(error, PeerError)))
        else:
            self._advance(assignment.lease)
            self.post(placement.StepDone(assignment.lease))

    def _advance(self, lease: str, by: int = 1) -> None:
        self._progress[lease] = self._progress.get(lease, 0) + by

    # The market -----------------------------------------------------------------------------------------------

    async def _poll(self, hub: PeerId) -> None:
        stages = self._mind.stages()
        room = self._settings.worker.memory_bytes - sum(work.shard.nbytes for work in self._work.values())
        poll = Poll(max(0, room), have=(), busy=placement.offered(stages.values()))
        try:
            answer = read_poll_answer(await self._ask_hub(hub, MarketMethod.POLL, poll.to_bytes()))
        except KvasirError as error:
            logger.info("hub %s did not answer a poll: %s", hub, error)
            self.post(placement.PollFailed(hub))
            return
        if isinstance(answer, Offer):
            logger.info("took a lease on slice %s of %s", answer.slice, answer.model)
            assignment = Assignment(answer.lease, answer.model, answer.slice, answer.coordinator, answer.addresses, hub)
            self.post(placement.OfferReceived(assignment, answer.ttl_s))
        else:
            self.post(placement.NothingOffered(answer.retry_after_s))

    async def _renew(self, hub: PeerId, assignment: Assignment, serving: bool) -> None:
        request = self._renewal(assignment, serving)
        try:
            verdict = LeaseVerdict.from_bytes(await self._ask_hub(hub, MarketMethod.RENEW, request))
        except KvasirError as error:
            logger.info("hub %s did not renew %s: %s", hub, assignment.slice, error)
            self.post(placement.RenewFailed(assignment.lease, hub))
            return
        if verdict.ttl_s <= 0:
            logger.info("the lease on slice %s ends: %s", assignment.slice, verdict.reason)
        self.post(placement.Renewed(assignment.lease, verdict.ttl_s))

    async def _release(self, hub: PeerId, assignment: Assignment) -> None:
        try:
            await self._ask_hub(hub, MarketMethod.RELEASE, self._renewal(assignment, serving=False))
        except KvasirError as error:
            logger.info("hub %s was not told of a release: %s", hub, error)  # the lease expires by itself

    def _renewal(self, assignment: Assignment, serving: bool) -> bytes:
        return Renewal(
            assignment.lease,
            assignment.model,
            assignment.slice,
            assignment.coordinator,
            serving,
            self._progress.get(assignment.lease, 0),
        ).to_bytes()

    # Fetch, load, attach, leave -------------------------------------------------------------------------------

    async def _fetch(self, assignment: Assignment) -> None:
        coordinator = await self._reach(assignment)
        self._fetched[assignment.lease] = await self._fetcher.fetch_slice(
            (coordinator,),
            assignment.model,
            assignment.slice,
            progress=lambda *_: self._advance(assignment.lease),
        )

    async def _reach(self, assignment: Assignment) -> PeerId:
        addresses = [a for a in assignment.addresses if a.endswith(f"/p2p/{assignment.coordinator}")]
        connected = any(c.peer == assignment.coordinator for c in self._transport.connections())
        if not connected:
            await self._transport.connect(addresses)
        await self._require_member(assignment.coordinator)
        return assignment.coordinator

    async def _load(self, assignment: Assignment) -> None:
        manifest, experts = self._fetched[assignment.lease]
        work = self._work.get(assignment.model)
        if work is None:
            work = self._work[assignment.model] = _Work(manifest, self._new_shard(manifest))
        work.leases.add(assignment.lease)
        held = sum(each.shard.nbytes for each in self._work.values())
        needed = len(experts) * work.shard.expert_bytes
        if held + needed > self._settings.worker.memory_bytes:
            raise CapacityError(
                f"slice {assignment.slice} needs {needed} bytes beside the {held} that are held; "
                f"worker.memory_bytes is {self._settings.worker.memory_bytes}"
            )
        await trio.to_thread.run_sync(self._load_experts, work, experts)

    def _new_shard(self, manifest: Manifest) -> ExpertShard:
        """In the dtype that a coordinator of this model computes in unless it was told otherwise."""
        return ExpertShard(
            ExpertMaths.from_dict(manifest.maths),
            manifest.hidden_size,
            manifest.expert_hidden_size,
            compute_dtype("auto", manifest.trunk.size),
            pick_device(self._settings.node.device),
        )

    def _load_experts(self, work: _Work, experts: Mapping[ExpertId, BlobRef]) -> None:
        parts = work.manifest.expert_parts()
        for expert, blob in experts.items():
            work.shard.add(expert, parse_expert_file(read_blob(self._fetcher.store, blob), parts))
        self._self_test(work, tuple(experts))

    @staticmethod
    def _self_test(work: _Work, experts: Sequence[ExpertId]) -> None:
        """One row of ones through each expert: what is not finite here would only fail its trial."""
        layer = experts[0].layer
        rows = torch.ones(1, work.manifest.hidden_size)
        index = torch.tensor([expert.index for expert in experts])
        sums = work.shard.compute(
            layer, rows, torch.zeros(len(experts), dtype=torch.int64), index, torch.ones(len(experts))
        )
        if not bool(torch.isfinite(sums).all()):
            raise DataError(f"the experts of layer {layer} give values that are not finite on this machine")

    async def _attach(self, assignment: Assignment, nursery: trio.Nursery) -> None:
        coordinator = await self._reach(assignment)
        async with self._linking:  # two slices of one coordinator share a link
            link = self._links.get((coordinator, assignment.model))
            if link is None:
                link = Link(
                    coordinator,
                    assignment.model,
                    self._work[assignment.model].shard,
                    body_bytes_max=self._settings.network.frame_bytes_max,
                    in_flight_max=self._settings.fanout.in_flight_max,
                    compute=self._compute,
                    limiter=self._limiter,
                    computed=self._count,
                    standing_told=self.post,
                )
                await nursery.start(link.run, self._transport, self._link_ended)
                self._links[(coordinator, assignment.model)] = link
        await link.attach(assignment)

    def _link_ended(self, link: Link) -> None:
        self._links.pop((link.coordinator, link.model), None)
        for lease in link.leases():
            self.post(placement.CoordinatorLost(lease))

    def _count(self, rows: int) -> None:
        self.calls += 1
        self.rows += rows

    async def _drain(self, assignment: Assignment) -> None:
        """Orderly: tell the coordinator, answer what is still on its way, then forget the weights."""
        step = self._steps.pop(assignment.lease, None)
        if step is not None:
            step.cancel()
        link = self._links.get((assignment.coordinator, assignment.model))
        if link is not None and await link.detach(assignment):
            await trio.sleep(UNLOAD_GRACE_S)
            await link.finish_calls()
        work = self._work.get(assignment.model)
        if work is not None:
            work.leases.discard(assignment.lease)
            _, experts = self._fetched.get(assignment.lease, (None, {}))
            others = {e for lease in work.leases for e in self._fetched[lease][1]}  # another coordinator's, same slice
            for expert in set(experts) - others:
                work.shard.remove(expert)
            if not work.leases:
                del self._work[assignment.model]
        if link is not None and not link.leases():
            link.close()
        self._fetched.pop(assignment.lease, None)
        self._progress.pop(assignment.lease, None)
        logger.info("left slice %s", assignment.slice)
        self.post(placement.Drained(assignment.lease))

    def snapshot(self) -> WorkerSnapshot:
        stages = self._mind.stages()
        present = {stage for _, stage in stages.values()}
        state = next((str(stage) for stage in _STATE_ORDER if stage in present), "idle")
        if self._mind.paused and not stages:
            state = "paused"
        loaded = [a for a, stage in stages.values() if stage in (Stage.TRIAL, Stage.SERVING)]
        return WorkerSnapshot(
            state=state,
            leases=tuple(sorted(stages)),
            slices=tuple(str(a.slice) for a in sorted(loaded, key=lambda a: a.slice)),
            calls=self.calls,
            rows=self.rows,
            bytes_fetched=self._fetcher.tally.bytes_fetched,
            bytes_reused=self._fetcher.tally.bytes_reused,
        )
