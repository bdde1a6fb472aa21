"""A layer's pairs, dealt out and cut into one part for each machine, and the sums that come back, added up.

It does not know machines, deadlines or sockets: machines are numbers (0 = here), a part is laid out as the arrays of a
request in `wire.tensors`. A kernel does it where there is one for this processor and the rows are on it, torch
operations elsewhere; both give the same. Who gets what is `decide.dealing.deal`.

Shapes: T rows, K experts chosen for each, D model width, E experts, M machines; R rows and P pairs of one part.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvasir_node.decide.dealing import ABLE_MAX, Dealing, deal
from kvasir_node.model.kernels.abi import JOIN_NUMBERS, SPLIT_NUMBERS
from kvasir_node.model.kernels.library import address_of, kernels

PAIR_BYTES = 12  # weight, row and expert
OWN_VIEWS_MAX = 1024  # of as many different numbers of our own pairs; a decode step has no more
_SplitNumbers = ctypes.c_int64 * len(SPLIT_NUMBERS)
_JoinNumbers = ctypes.c_int64 * len(JOIN_NUMBERS)


@dataclass(frozen=True, slots=True)
class Part:
    """What one machine computes. `body`: weights [P] float32, rows [P] and experts [P] int32, values [R, D], as bytes
    one after the other. `numbers`, of int64, has `used` and `row_pairs` at these places: they are seldom looked at but
    by the kernel, and to make a tensor, or a view of one, takes as long as the kernel takes for all of a part.
    """

    machine: int
    pairs: int
    activated: int  # different experts
    rows: int
    body: memoryview  # of bytes, writable
    numbers: memoryview
    used_place: int
    row_pairs_place: int

    @property
    def used(self) -> torch.Tensor:
        """[R] int64: which of the T rows, ascending."""
        return self._numbers_from(self.used_place)

    @property
    def row_pairs(self) -> torch.Tensor:
        """[R] int64: how many pairs each of them has."""
        return self._numbers_from(self.row_pairs_place)

    def _numbers_from(self, place: int) -> torch.Tensor:
        return torch.frombuffer(self.numbers, dtype=torch.int64, count=self.rows, offset=8 * place)


@dataclass(frozen=True, slots=True)
class Split:
    """Our own pairs [P] int64, int64, float32, which are good until the splitter's next split, and how many different
    experts they want; the parts of others."""

    own_rows: torch.Tensor
    own_experts: torch.Tensor
    own_weights: torch.Tensor
    activated: int
    parts: Sequence[Part]


class DealTable:
    """A `Dealing` as the kernel reads it."""

    def __init__(self, dealing: Dealing, like: DealTable | None = None) -> None:
        """`like`: one of before, of which is taken what is as it was."""
        self.dealing = dealing
        if like is not None and like.dealing.able is dealing.able:
            self.able = like.able
        else:
            width = ABLE_MAX if dealing.has_choice else 1
            self.able = torch.tensor([[*row, *[-1] * (width - len(row))] for row in dealing.able])
        prices = dealing.prices
        self.prices = torch.tensor([prices.fixed_s, prices.expert_s, prices.pair_s], dtype=torch.float32)
        self.able_address, self.prices_address = self.able.data_ptr(), self.prices.data_ptr()
        self.experts, self.able_each = self.able.shape
        self.machines = 1 + len(dealing.peers)


@dataclass(frozen=True, slots=True)
class _Given:
    """A layer's rows [T, D], chosen [T, K] and weights [T, K] as the kernel reads them, where they lie."""

    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    addresses: tuple[int, int, int]
    count: int  # T
    each: int  # K
    row_words: int  # of a row as it lies
    row_bytes: int  # ... as it travels
    narrows: bool

    def are(self, rows: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> bool:
        """Whether these very tensors are meant."""
        own = self.tensors
        return own[0] is rows and own[1] is chosen and own[2] is weights


class _OwnPairs:
    """Room for our own pairs, and views of as many of them as were asked for: each is made once."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._all = torch.empty(most, dtype=torch.int64), torch.empty(most, dtype=torch.int64), torch.empty(most)
        self.addresses = tuple(each.data_ptr() for each in self._all)
        self._views: dict[int, tuple[torch.Tensor, ...]] = {}

    def first(self, pairs: int) -> tuple[torch.Tensor, ...]:
        views = self._views.get(pairs)
        if views is None:
            if len(self._views) >= OWN_VIEWS_MAX:
                self._views.clear()
            views = self._views[pairs] = tuple(each[:pairs] for each in self._all)
        return views


class PairSplitter:
    """Splits rows that travel as `dtype`, float32 or bfloat16. One thread calls: between calls it keeps its room, and
    where the last tensors lie, as all layers of a forward come in the same ones."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        known = kernels()
        self._split, self._join = known.get("split"), known.get("join")
        self._given: _Given | None = None
        self._own = _OwnPairs(0)

    def split(
        self,
        table: DealTable,
        allowed: Sequence[bool],
        rows: torch.Tensor,
        chosen: torch.Tensor,
        weights: torch.Tensor,
    ) -> Split:
        """allowed [M]: whether each machine may be given anything now; rows [T, D]; chosen [T, K] int64;
        weights [T, K]."""
        known = self._given
        if known is None or not known.are(rows, chosen, weights):
            known = self._given = self._look_at(rows, chosen, weights)
        if known is None:
            return self._by_torch(table, allowed, rows.to(self._dtype), chosen, weights)
        return self._by_kernel(table, allowed, known)

    def _look_at(self, rows: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> _Given | None:
        """None where torch has to split."""
        narrows = rows.dtype is torch.float32 and self._dtype is torch.bfloat16
        (count, each), width = chosen.shape, rows.shape[1]
        row_bytes = width * self._dtype.itemsize
        if self._split is None or rows.device.type != "cpu" or row_bytes % 4 or not count:
            return None
        given = (
            (rows if narrows else rows.to(self._dtype)).contiguous(),
            chosen.contiguous(),
            weights.to(torch.float32).contiguous(),
        )
        addresses = given[0].data_ptr(), given[1].data_ptr(), given[2].data_ptr()
        row_words = width if narrows or self._dtype is torch.float32 else width // 2
        return _Given(given, addresses, count, each, row_words, row_bytes, narrows)

    def _by_kernel(self, table: DealTable, allowed: Sequence[bool], given: _Given) -> Split:
        assert self._split is not None
        count, each, row_bytes, machines, experts = (
            given.count,
            given.each,
            given.row_bytes,
            table.machines,
            table.experts,
        )
        if count * each > self._own.most:
            self._own = _OwnPairs(count * each)
        bodies = [bytearray(PAIR_BYTES * count * each + row_bytes * count) for _ in range(machines - 1)]
        # One piece of memory for counts, rows used, their pairs, frames, who is allowed, load and four numbers of each
        # expert, in this order.
        kept = bytearray(8 * (machines * (2 * count + 6) + 4 * experts))
        numbers = memoryview(kept).cast("q")
        frames_place = machines * (2 * count + 3)
        for number, body in enumerate(bodies, start=1):
            numbers[frames_place + number] = address_of(body)
        for number, is_allowed in enumerate(allowed):
            numbers[frames_place + machines + number] = is_allowed
        counts_address = address_of(kept)
        used_address = counts_address + 8 * 3 * machines
        pairs_address = used_address + 8 * machines * count
        frames_address = counts_address + 8 * frames_place
        allowed_address = frames_address + 8 * machines
        load_address = allowed_address + 8 * machines
        where_address = load_address + 8 * machines
        rows_address, chosen_address, weights_address = given.addresses
        own = self._own
        self._split(
            _SplitNumbers(
                chosen_address, weights_address, count, each, table.able_address, table.able_each, machines, experts,
                allowed_address, table.prices_address, rows_address, given.row_words, given.narrows, frames_address,
                *own.addresses, counts_address, used_address, pairs_address,
                where_address, where_address + 8 * experts, where_address + 16 * experts, load_address,
                where_address + 24 * experts,
            ),
            None,
        )  # fmt: skip
        found = numbers[: 3 * machines].tolist()
        parts = [
            Part(
                number,
                found[number],
                found[2 * machines + number],
                found[machines + number],
                memoryview(body)[: PAIR_BYTES * found[number] + row_bytes * found[machines + number]],
                numbers,
                3 * machines + number * count,
                (3 + count) * machines + number * count,
            )
            for number, body in enumerate(bodies, start=1)
            if found[number]
        ]
        own_rows, own_experts, own_weights = own.first(found[0])
        return Split(own_rows, own_experts, own_weights, found[2 * machines], parts)

    def _by_torch(
        self,
        table: DealTable,
        allowed: Sequence[bool],
        rows: torch.Tensor,
        chosen: torch.Tensor,
        weights: torch.Tensor,
    ) -> Split:
        wanted = torch.bincount(chosen.reshape(-1), minlength=table.experts).tolist()
        where = torch.tensor(deal(table.dealing, wanted, allowed), device=chosen.device)
        machine_of = where[chosen]  # [T, K]
        own = self._pairs(machine_of == 0, chosen, weights)
        parts: list[Part] = []
        for number in range(1, table.machines):
            pair_row, pair_expert, pair_weight = self._pairs(machine_of == number, chosen, weights)
            if pair_row.shape[0]:
                used, compact, row_pairs = torch.unique_consecutive(pair_row, return_inverse=True, return_counts=True)
                arrays = [pair_weight, compact.to(torch.int32), pair_expert.to(torch.int32), rows[used]]
                flat = torch.cat([each.cpu().contiguous().view(torch.uint8).reshape(-1) for each in arrays])
                body = flat.numpy().data
                activated = int(pair_expert.unique().shape[0])
                pairs, count = pair_row.shape[0], used.shape[0]
                kept = torch.cat([used, row_pairs]).cpu().numpy().data
                parts.append(Part(number, pairs, activated, count, body, kept, 0, count))
        return Split(*own, int(own[1].unique().shape[0]), parts)

    def _pairs(
        self, mask: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        pair_row, slot = mask.nonzero(as_tuple=True)
        return pair_row, chosen[pair_row, slot], weights[pair_row, slot].to(torch.float32)

    def join(self, sums: torch.Tensor, part: Part, totals: torch.Tensor, done: torch.Tensor) -> bool:
        """Adds a part's sums [R, D] to totals [T, D] float32, and its pairs to done [T] int64 on the CPU.

        False, and nothing is added, when a sum is infinite or NaN.
        """
        if sums.dtype in (torch.float32, torch.bfloat16) and sums.is_contiguous() and sums.device.type == "cpu":
            is_bf16 = sums.dtype is torch.bfloat16
            if self._adds_up(totals, is_bf16):
                return self._join_at(sums.data_ptr(), is_bf16, part, totals, done)
        if not bool(torch.isfinite(sums).all()):
            return False
        totals.index_add_(0, part.used.to(totals.device), sums.to(totals.device, torch.float32))
        done[part.used] += part.row_pairs
        return True

    def join_values(
        self, values: memoryview, dtype: torch.dtype, part: Part, totals: torch.Tensor, done: torch.Tensor
    ) -> bool:
        """As `join`, of sums as they lie in a frame: writable, and at a multiple of four."""
        is_bf16 = dtype is torch.bfloat16
        if self._adds_up(totals, is_bf16):
            return self._join_at(address_of(values), is_bf16, part, totals, done)
        sums = torch.frombuffer(values, dtype=dtype).view(part.rows, totals.shape[1])
        return self.join(sums, part, totals, done)

    def _adds_up(self, totals: torch.Tensor, is_bf16: bool) -> bool:
        """Whether the kernel adds to such totals."""
        is_able = self._join is not None and totals.device.type == "cpu" and totals.is_contiguous()
        return is_able and not (is_bf16 and totals.shape[1] % 2)

    def _join_at(self, sums: int, is_bf16: bool, part: Part, totals: torch.Tensor, done: torch.Tensor) -> bool:
        assert self._join is not None
        numbers = address_of(part.numbers)
        return (
            self._join(
                _JoinNumbers(
                    sums, part.rows, totals.shape[1], is_bf16,
                    numbers + 8 * part.used_place, numbers + 8 * part.row_pairs_place,
                    totals.data_ptr(), done.data_ptr(),
                ),
                None,
            )
            == 0
        )  # fmt: skip
