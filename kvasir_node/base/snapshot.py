"""What a node looks like from outside, at one moment: frozen values, ready to be shown or sent as JSON.

Nothing secret may be here: whoever can read `status` sees all of it. It does not know how it is shown.
Field names are the JSON names of `kvasir.status/1`; counters only grow; `*_pairs` count (row, expert) pairs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from kvasir_node.base.events import RequestEnded
from kvasir_node.base.histogram import NOTHING_SEEN, HistogramSnapshot

STATUS_SCHEMA = "kvasir.status/1"


@dataclass(frozen=True, slots=True)
class ModelSnapshot:
    id: str
    name: str
    family: str
    layers: int
    experts_per_layer: int
    slices: int
    slices_held: int
    experts_held: int = 0  # in memory until hotter ones take their places
    experts_borrowed: int = 0  # in memory for a while, because they were needed
    experts_mapped: int = 0  # neither, but computed where they lie in the checkpoint
    experts_read: int = 0  # from the disk, to be borrowed or held
    expert_swaps: int = 0  # experts that made room for hotter ones
    expert_dtype: str = ""  # float32 | bfloat16 | int8: what workers must load experts in, too
    expert_error: float | None = None  # int8: of a layer's sums, relative to those of the checkpoint's weights


@dataclass(frozen=True, slots=True)
class SlotsSnapshot:
    total: int = 0
    busy: int = 0
    queued: int = 0
    queue_max: int = 0
    oldest_wait_s: float = 0.0
    state: str = "calm"  # calm | saturated
    pressure: float = 0.0  # (busy + queued) / slots


@dataclass(frozen=True, slots=True)
class WireSnapshot:
    """What rows and sums travel in, and what was measured when `fanout.wire` asked for less than is computed in."""

    encoding: str = ""  # float32 | bfloat16 | int8
    asked: str = "compute"  # compute | bfloat16 | int8
    error: float | None = None  # of the logits, as `roles/wire_gate` measures it
    tokens: int = 0  # compared with those of a run whose rows stayed here
    tokens_agreeing: int = 0
    refusal: str = ""  # why `asked` is not used


@dataclass(frozen=True, slots=True)
class FanoutSnapshot:
    on: bool = False
    reason: str = ""
    predicted_gain: float = 1.0  # of what is in force, else of the best that could be
    lanes: int = 1
    local_pairs: int = 0
    remote_pairs: int = 0
    trial_pairs: int = 0
    fallbacks: int = 0  # remote pairs that were computed here after all
    hedges: int = 0
    spot_checks: int = 0
    mismatches: int = 0
    wire: WireSnapshot = WireSnapshot()
    measured_gain: float | None = None  # tokens per second as a multiple of alone, of what is in force
    shares: Mapping[str, float] = field(default_factory=dict[str, float])  # of all pairs, by the peer id of the worker
    layers_shared: int = 0  # of which a worker computes what is held here


@dataclass(frozen=True, slots=True)
class ThroughputSnapshot:
    tokens_per_s: float = 0.0  # over the last few seconds
    tokens_total: int = 0
    requests_total: int = 0
    prompt_tokens_total: int = 0  # of the prompts whose computing has begun
    prompt_tokens_reused: int = 0  # of these, those that were copied from other requests


@dataclass(frozen=True, slots=True)
class WorkerPeerSnapshot:
    """A worker as its coordinator sees it; `state` is the most telling of its slices' states."""

    peer_id: str
    name: str
    slices: tuple[str, ...]
    state: str  # new | trial | proven | suspect | banned
    path: str  # direct | relay; empty when it is not connected
    rtt_ms: float | None
    calls: int
    rows: int
    failures: int
    reason: str  # of the last failure, or empty


@dataclass(frozen=True, slots=True)
class MemberSnapshot:
    """A peer that has proved to be of this swarm, as it describes itself."""

    peer_id: str
    name: str
    roles: tuple[str, ...]
    path: str = ""  # direct | relay
    is_guest: bool = False  # it is here by a code for a phone


@dataclass(frozen=True, slots=True)
class DemandSnapshot:
    model: str
    slice: str
    want: int  # copies wanted
    proven: int
    leased: int


@dataclass(frozen=True, slots=True)
class HubSnapshot:
    coordinators: int = 0
    idle_nodes: int = 0
    leases: int = 0
    demand: tuple[DemandSnapshot, ...] = ()


@dataclass(frozen=True, slots=True)
class WorkerSnapshot:
    state: str = "idle"  # idle | fetching | loading | trial | serving | draining | paused
    leases: tuple[str, ...] = ()
    slices: tuple[str, ...] = ()  # loaded
    calls: int = 0
    rows: int = 0
    bytes_fetched: int = 0
    bytes_reused: int = 0
    reason: str = ""  # why it drains or is paused: its owner's word, or a wish such as worker.only_on_ac


@dataclass(frozen=True, slots=True)
class NetSnapshot:
    peers: int = 0
    direct: int = 0
    relayed: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    reachability: str = "unknown"  # public | lan | private | unknown: who can connect to this node
    nat: str = "unknown"  # none | cone | symmetric | unknown
    relays: tuple[str, ...] = ()  # hubs that keep a place for this node
    carried: int = 0  # connections of others that this hub carries now
    upnp: str = "off"  # off | unused (nobody needs it) | failed | mapped: whether the router lets connections in
    upnp_says: str = ""  # the outside address that was mapped, or why none is
    reached: tuple[str, ...] = ()  # addresses at which hubs have reached this node from outside
    hairpin: str = "unknown"  # yes | no | unknown: whether the router leads this node's own outside address back to it
    clock_ahead_s: float | None = None  # this machine's clock before the hubs'; None = no hub has told
    clock_doubt_s: float = 0.0  # how much of that may be the way there and back


@dataclass(frozen=True, slots=True)
class RequestSnapshot:
    """A request under way. Token counts are of all its choices."""

    request: int  # its number in this node's log
    state: str  # queued | prefill | decode
    prompt_tokens: int
    answer_tokens: int
    choices: int
    age_s: float


@dataclass(frozen=True, slots=True)
class RequestsSnapshot:
    running: tuple[RequestSnapshot, ...] = ()
    recent: tuple[RequestEnded, ...] = ()  # the latest first


@dataclass(frozen=True, slots=True)
class ExpertLayerSnapshot:
    """The experts of one layer, each by its place in the three columns.

    `use`: how much it was used lately, 100 = the most used of the whole model. `where` its rows are computed now:
    h = here, from memory; m = here, from the checkpoint's files; w = by a proven worker; . = nowhere before it is
    fetched. `copies`: proven workers that have it.
    """

    layer: int
    use: tuple[int, ...]
    where: str
    copies: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class MetricsSnapshot:
    """What the metrics tell beyond the status: counts by label only grow. Most is empty without a coordinator."""

    requests: Mapping[str, int] = field(default_factory=dict[str, int])  # ended, by how
    first_token_s: HistogramSnapshot = NOTHING_SEEN
    between_tokens_s: HistogramSnapshot = NOTHING_SEEN
    expert_calls: Mapping[str, int] = field(default_factory=dict[str, int])  # to workers, by outcome
    expert_call_s: HistogramSnapshot = NOTHING_SEEN
    blocks_bytes: Mapping[str, int] = field(default_factory=dict[str, int])  # fetched, reused, wasted, served
    rejections: Mapping[str, int] = field(default_factory=dict[str, int])  # of peers, by reason


@dataclass(frozen=True, slots=True)
class NodeSnapshot:
    version: str
    peer_id: str
    name: str
    roles: tuple[str, ...]
    uptime_s: float
    warnings: tuple[str, ...]
    model: ModelSnapshot | None
    slots: SlotsSnapshot
    fanout: FanoutSnapshot
    throughput: ThroughputSnapshot
    workers: tuple[WorkerPeerSnapshot, ...]
    hub: HubSnapshot | None
    worker: WorkerSnapshot | None
    net: NetSnapshot
    members: tuple[MemberSnapshot, ...] = ()  # connected now
    revoked: tuple[str, ...] = ()  # peer ids that the swarm's owner has shut out
    draining: bool = False  # takes no new work, for good; what is under way goes on to its end

    def to_json(self) -> dict[str, Any]:
        return {"schema": STATUS_SCHEMA, **asdict(self)}
