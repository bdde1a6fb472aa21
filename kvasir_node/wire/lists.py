"""How the lists inside control messages are spelled: wants, pairs of model and slice, rows of tables.

It does not know the messages around them. Slices are spelled as runs (wire/columns); a peer or a model is spelled once
in a message, and what is said of it refers to it by its number, in the order of first use.
What a sender lists beyond a bound is left out, the last first.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from typing import Any, TypeVar

from kvasir_node.base.errors import Misbehaved, RejectReason
from kvasir_node.base.ids import ModelId, PeerId, SliceId
from kvasir_node.decide.demand import Wanted
from kvasir_node.wire.codec import Fields
from kvasir_node.wire.columns import read_numbers, read_slices, spell_numbers, spell_slices
from kvasir_node.wire.readers import COUNT_MAX, no_repeats, read_bytes, read_integer, read_model, read_peer, read_row

T = TypeVar("T")
SLICES_MAX = 4096
PROVEN_MAX = 256  # peers listed for one slice ...
COPIES_MAX = 65_536  # ... and for all slices together
PEERS_MAX = 4096  # named in one message
TABLE_MODELS_MAX = 64  # of one demand table
LEASE_GROUPS_MAX = 64  # coordinators and their models of which one table tells leases ...
NEWS_GROUPS_MAX = 1024  # ... and of which one hub tells another
NEWS_SLICES_MAX = 65_536
MEMORY_MAX = 1 << 50  # bytes

LeaseCount = tuple[PeerId, ModelId, SliceId, int]
"""Leases of one hub on a slice that one coordinator wants, which are not proven yet."""


@dataclass(frozen=True, slots=True)
class TableRow:
    """One slice in a hub's demand table: copies wanted, proven, and leased by this hub but not proven yet."""

    model: ModelId
    slice: SliceId
    want: int
    proven: int
    leased: int

    @property
    def open(self) -> int:
        return max(0, self.want - self.proven - self.leased)


# Numbers in the order of first use --------------------------------------------------------------------------------


def numbered(values: Iterable[T]) -> tuple[list[T], list[int]]:
    """The distinct values in the order of first use, and the number of each."""
    order: dict[T, int] = {}
    numbers = [order.setdefault(value, len(order)) for value in values]
    return list(order), numbers


def check_numbered(what: str, values: Sequence[object], numbers: Iterable[Any]) -> None:
    """Raises Misbehaved when the numbers are not what `numbered` gives for these values."""
    used = 0
    for number in numbers:
        read_integer(number, min(used, len(values) - 1))
        used = max(used, number + 1)
    if used != len(values):
        raise Misbehaved(RejectReason.BAD_MESSAGE, f"a {what} is named that nothing refers to")
    no_repeats(what, values)


# Wants --------------------------------------------------------------------------------------------------------------


def spell_wants(wants: Sequence[Wanted]) -> dict[str, Any]:
    kept = sorted(wants, key=lambda wanted: wanted.slice)[:SLICES_MAX]
    order: dict[PeerId, int] = {}
    counts: list[int] = []
    holders: list[int] = []
    for wanted in kept:
        listed = wanted.proven[: min(PROVEN_MAX, COPIES_MAX - len(holders))]
        named = [order.setdefault(peer, len(order)) for peer in listed if peer in order or len(order) < PEERS_MAX]
        counts.append(len(named))
        holders += named
    return {
        "slices": spell_slices([wanted.slice for wanted in kept]),
        "wants": spell_numbers(wanted.want for wanted in kept),
        "peers": [str(peer) for peer in order],
        "copies": spell_numbers(counts),
        "proven": spell_numbers(holders),
    }


def read_wants(fields: Fields) -> tuple[Wanted, ...]:
    """Ascending by slice; each peer's id is decoded once."""
    slices = read_slices(fields.binary("slices", 32 * SLICES_MAX), SLICES_MAX)
    wants = read_numbers(fields.binary("wants", 16 * SLICES_MAX), len(slices), COUNT_MAX)
    peers = fields.items("peers", PEERS_MAX, read_peer)
    counts = read_numbers(fields.binary("copies", 16 * SLICES_MAX), len(slices), PROVEN_MAX)
    if sum(counts) > COPIES_MAX:
        raise Misbehaved(RejectReason.BAD_MESSAGE, f"{sum(counts)} proven copies; at most {COPIES_MAX} are read")
    numbers = read_numbers(fields.binary("proven", 8 * COPIES_MAX), sum(counts), PEERS_MAX)
    check_numbered("proven peer", peers, numbers)
    holders = iter(numbers)
    found: list[Wanted] = []
    for part, want, count in zip(slices, wants, counts, strict=True):
        proven = tuple(peers[next(holders)] for _ in range(count))
        no_repeats("proven peer", proven)
        found.append(Wanted(part, want, proven))
    return tuple(found)


# Pairs of model and slice -------------------------------------------------------------------------------------------


def spell_pairs(pairs: Iterable[tuple[ModelId, SliceId]]) -> list[list[Any]]:
    kept = sorted(set(pairs))[:SLICES_MAX]
    by_model = groupby(kept, key=lambda pair: pair[0])
    return [[str(model), spell_slices([part for _, part in group])] for model, group in by_model]


def read_pairs(fields: Fields, name: str) -> tuple[tuple[ModelId, SliceId], ...]:
    """Ascending."""
    rows = fields.items(name, SLICES_MAX, lambda item: read_row(item, 2, "a model and its slices"))
    found: list[tuple[ModelId, SliceId]] = []
    for row in rows:
        model = read_model(row[0])
        parts = read_slices(read_bytes(row[1]), SLICES_MAX - len(found))
        if not parts or (found and model <= found[-1][0]):
            raise Misbehaved(RejectReason.BAD_MESSAGE, "models that have slices are listed in ascending order")
        found += ((model, part) for part in parts)
    return tuple(found)


# Rows of a demand table ---------------------------------------------------------------------------------------------


def spell_rows(rows: Iterable[TableRow], slice_bytes: Mapping[ModelId, int]) -> list[list[Any]]:
    """For each model: its id, bytes of a slice, slices, and the columns want, proven, leased."""
    by_model = groupby(sorted(rows, key=lambda row: (row.model, row.slice)), key=lambda row: row.model)
    spelled: list[list[Any]] = []
    for model, group in by_model:
        found = list(group)
        columns = ([row.want for row in found], [row.proven for row in found], [row.leased for row in found])
        slices = spell_slices([row.slice for row in found])
        spelled.append([str(model), slice_bytes.get(model, 0), slices, *map(spell_numbers, columns)])
    return spelled


def read_rows(fields: Fields, name: str) -> tuple[tuple[TableRow, ...], dict[ModelId, int]]:
    """The rows, ascending by model and slice, and the bytes of a slice of each model."""
    what = "a model, the bytes of a slice, its slices and three columns"
    rows: list[TableRow] = []
    slice_bytes: dict[ModelId, int] = {}
    for item in fields.items(name, TABLE_MODELS_MAX, lambda item: read_row(item, 6, what)):
        model = read_model(item[0])
        slices = read_slices(read_bytes(item[2]), SLICES_MAX - len(rows))
        if not slices or (rows and model <= rows[-1].model):
            raise Misbehaved(RejectReason.BAD_MESSAGE, "models that have rows are listed in ascending order")
        columns = [read_numbers(read_bytes(column), len(slices), COUNT_MAX) for column in item[3:]]
        rows += (TableRow(model, *row) for row in zip(slices, *columns, strict=True))
        slice_bytes[model] = read_integer(item[1], MEMORY_MAX)
    return tuple(rows), slice_bytes


def spell_leases(leases: Iterable[LeaseCount], groups_max: int, slices_max: int) -> list[list[Any]]:
    """For each coordinator and model: both, the slices, and how many leases each has."""
    by_owner = groupby(sorted(leases)[:slices_max], key=lambda lease: lease[:2])
    spelled: list[list[Any]] = []
    for (peer, model), group in islice(by_owner, groups_max):
        found = list(group)
        slices = spell_slices([part for _, _, part, _ in found])
        spelled.append([str(peer), str(model), slices, spell_numbers(count for *_, count in found)])
    return spelled


def read_leases(fields: Fields, name: str, groups_max: int, slices_max: int) -> tuple[LeaseCount, ...]:
    """Ascending by coordinator, model and slice."""
    what = "a coordinator, its model, slices, and a column of leases"
    found: list[LeaseCount] = []
    for item in fields.items(name, groups_max, lambda item: read_row(item, 4, what)):
        peer, model = read_peer(item[0]), read_model(item[1])
        slices = read_slices(read_bytes(item[2]), slices_max - len(found))
        if not slices or (found and (peer, model) <= found[-1][:2]):
            raise Misbehaved(RejectReason.BAD_MESSAGE, "coordinators with leases are listed in ascending order")
        counts = read_numbers(read_bytes(item[3]), len(slices), COUNT_MAX)
        found += ((peer, model, part, count) for part, count in zip(slices, counts, strict=True))
    return tuple(found)


def of_first_models(rows: Sequence[TableRow]) -> list[TableRow]:
    """As many of the first rows as a table may have, of as many models as it can name."""
    kept: list[TableRow] = []
    models: set[ModelId] = set()
    for row in rows[:SLICES_MAX]:
        models.add(row.model)
        if len(models) > TABLE_MODELS_MAX:
            break
        kept.append(row)
    return kept
