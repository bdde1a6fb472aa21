"""Every control message of the swarm: its fields, bounds and bytes.

| protocol | method | request | answer |
|---|---|---|---|
| /kvasir/market/1.0.0 | REPORT | signed DemandRecord | empty |
| | POLL | Poll | Offer, or NoOffer |
| | RENEW | Renewal | LeaseVerdict |
| | RELEASE | Renewal | empty |
| /kvasir/experts/1.0.0 | ATTACH | Attachment (worker) | empty |
| | DETACH | Attachment (worker) | empty, after which no new call comes |
| | COMPUTE | see wire/tensors.py (coordinator) | |
| | STANDING | Standing (coordinator, a notice) | |
| | EXPRESS | empty (worker) | an invitation (net/express_door.py), or empty |
| pubsub topic | | signed DemandTable (hub) | |

It does not know who may send what: that is for roles/ and decide/.
What a sender lists beyond a bound (addresses, proven peers, rows of a table) is left out by `to_bytes`, the last first:
a record that is cut still says something, one that is refused says nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, cast

from kvasir_node.base.errors import DataError, Misbehaved, RejectReason, UsageError
from kvasir_node.base.ids import ModelId, PeerId, SliceId, parse_cid, parse_slice
from kvasir_node.decide.demand import Wanted
from kvasir_node.wire.codec import Fields, decode, encode, is_plain_text

MARKET_PROTOCOL = "/kvasir/market/1.0.0"
EXPERTS_PROTOCOL = "/kvasir/experts/1.0.0"
BLOCKS_PROTOCOL = "/kvasir/blocks/1.0.0"
MESSAGE_BYTES_MAX = 1 << 20
TABLE_BYTES_MAX = 60_000  # under gossipsub's 64 KiB
ADDRESSES_MAX = 16
SLICES_MAX = 4096
PROVEN_MAX = 256  # peers listed for one slice
TABLE_MODELS_MAX = 64  # of one demand table
DTYPES = ("float32", "bfloat16", "int8")  # that experts are computed in; int8 = of their weights alone
_ADDRESS_CHARS_MAX = 256
_NAME_CHARS_MAX = 128
_COUNT_MAX = 1 << 20
_CLOCK_MAX = 1e11  # seconds since 1970
_SEQUENCE_MAX = 1 << 62
_TABLE_HEADS_BYTES = 4  # the heads of its two lists grow by at most two bytes each


class MarketMethod(IntEnum):
    REPORT = 1
    POLL = 2
    RENEW = 3
    RELEASE = 4


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
    wants: tuple[Wanted, ...]

    def to_bytes(self) -> bytes:
        return encode(
            {
                "epoch": self.epoch,
                "seq": self.sequence,
                "at": float(self.issued_at),
                "ttl": float(self.ttl_s),
                "model": str(self.model),
                "name": self.model_name[:_NAME_CHARS_MAX],
                "dtype": self.dtype,
                "bytes": self.slice_bytes,
                "addrs": _addresses(self.addresses),
                "slots": self.slots,
                "busy": self.busy,
                "queued": self.queued,
                "wants": [[str(w.slice), w.want, [str(p) for p in w.proven[:PROVEN_MAX]]] for w in self.wants],
            }
        )

    @classmethod
    def from_bytes(cls, data: bytes | memoryview) -> DemandRecord:
        fields = _read(data, "demand")
        record = cls(
            epoch=fields.integer("epoch", 0, _SEQUENCE_MAX),
            sequence=fields.integer("seq", 0, _SEQUENCE_MAX),
            issued_at=fields.number("at", 0, _CLOCK_MAX),
            ttl_s=fields.number("ttl", 0, 86_400),
            model=_model(fields.text("model", 64)),
            model_name=fields.text("name", _NAME_CHARS_MAX),
            dtype=_dtype(fields.text("dtype", 16)),
            slice_bytes=fields.integer("bytes", 0, 1 << 50),
            addresses=fields.items("addrs", ADDRESSES_MAX, read_address),
            slots=fields.integer("slots", 0, _COUNT_MAX),
            busy=fields.integer("busy", 0, _COUNT_MAX),
            queued=fields.integer("queued", 0, _COUNT_MAX),
            wants=fields.items("wants", SLICES_MAX, _want),
        )
        fields.end()
        _no_repeats("slice", [wanted.slice for wanted in record.wants])
        return record


@dataclass(frozen=True, slots=True)
class Poll:
    """An idle worker asks. `have` lists slices whose blocks are on its disk; `busy` those it holds a lease on."""

    memory_bytes: int
    have: tuple[tuple[ModelId, SliceId], ...]
    busy: tuple[tuple[ModelId, SliceId], ...]

    def to_bytes(self) -> bytes:
        return encode({"memory": self.memory_bytes, "have": _pairs(self.have), "busy": _pairs(self.busy)})

    @classmethod
    def from_bytes(cls, data: bytes | memoryview) -> Poll:
        fields = _read(data, "poll")
        memory = fields.integer("memory", 0, 1 << 50)
        poll = cls(memory, fields.items("have", SLICES_MAX, _pair), fields.items("busy", SLICES_MAX, _pair))
        fields.end()
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
                "addrs": _addresses(self.addresses),
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
        answer: Offer | NoOffer = NoOffer(fields.number("retry", 0, 86_400))
    else:
        answer = Offer(
            lease=fields.text("lease", 64),
            model=_model(fields.text("model", 64)),
            dtype=_dtype(fields.text("dtype", 16)),
            slice=_slice(fields.text("slice", 32)),
            coordinator=PeerId(fields.text("peer", 64)),
            addresses=fields.items("addrs", ADDRESSES_MAX, read_address),
            ttl_s=fields.number("ttl", 0, 86_400),
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

    def to_bytes(self) -> bytes:
        return encode(
            {
                "lease": self.lease,
                "model": str(self.model),
                "slice": str(self.slice),
                "peer": str(self.coordinator),
                "serving": self.serving,
                "progress": self.progress,
            }
        )

    @classmethod
    def from_bytes(cls, data: bytes | memoryview) -> Renewal:
        fields = _read(data, "renewal")
        renewal = cls(
            lease=fields.text("lease", 64),
            model=_model(fields.text("model", 64)),
            slice=_slice(fields.text("slice", 32)),
            coordinator=PeerId(fields.text("peer", 64)),
            serving=fields.boolean("serving"),
            progress=fields.integer("progress", 0, _SEQUENCE_MAX),
        )
        fields.end()
        return renewal


@dataclass(frozen=True, slots=True)
class LeaseVerdict:
    """The hub's answer to a renewal; `ttl_s` 0 = the lease has ended, and `reason` says why."""

    ttl_s: float
    reason: str

    def to_bytes(self) -> bytes:
        return encode({"ttl": float(self.ttl_s), "reason": self.reason})

    @classmethod
    def from_bytes(cls, data: bytes | memoryview) -> LeaseVerdict:
        fields = _read(data, "verdict")
        verdict = cls(fields.number("ttl", 0, 86_400), fields.text("reason", 200))
        fields.end()
        return verdict


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
        model, dtype = _model(fields.text("model", 64)), _dtype(fields.text("dtype", 16))
        attachment = cls(model, dtype, fields.items("slices", SLICES_MAX, _slice))
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
        standing = cls(_slice(fields.text("slice", 32)), fields.text("state", 16))
        fields.end()
        return standing


@dataclass(frozen=True, slots=True)
class TableRow:
    """One slice in a hub's demand table: copies wanted, proven, and leased but not proven yet."""

    model: ModelId
    slice: SliceId
    want: int
    proven: int
    leased: int

    @property
    def open(self) -> int:
        return max(0, self.want - self.proven - self.leased)


@dataclass(frozen=True, slots=True)
class DemandTable:
    """A hub's merged demand as it gossips it; the newest (epoch, sequence) of a hub counts, until its TTL."""

    epoch: int
    sequence: int
    issued_at: float
    ttl_s: float
    addresses: tuple[str, ...]  # of the hub
    rows: tuple[TableRow, ...]

    def to_bytes(self) -> bytes:
        """At most TABLE_BYTES_MAX: rows that do not fit are left out, the last first."""
        table = {
            "epoch": self.epoch,
            "seq": self.sequence,
            "at": float(self.issued_at),
            "ttl": float(self.ttl_s),
            "addrs": _addresses(self.addresses),
            "models": [],
            "rows": [],
        }
        models, rows = _fitting_rows(self.rows, TABLE_BYTES_MAX - len(encode(table)) - _TABLE_HEADS_BYTES)
        return encode(table | {"models": models, "rows": rows})

    @classmethod
    def from_bytes(cls, data: bytes | memoryview) -> DemandTable:
        fields = Fields(decode(data, max_bytes=TABLE_BYTES_MAX, what="table"), "table")
        epoch = fields.integer("epoch", 0, _SEQUENCE_MAX)
        sequence = fields.integer("seq", 0, _SEQUENCE_MAX)
        issued_at = fields.number("at", 0, _CLOCK_MAX)
        ttl_s = fields.number("ttl", 0, 86_400)
        addresses = fields.items("addrs", ADDRESSES_MAX, read_address)
        models = fields.items("models", TABLE_MODELS_MAX, _model)
        rows = fields.items("rows", SLICES_MAX, lambda item: _row(item, models))
        fields.end()
        return cls(epoch, sequence, issued_at, ttl_s, addresses, rows)


@dataclass(frozen=True, slots=True)
class About:
    """What a peer says of itself under the membership challenge."""

    name: str
    version: str
    roles: tuple[str, ...]
    addresses: tuple[str, ...]

    def to_bytes(self) -> bytes:
        name, addresses = self.name[:_NAME_CHARS_MAX], _addresses(self.addresses)
        return encode({"name": name, "version": self.version, "roles": list(self.roles), "addrs": addresses})

    @classmethod
    def from_bytes(cls, data: bytes | memoryview) -> About:
        fields = _read(data, "about")
        about = cls(
            name=fields.text("name", _NAME_CHARS_MAX),
            version=fields.text("version", 32),
            roles=fields.items("roles", 3, lambda item: _text(item, 16)),
            addresses=fields.items("addrs", ADDRESSES_MAX, read_address),
        )
        fields.end()
        return about


def _read(data: bytes | memoryview, what: str) -> Fields:
    return Fields(decode(data, max_bytes=MESSAGE_BYTES_MAX, what=what), what)


def _bad(expected: str, value: Any) -> Misbehaved:
    return Misbehaved(RejectReason.BAD_MESSAGE, f"expected {expected}; got {repr(value)[:60]}")


def _addresses(addresses: tuple[str, ...]) -> list[str]:
    return list(addresses[:ADDRESSES_MAX])


def _fitting_rows(rows: tuple[TableRow, ...], bytes_max: int) -> tuple[list[str], list[list[Any]]]:
    """The models and rows, as they are spelled, of as many rows as fit, first come first."""
    order: dict[ModelId, int] = {}
    spelled: list[list[Any]] = []
    used = 0
    for row in rows[:SLICES_MAX]:
        index = order.get(row.model, len(order))
        item = [index, str(row.slice), row.want, row.proven, row.leased]
        used += len(encode(item)) + (len(encode(str(row.model))) if index == len(order) else 0)
        if used > bytes_max or index == TABLE_MODELS_MAX:
            break
        order[row.model] = index
        spelled.append(item)
    return [str(model) for model in order], spelled


def _no_repeats(what: str, values: Sequence[object]) -> None:
    if len(set(values)) != len(values):
        raise Misbehaved(RejectReason.BAD_MESSAGE, f"a {what} is listed twice among {len(values)}")


def _text(value: Any, max_chars: int) -> str:
    if not is_plain_text(value, max_chars):
        raise _bad(f"text of at most {max_chars} characters, none a control character", value)
    return value


def read_address(value: Any) -> str:
    text = _text(value, _ADDRESS_CHARS_MAX)
    if not text.startswith("/"):
        raise _bad("a multiaddr", value)
    return text


def _model(value: Any) -> ModelId:
    try:
        return ModelId(parse_cid(_text(value, 64)))
    except DataError as error:
        raise _bad("a model id", value) from error


def _dtype(value: str) -> str:
    if value not in DTYPES:
        raise _bad(f"one of {', '.join(DTYPES)}", value)
    return value


def _slice(value: Any) -> SliceId:
    try:
        return parse_slice(_text(value, 32))
    except UsageError as error:
        raise _bad("a slice", value) from error


def _pair(value: Any) -> tuple[ModelId, SliceId]:
    if type(value) is not list or len(value) != 2:  # pyright: ignore[reportUnknownArgumentType]
        raise _bad("a model and a slice", value)
    return _model(value[0]), _slice(value[1])


def _pairs(values: tuple[tuple[ModelId, SliceId], ...]) -> list[list[str]]:
    return [[str(model), str(part)] for model, part in values]


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= _COUNT_MAX:
        raise _bad("a count", value)
    return value


def _want(value: Any) -> Wanted:
    if type(value) is not list or len(value) != 3:  # pyright: ignore[reportUnknownArgumentType]
        raise _bad("a slice, its want and its proven peers", value)
    part, want, peers = cast("list[Any]", value)
    if type(peers) is not list or len(cast("list[Any]", peers)) > PROVEN_MAX:
        raise _bad(f"a list of at most {PROVEN_MAX} peers", peers)
    proven = tuple(PeerId(_text(peer, 64)) for peer in cast("list[Any]", peers))
    _no_repeats("proven peer", proven)
    return Wanted(_slice(part), _count(want), proven)


def _row(value: Any, models: tuple[ModelId, ...]) -> TableRow:
    if type(value) is not list or len(value) != 5:  # pyright: ignore[reportUnknownArgumentType]
        raise _bad("a row of the demand table", value)
    index = _count(value[0])
    if index >= len(models):
        raise _bad("the index of a model in the table", value[0])
    return TableRow(models[index], _slice(value[1]), _count(value[2]), _count(value[3]), _count(value[4]))
