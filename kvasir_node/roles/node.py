"""One node: the network, the membership, and whichever roles it takes, wired in one visible place.

It does not know HTTP, the terminal or signals. `open_node` is one async context manager: what it opens, it closes.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import trio

import kvasir_node
from kvasir_node.base.errors import (
    BugError,
    CapacityError,
    DataError,
    KvasirError,
    Misbehaved,
    RejectReason,
    UsageError,
)
from kvasir_node.base.events import EventLog
from kvasir_node.base.generation import GenerationRequest
from kvasir_node.base.ids import Cid, ModelId, PeerId
from kvasir_node.base.settings import Settings, data_dir_of, keep_torch_cache
from kvasir_node.base.snapshot import (
    ExpertLayerSnapshot,
    FanoutSnapshot,
    MetricsSnapshot,
    NodeSnapshot,
    RequestsSnapshot,
    SlotsSnapshot,
    ThroughputSnapshot,
)
from kvasir_node.decide.placement import DemandSeen, HubsKnown
from kvasir_node.model.manifest import decode_manifest
from kvasir_node.net.gossip import open_gossip
from kvasir_node.net.hello import Membership
from kvasir_node.net.identity import KEY_FILE_NAME
from kvasir_node.net.libp2p_host import Libp2pTransport, open_libp2p_transport
from kvasir_node.net.outbound import outward_host
from kvasir_node.net.rpc import one_call
from kvasir_node.net.single_error import single_error_unwrapped
from kvasir_node.net.transport import Gossip, Transport
from kvasir_node.roles.content import BlockServer, Fetcher, open_block_calls, read_block
from kvasir_node.roles.coordinator import Coordinator
from kvasir_node.roles.demand_tables import DemandTables, skew_words
from kvasir_node.roles.desk import Answer
from kvasir_node.roles.download import FetchTally
from kvasir_node.roles.faults import NO_FAULTS, Faults
from kvasir_node.roles.finding import Finding
from kvasir_node.roles.hub import DEMAND_KIND, Hub
from kvasir_node.roles.ledger_file import FILE_NAME as LEDGER_FILE_NAME
from kvasir_node.roles.library import models_dir, open_library
from kvasir_node.roles.link import Compute
from kvasir_node.roles.loading import LoadedModel, LoggedProgress, load_model, prepare_kernels, use_threads
from kvasir_node.roles.manners import Keeper, lower_priority
from kvasir_node.roles.membership import open_membership, with_granted_roles
from kvasir_node.roles.metrics_view import metrics_snapshot
from kvasir_node.roles.missing_experts import MissingExperts
from kvasir_node.roles.net_view import member_snapshots, net_snapshot, with_paths
from kvasir_node.roles.pairing import Pairing, PhoneInvite
from kvasir_node.roles.peers import Peers
from kvasir_node.roles.pulling import Progress as PullProgress
from kvasir_node.roles.pulling import Puller, model_to_pull
from kvasir_node.roles.reaching import Reaching
from kvasir_node.roles.revoking import FILE_NAME as REVOKED_FILE_NAME
from kvasir_node.roles.revoking import Revocations, RevocationTeller
from kvasir_node.roles.slice_notes import FILE_NAME as SLICES_FILE_NAME
from kvasir_node.roles.slowdown import Pace, Turns, stretched
from kvasir_node.roles.swarm_key import Renewal, SwarmKey, read_swarm_key
from kvasir_node.roles.throttle import Throttle
from kvasir_node.roles.warnings import emulations, for_people, tell_changes
from kvasir_node.roles.worker import Worker
from kvasir_node.store.blocks import BlockStore
from kvasir_node.store.catalog import Catalog
from kvasir_node.wire.envelope import seal
from kvasir_node.wire.guest_pass import PAIR_PROTOCOL
from kvasir_node.wire.hub_proof import HubProofs, with_hub_proof
from kvasir_node.wire.messages import (
    BLOCKS_PROTOCOL,
    EXPERTS_PROTOCOL,
    MARKET_PROTOCOL,
    DemandRecord,
    DemandTable,
    MarketMethod,
)
from kvasir_node.wire.swarm_keys import COORDINATOR, swarm_id
from kvasir_node.wire.ticket import Ticket, write_ticket

logger = logging.getLogger(__name__)

READY_SCHEMA = "kvasir.ready/1"
HUB_TIMEOUT_S = 4.0
MEMBER_TIMEOUT_S = 8.0
_NAME_CHARS_MAX = 128  # of what a node says of itself


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model that this node serves; `created_at` is seconds since 1970."""

    id: str
    name: str
    created_at: int


class Node:
    """A running node; see surfaces/ports.py for what each public method promises."""

    def __init__(
        self, settings: Settings, transport: Transport, membership: Membership, gossip: Gossip, swarm: SwarmKey
    ) -> None:
        self._settings = settings
        self._transport = transport
        self._membership = membership
        self._gossip = gossip
        self._swarm = swarm
        self._started_at = trio.current_time()
        self._served_since = int(time.time())
        self._topic = f"/kvasir/demand/1.0.0/{swarm_id(swarm.secret)}"
        self._tables = DemandTables(
            HubProofs(swarm.valid_keys),
            clock_skew_max_s=settings.market.clock_skew_max_s,
            interval_min_s=settings.market.gossip_interval_min_s,
            is_met=membership.is_member,
            rejections=membership.rejections,
        )
        self._peers = Peers(
            membership,
            transport.peer_id,
            is_hub="hub" in settings.node.roles,
            hubs_changed=self._on_hubs,
            keys=swarm.valid_keys,
        )
        self._downloads = Throttle(settings.store.download_bytes_s)
        self._finding = Finding(settings, transport, membership, self._peers, self._require_member, swarm)
        self._demand_refusals: dict[PeerId, str] = {}  # by hub
        slowdown = settings.compute.slowdown
        self._pace = Pace(slowdown, Turns()) if slowdown > 1 else None  # one for all roles of an emulated device
        self.coordinator: Coordinator | None = None
        self.hub: Hub | None = None
        self.worker: Worker | None = None
        self._keeper: Keeper | None = None
        self._reaching: Reaching | None = None
        self._revoking: RevocationTeller | None = None
        self._is_draining = False
        self.events = EventLog()
        self._tallies: list[FetchTally] = []  # one for each of the few roles that fetch
        self._block_server: BlockServer | None = None

    @property
    def settings(self) -> Settings:
        return self._settings

    @property
    def name(self) -> str:
        return node_name(self._settings, self._transport.peer_id)

    # Building: each role is made, wired and started in one place ------------------------------------------------

    def add_hub(self) -> None:
        self.hub = Hub(
            self._settings.market,
            self._transport.peer_id,
            self._transport.sign,
            self._gossip,
            self._topic,
            prove=lambda record: with_hub_proof(self._swarm.valid_keys(), self._transport.peer_id, record),
            may=self._may,
            addresses=self._transport.addresses,
            table_changed=self._on_own_table,
            address_of=self._network_address,
            is_guest=self._membership.is_guest,
            other_hubs=lambda: [hub for hub in self._peers.hubs() if hub != self._transport.peer_id],
            ask_hub=self._ask_hub,
            tell=self.events.add,
            rejections=self._membership.rejections,
        )
        self._transport.set_handler(MARKET_PROTOCOL, self._membership.guard(self.hub.serve))

    def add_coordinator(self, model: LoadedModel, store: BlockStore) -> None:
        missing = None
        if model.lacks_experts:
            missing = MissingExperts(self.fetcher(store), model.manifest, self._membership.members)
        self.coordinator = Coordinator(
            self._settings,
            model,
            missing,
            name_of=self._peers.name_of,
            address_of=self._network_address,
            is_guest=self._membership.is_guest,
            invite=self._transport.invite,
            rtt_of=self._round_trip,
            ping=self._transport.ping,
            pace=self._pace,
            ledger_path=data_dir_of(self._settings) / LEDGER_FILE_NAME,
            tell=self.events.add,
        )
        self._transport.set_handler(EXPERTS_PROTOCOL, self._membership.guard(self.coordinator.crew.serve))

    def fetcher(self, store: BlockStore) -> Fetcher:
        """Brings content, from other members too than those that are named, at most at the rate of the settings."""
        self._tallies.append(FetchTally())
        return Fetcher(
            open_block_calls(self._transport),
            store,
            self._settings.store,
            self._tallies[-1],
            throttle=self._downloads,
            others=self._membership.members,
        )

    def add_pairing(self) -> None:
        self._pairing = Pairing(
            self._transport.peer_id,
            lambda: self._swarm.valid_keys()[0],
            code_s=self._settings.phone.code_s,
            addresses=self._transport.addresses,
            hubs=self._hub_addresses,
            refusal_of=self._membership.refusal,
            address_of=self._network_address,
            outward_host=outward_host,
        )
        self._transport.set_handler(PAIR_PROTOCOL, self._pairing.serve)

    def _hub_addresses(self) -> tuple[str, ...]:
        own = self._transport.addresses() if self.hub is not None else ()
        about = self._peers.about()
        return (*own, *(each for hub in self._peers.hubs() if hub in about for each in about[hub].addresses))

    def invite_phone(self, expires_s: float | None = None) -> PhoneInvite:
        """What lets one page join this swarm. Raises as `Pairing.invite`."""
        return self._pairing.invite(expires_s)

    def add_reaching(self, transport: Libp2pTransport) -> None:
        self._reaching = Reaching(
            transport,
            self._membership,
            self._settings.network,
            self._peers.hubs,
            is_hub=self.hub is not None,
            moved=self._on_moved,
        )

    def add_revoking(self, revocations: Revocations) -> None:
        self._revoking = RevocationTeller(self._transport, self._membership, revocations)

    def _on_moved(self) -> None:
        """Others reach us at other addresses now, which a coordinator's demand tells."""
        if self.coordinator is not None:
            self.coordinator.hubs_changed()

    def add_library(self, store: BlockStore, catalog: Catalog) -> None:
        self._puller = Puller(self.fetcher(store), catalog, models_dir(self._settings), self._membership.members)

    async def pull(self, ref: str, progress: PullProgress | None = None) -> str:
        """Brings a model to this disk, or mends it, by name or id; returns its id. Raises as `Puller.pull_ref`."""
        return (await self._puller.pull_ref(ref, self._settings.coordinator.hold, progress)).model

    async def pull_before_start(self, model: ModelId) -> None:
        """`pull`, as a member of the swarm for as long as that takes."""
        with single_error_unwrapped():
            async with trio.open_nursery() as nursery:
                self._keep_running(nursery, "the membership", self._membership.run)
                self._keep_running(nursery, "joining", self._finding.joiner.run)
                await self.pull(model)
                nursery.cancel_scope.cancel()

    def add_worker(self, store: BlockStore, compute: Compute) -> None:
        fetcher = self.fetcher(store)
        self.worker = Worker(
            self._settings,
            self._transport,
            fetcher,
            ask_hub=self._ask_hub,
            require_member=self._require_coordinator,
            compute=compute if self._pace is None else stretched(compute, self._pace),
            tell=self.events.add,
            notes_path=data_dir_of(self._settings) / SLICES_FILE_NAME,
        )
        self._keeper = Keeper(self._settings.worker, self.worker)

    def serve_blocks(self, store: BlockStore) -> None:
        self._block_server = server = BlockServer(store, throttle=Throttle(self._settings.store.upload_bytes_s))
        self._transport.set_handler(BLOCKS_PROTOCOL, self._membership.guard(server.serve))

    async def start(self, nursery: trio.Nursery) -> None:
        """Starts everything that was added; ready to serve when this returns."""
        self._keep_running(nursery, "the membership", self._membership.run)
        self._keep_running(nursery, "the list of peers", self._peers.run)
        if self.coordinator is not None:
            started = trio.Event()
            self._keep_running(nursery, "the coordinator", lambda: self._run_coordinator(started))
            await started.wait()
        if self.hub is not None:
            self._keep_running(nursery, "the hub", self.hub.run)
        if self.worker is not None:
            self._keep_running(nursery, "the worker", self.worker.run)
        if self._keeper is not None:
            self._keep_running(nursery, "the keeper of its owner's wishes", self._keeper.run)
        self._keep_running(nursery, "the reader of demand tables", self._follow_tables)
        if self._revoking is not None:
            self._keep_running(nursery, "the news of who is shut out", self._revoking.run)
        if self._reaching is not None:
            self._keep_running(nursery, "the search for ways through NATs", self._reaching.run)
        for what, run in self._finding.parts():
            self._keep_running(nursery, what, run)
        self._keep_running(nursery, "the watch over warnings", lambda: tell_changes(self._warnings, self.events.add))

    def _keep_running(self, nursery: trio.Nursery, what: str, task: Callable[[], Awaitable[None]]) -> None:
        """What one of these raises is a bug and ends the node, under the name of the part that had it."""

        async def run() -> None:
            try:
                with single_error_unwrapped():
                    await task()
            except Exception as error:
                logger.exception("%s ended by a bug; the node cannot go on", what)
                raise BugError(f"{what} ended unexpectedly: {type(error).__name__}: {error}") from error

        nursery.start_soon(run)

    async def _run_coordinator(self, started: trio.Event) -> None:
        assert self.coordinator is not None
        async with trio.open_nursery() as nursery:
            await nursery.start(self.coordinator.run, self._send_demand, self._transport.addresses)
            started.set()

    # Wires between roles ----------------------------------------------------------------------------------------

    def _on_hubs(self, hubs: tuple[PeerId, ...]) -> None:
        self._demand_refusals = {hub: words for hub, words in self._demand_refusals.items() if hub in hubs}
        if self.worker is not None:
            self.worker.tell(HubsKnown(hubs))
        if self.coordinator is not None:
            self.coordinator.hubs_changed()

    def _on_own_table(self, table: DemandTable) -> None:
        """Nobody hears its own gossip."""
        self._tables.keep(self._transport.peer_id, table)
        self._tell_demand()

    async def _follow_tables(self) -> None:
        """Hears the tables of other hubs, whatever our roles: who does not listen to a topic does not pass it on."""
        received = await self._gossip.subscribe(self._topic, self._take_table)
        async for hub, _ in received:
            table = self._tables.table_of(hub)
            if table is None:
                continue
            self._finding.hub_told(hub, table.addresses)
            if self.hub is not None:
                self.hub.hear(hub, table)
            self._tell_demand()

    def _take_table(self, publisher: PeerId, data: bytes) -> bool:
        return self._membership.refusal(publisher) is None and self._tables.take(publisher, data)

    def _tell_demand(self) -> None:
        if self.worker is not None:
            self.worker.tell(DemandSeen(self._tables.open_copies(self.worker.room()), self._tables.idle()))

    def _may(self, peer: PeerId, role: str) -> bool:
        return peer == self._transport.peer_id or self._peers.has_role(peer, role)

    async def _ask_hub(self, hub: PeerId, method: MarketMethod, body: bytes) -> bytes | memoryview:
        if hub == self._transport.peer_id and self.hub is not None:
            return (await self.hub.handle(hub, int(method), body))[0]
        return await one_call(self._transport, hub, MARKET_PROTOCOL, int(method), body, timeout_s=HUB_TIMEOUT_S)

    async def _send_demand(self, record: DemandRecord) -> None:
        """Tells every hub; one that does not answer is told again with the next record."""
        sealed = seal(DEMAND_KIND, record.to_bytes(), self._transport.peer_id, self._transport.sign)
        async with trio.open_nursery() as nursery:
            for hub in self._peers.hubs():
                nursery.start_soon(self._report_to, hub, sealed)

    async def _report_to(self, hub: PeerId, sealed: bytes) -> None:
        try:
            await self._ask_hub(hub, MarketMethod.REPORT, sealed)
        except KvasirError as error:
            words = f"hub {self._peers.name_of(hub)} did not take our demand: {error}"
            logger.warning("%s", words)
            if isinstance(error, Misbehaved):  # it heard us and refused; a lost hub is the joiner's to tell
                self._demand_refusals[hub] = words
        else:
            self._demand_refusals.pop(hub, None)

    async def _require_member(self, peer: PeerId) -> None:
        await self._membership.require(peer, MEMBER_TIMEOUT_S)

    async def _require_coordinator(self, peer: PeerId) -> None:
        await self._require_member(peer)
        if not self._peers.has_role(peer, COORDINATOR):
            raise Misbehaved(RejectReason.NOT_A_MEMBER, f"{peer} offers work, but its ticket lets it be no coordinator")

    def _network_address(self, peer: PeerId) -> str:
        """The host part of a peer's address, for caps per address."""
        address = next((c.address for c in self._transport.connections() if c.peer == peer), "")
        return "/".join(address.split("/")[:3])

    def _round_trip(self, peer: PeerId) -> float | None:
        """Seconds, of the newest keepalive."""
        return next((c.rtt_s for c in self._transport.connections() if c.peer == peer), None)

    # What surfaces need -----------------------------------------------------------------------------------------

    def ticket(self) -> str:
        return write_ticket(Ticket(self._swarm.secret, self._transport.addresses()))

    def models(self) -> tuple[ServedModel, ...]:
        if self.coordinator is None:
            return ()
        manifest = self.coordinator.manifest
        return (ServedModel(manifest.model, manifest.name, self._served_since),)

    def find_model(self, name: str) -> ServedModel | None:
        return next((model for model in self.models() if name in (model.id, model.name)), None)

    def generate(self, request: GenerationRequest) -> AbstractAsyncContextManager[Answer]:
        if self.coordinator is None:
            raise CapacityError("this node serves no model; start it with --role coordinator, or ask one that does")
        return self.coordinator.generate(request)

    def ready_info(self) -> dict[str, Any]:
        models = self.models()
        return {
            "schema": READY_SCHEMA,
            "peer_id": self._transport.peer_id,
            "name": self.name,
            "roles": list(self._settings.node.roles),
            "listen": list(self._transport.addresses()),
            "ticket": self.ticket(),
            "model": {"id": models[0].id, "name": models[0].name} if models else None,
        }

    def revoke(self, peer: str, *, is_revoked: bool) -> bool:
        assert self._revoking is not None
        return self._revoking.change(PeerId(peer), is_revoked=is_revoked)

    def begin_drain(self) -> None:
        """Takes no new work from now on; what is under way goes on to its end."""
        self._is_draining = True
        if self.coordinator is not None:
            self.coordinator.desk.close()
        if self.worker is not None:
            self.worker.leave()

    async def drain(self) -> None:
        """Finishes answers and gives leases back, both at once. Cancel-safe."""
        self._is_draining = True
        async with trio.open_nursery() as nursery:
            if self.coordinator is not None:
                nursery.start_soon(self.coordinator.desk.drain)
            if self.worker is not None:
                nursery.start_soon(self.worker.drain)

    def pause(self) -> None:
        """The worker gives everything back, and takes nothing until `resume`. Raises UsageError without a worker."""
        self._worker_keeper().pause()

    def resume(self) -> None:
        self._worker_keeper().resume()

    def _worker_keeper(self) -> Keeper:
        if self._keeper is None:
            raise UsageError("this node is no worker, so there is nothing to pause or resume")
        return self._keeper

    def snapshot(self) -> NodeSnapshot:
        coordinator = self.coordinator
        return NodeSnapshot(
            version=kvasir_node.__version__,
            peer_id=self._transport.peer_id,
            name=self.name,
            roles=self._settings.node.roles,
            uptime_s=round(trio.current_time() - self._started_at, 3),
            warnings=self._warnings(),
            model=coordinator.model_snapshot() if coordinator is not None else None,
            slots=coordinator.desk.slots() if coordinator is not None else SlotsSnapshot(),
            fanout=coordinator.fanout_snapshot()
            if coordinator is not None
            else FanoutSnapshot(reason="no coordinator"),
            throughput=coordinator.desk.throughput() if coordinator is not None else ThroughputSnapshot(),
            workers=with_paths(coordinator.crew.snapshot(), self._transport) if coordinator is not None else (),
            hub=self.hub.snapshot() if self.hub is not None else None,
            worker=self.worker.snapshot() if self.worker is not None else None,
            net=net_snapshot(self._transport, self._reaching, self._finding.clocks),
            members=member_snapshots(self._peers, self._transport),
            revoked=() if self._revoking is None else self._revoking.revoked,
            draining=self._is_draining,
        )

    def requests_snapshot(self) -> RequestsSnapshot:
        desk = None if self.coordinator is None else self.coordinator.desk
        return RequestsSnapshot() if desk is None else desk.book.snapshot(trio.current_time())

    def experts(self) -> tuple[ExpertLayerSnapshot, ...]:
        return () if self.coordinator is None else self.coordinator.experts()

    def metrics(self) -> MetricsSnapshot:
        served = 0 if self._block_server is None else self._block_server.bytes_served
        return metrics_snapshot(self.coordinator, self._tallies, served, self._membership.rejections.counts())

    def _warnings(self) -> tuple[str, ...]:
        warnings = [
            *emulations(self._settings.compute),
            *self._finding.joiner.warnings(),
            *self._demand_refusals.values(),
        ]
        for hub, skew_s in self._tables.skews().items():
            name = self._peers.name_of(hub)
            warnings.append(f"the demand table of hub {name} is refused: clock skew: {skew_words(skew_s)}")
        if self.worker is not None and not self._peers.hubs():
            warnings.append(f"no hub is connected, so this worker finds no work; {self._finding.way_to_hubs()}")
        if self.worker is not None:
            warnings += self.worker.problems()
        if self.coordinator is not None and self.coordinator.dispatch.counters.mismatches:
            warnings.append(f"{self.coordinator.dispatch.counters.mismatches} wrong answers of workers were caught")
        return for_people(warnings, self._peers.name_of)


def node_name(settings: Settings, peer: PeerId) -> str:
    """Two nodes of one machine have two names."""
    return (settings.node.name or f"{socket.gethostname()[: _NAME_CHARS_MAX - 5]}-{peer[-4:]}")[:_NAME_CHARS_MAX]


def _open_model(settings: Settings, catalog: Catalog, store: BlockStore) -> LoadedModel | ModelId:
    """Blocks: indexes (or finds the index of) the model of the settings, then loads it; or the id of one to fetch."""
    wanted, hold = settings.coordinator.model, settings.coordinator.hold
    missing = model_to_pull(store, catalog, models_dir(settings), wanted, hold)
    return missing if missing is not None else _load_model(settings, catalog, store)


def _load_model(settings: Settings, catalog: Catalog, store: BlockStore) -> LoadedModel:
    wanted = settings.coordinator.model
    entry = catalog.open(wanted, progress=LoggedProgress(f"indexing {wanted}"))
    if entry.path is None:
        raise DataError(f"{entry.name} is known by its blocks only; join a swarm that has it with --join TICKET")
    manifest = decode_manifest(read_block(store, Cid(entry.model)))
    return load_model(entry.path, manifest, settings)


@asynccontextmanager
async def open_node(
    settings: Settings, *, faults: Faults = NO_FAULTS, renewal: Renewal = Renewal.KEEP
) -> AsyncIterator[Node]:
    """A node with the roles of the settings, ready to serve, until the block ends.

    Raises UsageError, DataError and CapacityError for what the settings ask for and cannot be had; BugError, inside
    the block, when a part of the node ends by a bug.
    """
    data_dir = data_dir_of(settings)
    data_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    keep_torch_cache(data_dir)
    use_threads(settings.node.threads)
    network = settings.network
    swarm = read_swarm_key(network.join, data_dir, renewal=renewal, old_secret_s=network.old_secret_s)
    settings = with_granted_roles(settings, swarm)
    roles = settings.node.roles
    if "worker" in roles:
        lower_priority(settings.worker.niceness)
    store, catalog = await trio.to_thread.run_sync(open_library, settings)
    if {"coordinator", "worker"} & set(roles):
        await trio.to_thread.run_sync(prepare_kernels)
    model = await trio.to_thread.run_sync(_open_model, settings, catalog, store) if "coordinator" in roles else None
    async with (
        open_libp2p_transport(settings.network, data_dir / KEY_FILE_NAME) as transport,
        open_gossip(transport) as gossip,
    ):
        revocations = Revocations(data_dir / REVOKED_FILE_NAME, swarm.valid_keys)
        name = node_name(settings, transport.peer_id)
        membership = open_membership(settings, transport, swarm, name, revocations.refusal)
        node = Node(settings, transport, membership, gossip, swarm)
        node.add_library(store, catalog)
        if "hub" in roles:
            node.add_hub()
        if isinstance(model, LoadedModel):
            node.add_coordinator(model, store)
        if "worker" in roles:
            node.add_worker(store, faults.compute)
        node.serve_blocks(faults.served(store))
        node.add_pairing()
        node.add_reaching(transport)
        node.add_revoking(revocations)
        if isinstance(model, str):
            await node.pull_before_start(model)
            node.add_coordinator(await trio.to_thread.run_sync(_load_model, settings, catalog, store), store)
        async with trio.open_nursery() as nursery:
            await node.start(nursery)
            yield node
            nursery.cancel_scope.cancel()
