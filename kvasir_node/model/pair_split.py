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
from kvasir_node.model.kernels.library import kernels

PAIR_BYTES = 12  # weight, row and expert
_SplitNumbers = ctypes.c_int64 * len(SPLIT_NUMBERS)
_JoinNumbers = ctypes.c_int64 * len(JOIN_NUMBERS)


@dataclass(frozen=True, slots=True)
class Part:
    """What one machine computes. `body`: weights [P] float32, rows [P] and experts [P] int32, values [R, D], as bytes
    one after the other. `numbers` int64 has `used` and `row_pairs` at these places: they are seldom looked at but by
    the kernel, and each view of a tensor takes as long as the kernel takes for all of a part.
    """

    machine: int
    pairs: int
    activated: int  # different experts
    rows: int
    body: torch.Tensor  # uint8
    numbers: torch.Tensor
    used_place: int
    row_pairs_place: int

    @property
    def used(self) -> torch.Tensor:
        """[R] int64: which of the T rows, ascending."""
        return self.numbers[self.used_place : self.used_place + self.rows]

    @property
    def row_pairs(self) -> torch.Tensor:
        """[R] int64: how many pairs each of them has."""
        return self.numbers[self.row_pairs_place : self.row_pairs_place + self.rows]


@dataclass(frozen=True, slots=True)
class Split:
    """Our own pairs [P] int64, int64, float32 and how many different experts they want; the parts of others."""

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

    @property
    def machines(self) -> int:
        return 1 + len(self.dealing.peers)


class PairSplitter:
    """Splits rows that travel as `dtype`, float32 or bfloat16. It keeps nothing between calls."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        known = kernels()
        self._split, self._join = known.get("split"), known.get("join")

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
        narrows = rows.dtype is torch.float32 and self._dtype is torch.bfloat16
        framed = rows if narrows else rows.to(self._dtype)
        row_bytes = framed.shape[1] * self._dtype.itemsize
        if self._split is None or rows.device.type != "cpu" or row_bytes % 4:
            return self._by_torch(table, allowed, rows.to(self._dtype), chosen, weights)
        return self._by_kernel(table, allowed, framed, chosen, weights, narrows)

    def _by_kernel(
        self,
        table: DealTable,
        allowed: Sequence[bool],
        rows: torch.Tensor,
        chosen: torch.Tensor,
        weights: torch.Tensor,
        narrows: bool,
    ) -> Split:
        assert self._split is not None
        rows, chosen = rows.contiguous(), chosen.contiguous()
        weights = weights.to(torch.float32).contiguous()
        (count, each), width, machines = chosen.shape, rows.shape[1], table.machines
        experts, able_each = table.able.shape
        row_bytes = width * self._dtype.itemsize
        room_bytes = PAIR_BYTES * count * each + row_bytes * count
        bodies = [torch.empty(room_bytes, dtype=torch.uint8) for _ in range(machines - 1)]
        own_weights = torch.empty(count * each)
        # One piece of memory for counts, rows used, their pairs, frames, who is allowed, load, four numbers of each
        # expert, and our own pairs, in this order.
        own_place = machines * (2 * count + 6) + 4 * experts
        kept = torch.empty(own_place + 2 * count * each, dtype=torch.int64)
        counts_address = kept.data_ptr()
        used_address = counts_address + 8 * 3 * machines
        pairs_address = used_address + 8 * machines * count
        frames_address = pairs_address + 8 * machines * count
        allowed_address = frames_address + 8 * machines
        load_address = allowed_address + 8 * machines
        where_address = load_address + 8 * machines
        own_address = counts_address + 8 * own_place
        (ctypes.c_int64 * machines).from_address(allowed_address)[:] = allowed
        frames = (ctypes.c_int64 * machines).from_address(frames_address)
        for number, body in enumerate(bodies, start=1):
            frames[number] = body.data_ptr()
        numbers = _SplitNumbers(
            chosen.data_ptr(), weights.data_ptr(), count, each, table.able_address, able_each, machines, experts,
            allowed_address, table.prices_address, rows.data_ptr(),
            width if narrows or self._dtype is torch.float32 else width // 2, narrows, frames_address,
            own_address, own_address + 8 * count * each, own_weights.data_ptr(),
            counts_address, used_address, pairs_address,
            where_address, where_address + 8 * experts, where_address + 16 * experts, load_address,
            where_address + 24 * experts,
        )  # fmt: skip
        self._split(numbers, None)
        found = (ctypes.c_int64 * (3 * machines)).from_address(counts_address)[:]
        parts = [
            Part(
                number,
                found[number],
                found[2 * machines + number],
                found[machines + number],
                body[: PAIR_BYTES * found[number] + row_bytes * found[machines + number]],
                kept,
                3 * machines + number * count,
                (3 + count) * machines + number * count,
            )
            for number, body in enumerate(bodies, start=1)
            if found[number]
        ]
        pairs, experts_place = found[0], own_place + count * each
        own_rows, own_experts = kept[own_place : own_place + pairs], kept[experts_place : experts_place + pairs]
        return Split(own_rows, own_experts, own_weights[:pairs], found[2 * machines], parts)

    def _by_torch(
        self,
        table: DealTable,
        allowed: Sequence[bool],
        rows: torch.Tensor,
        chosen: torch.Tensor,
        weights: torch.Tensor,
    ) -> Split:
        wanted = torch.bincount(chosen.reshape(-1), minlength=table.able.shape[0]).tolist()
        where = torch.tensor(deal(table.dealing, wanted, allowed), device=chosen.device)
        machine_of = where[chosen]  # [T, K]
        own = self._pairs(machine_of == 0, chosen, weights)
        parts: list[Part] = []
        for number in range(1, table.machines):
            pair_row, pair_expert, pair_weight = self._pairs(machine_of == number, chosen, weights)
            if pair_row.shape[0]:
                used, compact, row_pairs = torch.unique_consecutive(pair_row, return_inverse=True, return_counts=True)
                arrays = [pair_weight, compact.to(torch.int32), pair_expert.to(torch.int32), rows[used]]
                body = torch.cat([each.cpu().contiguous().view(torch.uint8).reshape(-1) for each in arrays])
                activated = int(pair_expert.unique().shape[0])
                pairs, count = pair_row.shape[0], used.shape[0]
                kept = torch.cat([used, row_pairs]).cpu()
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
        narrow = sums.dtype is torch.bfloat16
        kind = sums.dtype in (torch.float32, torch.bfloat16)
        direct = kind and totals.device.type == "cpu" and sums.is_contiguous() and totals.is_contiguous()
        if self._join is None or not direct or (narrow and sums.shape[1] % 2):
            if not bool(torch.isfinite(sums).all()):
                return False
            totals.index_add_(0, part.used.to(totals.device), sums.to(totals.device, torch.float32))
            done[part.used] += part.row_pairs
            return True
        numbers_address = part.numbers.data_ptr()
        numbers = _JoinNumbers(
            sums.data_ptr(), part.rows, sums.shape[1], narrow,
            numbers_address + 8 * part.used_place, numbers_address + 8 * part.row_pairs_place,
            totals.data_ptr(), done.data_ptr(),
        )  # fmt: skip
        return self._join(numbers, None) == 0
