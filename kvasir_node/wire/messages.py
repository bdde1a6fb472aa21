"""Every control message of the swarm: its fields, bounds and bytes.

| protocol | method | request | answer |
|---|---|---|---|
| /kvasir/market/1.0.0 | REPORT | signed DemandRecord | empty |
| | POLL | Poll | Offer, or NoOffer |
| | RENEW | Renewals: those of one worker at one hub | Verdicts, in their order |
| | RELEASE | Renewals | empty |
| | TELL | HubNews (a hub) | HubGreeting |
| /kvasir/experts/1.0.0 | ATTACH | Attachment (worker) | empty |
| | DETACH | Attachment (worker) | empty, after which no new call comes |
| | COMPUTE | see wire/tensors.py (coordinator) | |
| | STANDING | Standing (coordinator, a notice) | |
| | EXPRESS | empty (worker) | an invitation (net/express_door.py), or empty |
| pubsub topic | | signed DemandTable (hub) | |

It does not know who may send what: that is for roles/ and decide/. Lists of slices are spelled as runs (wire/columns);
peers and models are spelled once in a message, in the order of their first use, and numbered from there on.
What a sender lists beyond a bound (addresses, proven peers, rows of a table) is left out by `to_bytes`, the last first:
a record that is cut still says something, one that is refused says nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from kvasir_node.base.errors import Misbehaved, RejectReason, UsageError
from kvasir_node.base.ids import ModelId, PeerId, SliceId
from kvasir_node.decide.demand import Wanted
from kvasir_node.wire.codec import Fields, decode, encode
from kvasir_node.wire.columns import read_slices, spell_slices
from kvasir_node.wire.lists import (
    LEASE_GROUPS_MAX,
    MEMORY_MAX,
    NEWS_GROUPS_MAX,
    NEWS_SLICES_MAX,
    SLICES_MAX,
    LeaseCount,
    TableRow,
    check_numbered,
    numbered,
    of_first_models,
    read_leases,
    read_pairs,
    read_rows,
    read_wants,
    spell_leases,
    spell_pairs,
    spell_rows,
    spell_wants,
)
from kvasir_node.wire.readers import (
    ADDRESSES_MAX,
    COUNT_MAX,
    NAME_CHARS_MAX,
    bad,
    cut_addresses,
    no_repeats,
    read_address,
    read_bytes,
    read_dtype,
    read_integer,
    read_model,
    read_number,
    read_peer,
    read_row,
    read_slice,
    read_text,
)

MARKET_PROTOCOL = "/kvasir/market/1.0.0"
EXPERTS_PROTOCOL = "/kvasir/experts/1.0.0"
BLOCKS_PROTOCOL = "/kvasir/blocks/1.0.0"
MESSAGE_BYTES_MAX = 1 << 20
GRANTS_MAX = 4  # two roles, under two secrets while one replaces the other
TABLE_BYTES_MAX = 60_000  # under gossipsub's 64 KiB
RENEWALS_MAX = 256  # leases in one message; a worker with more sends several
REFUSED_MAX = 256  # told in one record of demand, those that came last
ROUND_TRIPS_MAX = 64  # told in one poll
NEAR_RTT_S = 0.005  # of what a coordinator calls near when it has measured nothing better: one local network
_CLOCK_MAX = 1e11  # seconds since 1970
_SECONDS_MAX = 86_400
_SEQUENCE_MAX = 1 << 62


class MarketMethod(IntEnum):
    REPORT = 1
    POLL = 2
    RENEW = 3
    RELEASE = 4
    TELL = 5


class ExpertsMethod(IntEnum):
    ATTACH = 1
    DETACH = 2
    COMPUTE = 3
    STANDING = 4
    EXPRESS = 5


@dataclass(frozen=True, slots=True)
class DemandRecord:
    """What one coordinator wants, with the load that justifies it. A newer (epoch, sequence) replaces an older one.

    `epoch` is the coordinator's start (ms since 1970), so a restarted one goes on from above.
    """

    epoch: int
    sequence: int
    issued_at: float  # seconds since 1970, the issuer's clock
    ttl_s: float
    model: ModelId
    model_name: str
    dtype: str  # that this coordinator computes experts in, so whoever computes for it does too
    slice_bytes: int  # of the largest slice, in memory in that dtype
    addresses: tuple[str, ...]
    slots: int
    busy: int
    queued: int
    wants: tuple[Wanted, ...]  # ascending by slice
    refused: tuple[PeerId, ...] = ()  # workers that it will not use, as they answered wrong, or not, more than once
    near_rtt_s: float = NEAR_RTT_S  # nearer workers help with a share of every layer, others with whole layers
    kept: tuple[SliceId, ...] = ()  # ascending; those that must not be left to guests (decide/guests)

    def to_bytes(self) -> bytes:
        return encode(
            {
                "epoch": self.epoch,
                "seq": self.sequence,
                "at": float(self.issued_at),
                "ttl": float(self.ttl_s),
                "model": str(self.model),
                "name": self.model_name[:NAME_CHARS_MAX],
                "dtype": self.dtype,
                "bytes": self.slice_bytes,
                "addrs": cut_addresses(self.addresses),
                "slots": self.slots,
                "busy": self.busy,
                "queued": self.queued,
                "near": float(self.near_rtt_s),
                "refused": [str(peer) for peer in self.refused[-REFUSED_MAX:]],
                "kept": spell_slices(self.kept[:SLICES_MAX]),
                **spell_wants(self.wants),
            }
        )

    @classmethod
    def from_bytes(cls, data: bytes | memoryview) -> DemandRecord:
        fields = _read(data, "demand")
        record = cls(
            epoch=fields.integer("epoch", 0, _SEQUENCE_MAX),
            sequence=fields.integer("seq", 0, _SEQUENCE_MAX),
            issued_at=fields.number("at", 0, _CLOCK_MAX),
            ttl_s=fields.number("ttl", 0, _SECONDS_MAX),
            model=read_model(fields.text("model", 64)),
            model_name=fields.text("name", NAME_CHARS_MAX),
            dtype=read_dtype(fields.text("dtype", 16)),
            slice_bytes=fields.integer("bytes", 0, MEMORY_MAX),
            addresses=fields.items("addrs", ADDRESSES_MAX, read_address),
            slots=fields.integer("slots", 0, COUNT_MAX),
            busy=fields.integer("busy", 0, COUNT_MAX),
            queued=fields.integer("queued", 0, COUNT_MAX),
            near_rtt_s=fields.number("near", 0, _SECONDS_MAX),
            refused=fields.items("refused", REFUSED_MAX, read_peer),
            kept=read_slices(fields.binary("kept", 32 * SLICES_MAX), SLICES_MAX),
            wants=read_wants(fields),
        )
        fields.end()
        no_repeats("refused peer", record.refused)
        return record


@dataclass(frozen=True, slots=True)
class Poll:
    """An idle worker asks. `have` lists slices whose blocks are on its disk; `busy` those it holds a lease on;
    `round_trips` (s) the coordinators that it is connected to. All ascend."""

    memory_bytes: int
    have: tuple[tuple[ModelId, SliceId], ...]
    busy: tuple[tuple[ModelId, SliceId], ...]
    round_trips: tuple[tuple[PeerId, float], ...] = ()

    def to_bytes(self) -> bytes:
        return encode(
            {
                "memory": self.memory_bytes,
                "have": spell_pairs(self.have),
                "busy": spell_pairs(self.busy),
                "rtts": [[str(peer), float(rtt_s)] for peer, rtt_s in sorted(self.round_trips)[:ROUND_TRIPS_MAX]],
            }
        )

    @classmethod
    def from_bytes(cls, data: bytes | memoryview) -> Poll:
        fields = _read(data, "poll")
        memory = fields.integer("memory", 0, MEMORY_MAX)
        have, busy = read_pairs(fields, "have"), read_pairs(fields, "busy")
        poll = cls(memory, have, busy, fields.items("rtts", ROUND_TRIPS_MAX, _round_trip))
        fields.end()
        if list(poll.round_trips) != sorted(dict(poll.round_trips).items()):
            raise Misbehaved(RejectReason.BAD_MESSAGE, "round trips are listed once for each peer, in ascending order")
        return poll


@dataclass(frozen=True, slots=True)
class Offer:
    """A lease on one slice: what to hold, whom to serve and where both can be reached."""

    lease: str
    model: ModelId
    dtype: str
    slice: SliceId
    coordinator: PeerId
    addresses: tuple[str, ...]
    ttl_s: float

    def to_bytes(self) -> bytes:
        return encode(
            {
                "lease": self.lease,
                "model": str(self.model),
                "dtype": self.dtype,
                "slice": str(self.slice),
                "peer": str(self.coordinator),
                "addrs": cut_addresses(self.addresses),
                "ttl": float(self.ttl_s),
            }
        )


@dataclass(frozen=True, slots=True)
class NoOffer:
    """Nothing fits now; ask again no sooner than `retry_after_s`."""

    retry_after_s: float

    def to_bytes(self) -> bytes:
        return encode({"retry": float(self.retry_after_s)})


def read_poll_answer(data: bytes | memoryview) -> Offer | NoOffer:
    fields = _read(data, "offer")
    if fields.has("retry"):
        answer: Offer | NoOffer = NoOffer(fields.number("retry", 0, _SECONDS_MAX))
    else:
        answer = Offer(
            lease=fields.text("lease", 64),
            model=read_model(fields.text("model", 64)),
            dtype=read_dtype(fields.text("dtype", 16)),
            slice=read_slice(fields.text("slice", 32)),
            coordinator=read_peer(fields.text("peer", 64)),
            addresses=fields.items("addrs", ADDRESSES_MAX, read_address),
            ttl_s=fields.number("ttl", 0, _SECONDS_MAX),
        )
    fields.end()
    return answer


@dataclass(frozen=True, slots=True)
class Renewal:
    """A worker keeps (or releases) a lease. It repeats what the lease is about, so that a hub which restarted,
    or another hub of the swarm, can take it over."""

    lease: str
    model: ModelId
    slice: SliceId
    coordinator: PeerId
    serving: bool  # proven and connected
    progress: int  # grows while the worker gets anywhere (bytes fetched, steps done)


@dataclass(frozen=True, slots=True)
class Renewals:
    """The leases of one worker at one hub travel together: 64 of them cost one stream, as one does."""

    leases: tuple[Renewal, ...]

    def to_bytes(self) -> bytes:
        """Raises UsageError beyond RENEWALS_MAX: a lease that is left out would end."""
        if len(self.leases) > RENEWALS_MAX:
            raise UsageError(f"{len(self.leases)} leases in one message; at most {RENEWALS_MAX}")
        models, of_model = numbered(lease.model for lease in self.leases)
        peers, of_peer = numbered(lease.coordinator for lease in self.leases)
        rows = [
            [lease.lease, model, peer, str(lease.slice), lease.serving, lease.progress]
            for lease, model, peer in zip(self.leases, of_model, of_peer, strict=True)
        ]
        return encode({"models": list(models), "peers": list(peers), "leases": rows})

    @classmethod
    def from_bytes(cls, data: bytes | memoryview) -> Renewals:
        fields = _read(data, "renewals")
        models = fields.items("models", RENEWALS_MAX, read_model)
        peers = fields.items("peers", RENEWALS_MAX, read_peer)
        rows = fields.items("leases", RENEWALS_MAX, lambda item: read_row(item, 6, "a lease with what it is about"))
        fields.end()
        check_numbered("model", models, [row[1] for row in rows])
        check_numbered("peer", peers, [row[2] for row in rows])
        leases = tuple(_renewal(row, models, peers) for row in rows)
        no_repeats("lease", [lease.lease for lease in leases])
        return cls(leases)


@dataclass(frozen=True, slots=True)
class LeaseVerdict:
    """What a hub says to one renewal; `ttl_s` 0 = the lease has ended, and `reason` says why."""

    ttl_s: float
    reason: str


@dataclass(frozen=True, slots=True)
class Verdicts:
    """The answer to Renewals, one for each and in their order."""

    verdicts: tuple[LeaseVerdict, ...]

    def to_bytes(self) -> bytes:
        return encode({"verdicts": [[float(verdict.ttl_s), verdict.reason] for verdict in self.verdicts]})

    @classmethod
    def from_bytes(cls, data: bytes | memoryview) -> Verdicts:
        fields = _read(data, "verdicts")
        verdicts = cls(fields.items("verdicts", RENEWALS_MAX, _verdict))
        fields.end()
        return verdicts


@dataclass(frozen=True, slots=True)
class HubNews:
    """One hub tells another on which slices its number of leases that are not proven has changed, or, with `is_all`,
    all of them."""

    epoch: int  # its start, as in its tables
    is_all: bool
    leases: tuple[LeaseCount, ...]

    def to_bytes(self) -> bytes:
        leases = spell_leases(self.leases, NEWS_GROUPS_MAX, NEWS_SLICES_MAX)
        return encode({"epoch": self.epoch, "all": self.is_all, "leases": leases})

    @classmethod
    def from_bytes(cls, data: bytes | memoryview) -> HubNews:
        fields = _read(data, "news")
        epoch, is_all = fields.integer("epoch", 0, _SEQUENCE_MAX), fields.boolean("all")
        news = cls(epoch, is_all, read_leases(fields, "leases", NEWS_GROUPS_MAX, NEWS_SLICES_MAX))
        fields.end()
        return news


@dataclass(frozen=True, slots=True)
class HubGreeting:
    """The answer to HubNews: when the answering hub began, so that one which has restarted is told all again."""

    epoch: int

    def to_bytes(self) -> bytes:
        return encode({"epoch": self.epoch})

    @classmethod
    def from_bytes(cls, data: bytes | memoryview) -> HubGreeting:
        fields = _read(data, "greeting")
        greeting = cls(fields.integer("epoch", 0, _SEQUENCE_MAX))
        fields.end()
        return greeting


@dataclass(frozen=True, slots=True)
class Attachment:
    """A worker says which slices of a model it has loaded, and in which dtype (ATTACH), or will leave (DETACH)."""

    model: ModelId
    dtype: str
    slices: tuple[SliceId, ...]

    def to_bytes(self) -> bytes:
        return encode({"model": str(self.model), "dtype": self.dtype, "slices": [str(s) for s in self.slices]})

    @classmethod
    def from_bytes(cls, data: bytes | memoryview) -> Attachment:
        fields = _read(data, "attachment")
        model, dtype = read_model(fields.text("model", 64)), read_dtype(fields.text("dtype", 16))
        attachment = cls(model, dtype, fields.items("slices", SLICES_MAX, read_slice))
        fields.end()
        return attachment


@dataclass(frozen=True, slots=True)
class Standing:
    """A coordinator tells a worker how it sees one of its slices (a ledger state)."""

    slice: SliceId
    state: str

    def to_bytes(self) -> bytes:
        return encode({"slice": str(self.slice), "state": self.state})

    @classmethod
    def from_bytes(cls, data: bytes | memoryview) -> Standing:
        fields = _read(data, "standing")
        standing = cls(read_slice(fields.text("slice", 32)), fields.text("state", 16))
        fields.end()
        return standing


@dataclass(frozen=True, slots=True)
class DemandTable:
    """A hub's merged demand as it gossips it; the newest (epoch, sequence) of a hub counts, until its TTL."""

    epoch: int
    sequence: int
    issued_at: float
    ttl_s: float
    addresses: tuple[str, ...]  # of the hub
    rows: tuple[TableRow, ...]  # ascending by model and slice
    slice_bytes: Mapping[ModelId, int] = field(default_factory=dict[ModelId, int])  # of one slice in memory, at least
    idle: int = 0  # nodes that poll this hub and hold nothing: who polls at once with them should take its time
    leases: tuple[LeaseCount, ...] = ()  # granted or renewed by this hub, not proven: other hubs count them too

    def to_bytes(self) -> bytes:
        """At most TABLE_BYTES_MAX: rows that do not fit are left out, the last first."""
        rows = of_first_models(self.rows)
        spelled = self._spelled(rows)
        if len(spelled) <= TABLE_BYTES_MAX:
            return spelled
        fits, too_many = 0, len(rows)
        while too_many - fits > 1:
            tried = (fits + too_many) // 2
            fits, too_many = (tried, too_many) if len(self._spelled(rows[:tried])) <= TABLE_BYTES_MAX else (fits, tried)
        return self._spelled(rows[:fits])

    def _spelled(self, rows: Sequence[TableRow]) -> bytes:
        return encode(
            {
                "epoch": self.epoch,
                "seq": self.sequence,
                "at": float(self.issued_at),
                "ttl": float(self.ttl_s),
                "addrs": cut_addresses(self.addresses),
                "idle": self.idle,
                "models": spell_rows(rows, self.slice_bytes),
                "leases": spell_leases(self.leases, LEASE_GROUPS_MAX, SLICES_MAX),
            }
        )

    @classmethod
    def from_bytes(cls, data: bytes | memoryview) -> DemandTable:
        fields = Fields(decode(data, max_bytes=TABLE_BYTES_MAX, what="table"), "table")
        epoch = fields.integer("epoch", 0, _SEQUENCE_MAX)
        sequence = fields.integer("seq", 0, _SEQUENCE_MAX)
        issued_at = fields.number("at", 0, _CLOCK_MAX)
        ttl_s = fields.number("ttl", 0, _SECONDS_MAX)
        addresses = fields.items("addrs", ADDRESSES_MAX, read_address)
        idle = fields.integer("idle", 0, COUNT_MAX)
        rows, slice_bytes = read_rows(fields, "models")
        leases = read_leases(fields, "leases", LEASE_GROUPS_MAX, SLICES_MAX)
        fields.end()
        return cls(epoch, sequence, issued_at, ttl_s, addresses, rows, slice_bytes, idle, leases)


@dataclass(frozen=True, slots=True)
class About:
    """What a peer says of itself under the membership challenge."""

    name: str
    version: str
    roles: tuple[str, ...]
    addresses: tuple[str, ...]
    grants: tuple[tuple[str, bytes], ...] = ()  # role, and the proof that this peer may take it (wire/swarm_keys)

    def to_bytes(self) -> bytes:
        name, addresses = self.name[:NAME_CHARS_MAX], cut_addresses(self.addresses)
        fields = {"name": name, "version": self.version, "roles": list(self.roles), "addrs": addresses}
        return encode({**fields, "grants": [[role, grant] for role, grant in self.grants]})

    @classmethod
    def from_bytes(cls, data: bytes | memoryview) -> About:
        fields = _read(data, "about")
        about = cls(
            name=fields.text("name", NAME_CHARS_MAX),
            version=fields.text("version", 32),
            roles=fields.items("roles", 3, lambda item: read_text(item, 16)),
            addresses=fields.items("addrs", ADDRESSES_MAX, read_address),
            grants=fields.items("grants", GRANTS_MAX, _grant),
        )
        fields.end()
        return about


def _grant(value: Any) -> tuple[str, bytes]:
    role, grant = read_row(value, 2, "a role and its grant")
    return read_text(role, 16), read_bytes(grant)


def _read(data: bytes | memoryview, what: str) -> Fields:
    return Fields(decode(data, max_bytes=MESSAGE_BYTES_MAX, what=what), what)


def _round_trip(value: Any) -> tuple[PeerId, float]:
    peer, rtt_s = read_row(value, 2, "a peer and its round trip")
    return read_peer(peer), read_number(rtt_s, _SECONDS_MAX)


def _renewal(row: Sequence[Any], models: Sequence[ModelId], peers: Sequence[PeerId]) -> Renewal:
    if type(row[4]) is not bool:
        raise bad("true or false", row[4])
    return Renewal(
        lease=read_text(row[0], 64),
        model=models[int(row[1])],
        slice=read_slice(row[3]),
        coordinator=peers[int(row[2])],
        serving=row[4],
        progress=read_integer(row[5], _SEQUENCE_MAX),
    )


def _verdict(value: Any) -> LeaseVerdict:
    ttl_s, reason = read_row(value, 2, "a time to live and a reason")
    return LeaseVerdict(read_number(ttl_s, _SECONDS_MAX), read_text(reason, 200))
