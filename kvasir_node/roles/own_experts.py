"""What a coordinator computes itself: the experts it holds, and any other for a while, from this machine's disk.

It does not know workers, routes, heat or requests for text. Any thread may compute. Experts that are held stay until
`give_up`. Of the others, those that lie in the checkpoint just as they are computed are mapped: the system's page cache
is their room. The rest are borrowed, that is read and decoded, and make room for each other, the longest unused first,
so that a model larger than this machine's memory never fills it. A thread that computes waits only for what it needs.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import torch

from kvasir_node.base.errors import DataError, KvasirError
from kvasir_node.base.ids import ExpertId
from kvasir_node.model.checkpoint import Checkpoint
from kvasir_node.model.experts import ExpertShard
from kvasir_node.model.mapped_files import MappedFiles
from kvasir_node.model.missing import ExpertsMissing
from kvasir_node.model.tensor_file import read_tensor
from kvasir_node.roles.quiescence import Quiescence
from kvasir_node.wire.tensors import ExpertRequest

logger = logging.getLogger(__name__)


class Fetched(Protocol):
    """Experts that the checkpoint lacks and the block store may have. Any thread may call."""

    def has(self, expert: ExpertId) -> bool: ...

    def want(self, layer: int, experts: Collection[int]) -> None:
        """Begins to bring some; returns at once."""
        ...

    def read(self, expert: ExpertId) -> Mapping[str, torch.Tensor] | None:
        """Its tensors, None when it is not on this machine; blocks on the disk, never on the network."""
        ...


@dataclass(slots=True, eq=False)
class _Loan:
    """A borrowed expert. `users` compute with it now; an `error` once it is settled = it is not in memory."""

    users: int = 0
    is_settled: threading.Event = field(default_factory=threading.Event)
    error: KvasirError | None = None


class OwnExperts:
    """`held` says, by layer, what `shard` holds; at most `borrowed_bytes_max` come on top, or one expert for each
    thread that computes, and what is mapped.

    `held` is changed by `keep` and `give_up`, a layer at a time, each layer's set as a whole; others may look on.
    `moves` = whether that ever happens. Shapes as in `model.experts`: rows [R,D], pair_row, pair_expert,
    pair_weight [P] -> [R,D] float32.
    """

    def __init__(
        self,
        shard: ExpertShard,
        checkpoint: Checkpoint,
        held: dict[int, frozenset[int]],
        borrowed_bytes_max: int,
        fetched: Fetched | None = None,
        *,
        moves: bool = False,
    ) -> None:
        self._shard = shard
        self._checkpoint = checkpoint
        self._fetched = fetched
        self._held = held
        # Nothing can be missing there, so the hot path does not even ask.
        count = -1 if moves else checkpoint.experts_per_layer
        self._complete = frozenset(layer for layer, own in held.items() if len(own) == count)
        self._room = max(1, borrowed_bytes_max // shard.expert_bytes)
        self._loans: OrderedDict[ExpertId, _Loan] = OrderedDict()  # longest unused first
        self._lending = threading.Lock()  # of `_loans` and what else is in the shard but not held; held for moments
        self._files = MappedFiles()
        self._mapped: dict[int, set[int]] = {layer: set() for layer in held}  # in the shard for good, held or not
        self._leaving: ExpertId | None = None  # not held any more, but somebody may still compute with it
        self._computing = Quiescence()
        self.loads = 0

    @property
    def device(self) -> torch.device:
        return self._shard.device

    def held(self, layer: int) -> frozenset[int]:
        """Experts of a layer that are in memory to stay."""
        return self._held[layer]

    @property
    def hidden_size(self) -> int:
        return self._shard.hidden_size

    @property
    def borrowed(self) -> int:
        """Experts that are in memory for a while."""
        return len(self._loans)

    @property
    def mapped(self) -> int:
        """Experts that are not held and were computed where they lie in the checkpoint."""
        return sum(len(indices - self._held[layer]) for layer, indices in self._mapped.items())

    def compute(
        self,
        layer: int,
        rows: torch.Tensor,
        pair_row: torch.Tensor,
        pair_expert: torch.Tensor,
        pair_weight: torch.Tensor,
    ) -> torch.Tensor:
        """`ExpertShard.compute` for any expert of the model, all tensors on `device`.

        Raises ExpertsMissing, before anything is computed, when some are not on this machine; DataError when one
        cannot be read.
        """
        if layer in self._complete:
            return self._shard.compute(layer, rows, pair_row, pair_expert, pair_weight)
        needed = set(pair_expert.tolist())
        with self._computing.use():  # what is held now stays until this ends
            held = self._held[layer]
            missing = sorted(index for index in needed - held - self._mapped[layer] if not self._map(layer, index))
            if not missing:
                return self._shard.compute(layer, rows, pair_row, pair_expert, pair_weight)
            self._require(layer, missing, pair_row, pair_expert)
            own = sorted(needed.difference(missing))
            return self._compute_in_groups(layer, missing, own, rows, pair_row, pair_expert, pair_weight)

    def sums(self, request: ExpertRequest) -> torch.Tensor:
        """What a worker should have answered to a request; [R,D] float32 on the CPU, as requests are."""
        there = self.device
        return self.compute(
            request.layer,
            request.rows.to(there),
            request.pair_row.to(there, torch.int64),
            request.pair_expert.to(there, torch.int64),
            request.pair_weight.to(there),
        ).cpu()

    def want(self, layer: int, experts: Collection[int]) -> None:
        """Lets experts that are not on this machine come, for later; returns at once, whatever comes of it."""
        if self._fetched is not None:
            self._fetched.want(layer, experts)

    def keep(self, expert: ExpertId) -> None:
        """Reads an expert, unless it is borrowed, and holds it from now on. Raises DataError. Blocks on the disk."""
        with self._lent([expert]):
            self._held[expert.layer] |= {expert.index}
            self._computing.settle()  # whoever has not seen that it is held could borrow it again
            with self._lending:
                del self._loans[expert]

    def give_up(self, expert: ExpertId) -> None:
        """Holds an expert no longer; waits for those who compute with it. One thread at a time keeps and gives up."""
        self._leaving = expert
        self._held[expert.layer] -= {expert.index}
        self._computing.settle()
        with self._lending:  # somebody who found it gone may have begun to borrow it
            self._leaving = None
            if expert not in self._loans:
                self._take_out(expert)

    def _map(self, layer: int, index: int) -> bool:
        """Whether an expert that was not held a moment ago can be computed now without being borrowed."""
        expert = ExpertId(layer, index)
        with self._lending:
            if index in self._held[layer] or index in self._mapped[layer]:
                return True
            return expert not in self._loans and self._view(expert)

    def _view(self, expert: ExpertId) -> bool:
        """Puts an expert into the shard as it lies in the checkpoint, for good, if that can be."""
        parts = self._checkpoint.experts.get(expert)
        if parts is None or not self._shard.can_view({name: tensor.spec for name, tensor in parts.items()}):
            return False
        try:
            self._shard.add_views(expert, {name: self._files.tensor(tensor) for name, tensor in parts.items()})
        except DataError:  # then it is read, and whoever reads it says what is wrong
            return False
        self._mapped[expert.layer].add(expert.index)
        return True

    def _take_out(self, expert: ExpertId) -> None:
        """Frees the memory of an expert that is neither held nor lent; one that is mapped is computed as before."""
        if expert.index in self._mapped[expert.layer]:
            self._view(expert)
        else:
            self._shard.remove(expert)

    def _require(self, layer: int, missing: Sequence[int], pair_row: torch.Tensor, pair_expert: torch.Tensor) -> None:
        """Raises ExpertsMissing unless all can be read from this disk, if they are not in memory."""
        absent = [index for index in missing if not self._is_here(ExpertId(layer, index))]
        if absent:
            blocked = torch.isin(pair_expert, torch.tensor(absent, device=pair_expert.device))
            raise ExpertsMissing(layer, absent, sorted(set(pair_row[blocked].tolist())))

    def _is_here(self, expert: ExpertId) -> bool:
        if expert in self._checkpoint.experts or expert in self._loans:
            return True
        return self._fetched is not None and self._fetched.has(expert)

    def _compute_in_groups(
        self,
        layer: int,
        missing: Sequence[int],
        own: Collection[int],
        rows: torch.Tensor,
        pair_row: torch.Tensor,
        pair_expert: torch.Tensor,
        pair_weight: torch.Tensor,
    ) -> torch.Tensor:
        """As many missing experts at once as there is room for, those held with the first."""
        total = torch.zeros(rows.shape, dtype=torch.float32, device=rows.device)
        everything = len(missing)
        while missing:
            with self._lent([ExpertId(layer, index) for index in missing]) as count:
                if count == everything:
                    return self._shard.compute(layer, rows, pair_row, pair_expert, pair_weight)
                group = torch.tensor([*missing[:count], *own], device=rows.device)
                mine = torch.isin(pair_expert, group)
                total += self._shard.compute(layer, rows, pair_row[mine], pair_expert[mine], pair_weight[mine])
            missing, own = missing[count:], ()
        return total

    @contextmanager
    def _lent(self, wanted: Sequence[ExpertId]) -> Iterator[int]:
        """Borrows the first of `wanted`, as many as there is room for and at least one; says how many.

        They are in the shard until the block ends. Raises DataError when one cannot be read.
        """
        with self._lending:
            loans, to_read = self._take_places(wanted)
        try:
            while to_read:
                self._read_in(to_read[0], loans[to_read[0]])
                del to_read[0]
            for loan in loans.values():
                loan.is_settled.wait()
                if loan.error is not None:
                    raise loan.error
            yield len(loans)
        finally:
            for expert in to_read:  # a bug or a lack of memory stopped us; somebody may wait for these
                self._fail(expert, loans[expert], DataError(f"reading expert {expert} was given up; try again"))
            with self._lending:
                for loan in loans.values():
                    loan.users -= 1
                self._make_room(self._room)

    def _take_places(self, wanted: Sequence[ExpertId]) -> tuple[dict[ExpertId, _Loan], list[ExpertId]]:
        """The loans of the first of `wanted`, used once more, and which of them are to be read by this thread."""
        loans: dict[ExpertId, _Loan] = {}
        to_read: list[ExpertId] = []
        for expert in wanted:
            loan = self._loans.get(expert)
            if loan is None:
                if not self._make_room(self._room - 1) and loans:
                    break
                loan = self._loans[expert] = _Loan()
                to_read.append(expert)
            self._loans.move_to_end(expert)
            loan.users += 1
            loans[expert] = loan
        return loans, to_read

    def _make_room(self, most: int) -> bool:
        """Lets go of what was unused longest, until `most` are left; False when more are in use."""
        while len(self._loans) > most:
            unused = next((expert for expert, loan in self._loans.items() if not loan.users), None)
            if unused is None:
                return False
            del self._loans[unused]
            if unused != self._leaving:
                self._take_out(unused)
        return True

    def _read_in(self, expert: ExpertId, loan: _Loan) -> None:
        """An error is for whoever waits for this loan; others that this thread has to read are read all the same."""
        try:
            self._shard.add(expert, self._read(expert))
        except KvasirError as error:
            self._fail(expert, loan, error)
        loan.is_settled.set()
        if self.loads == 0:
            logger.info("expert %d of layer %d is not held: it is read from disk", expert.index, expert.layer)
        self.loads += 1

    def _fail(self, expert: ExpertId, loan: _Loan, error: KvasirError) -> None:
        with self._lending:
            del self._loans[expert]
        loan.error = error
        loan.is_settled.set()

    def _read(self, expert: ExpertId) -> Mapping[str, torch.Tensor]:
        parts = self._checkpoint.experts.get(expert)
        if parts is not None:
            return {part: read_tensor(tensor) for part, tensor in parts.items()}
        tensors = None if self._fetched is None else self._fetched.read(expert)
        if tensors is None:
            raise DataError(f"expert {expert.index} of layer {expert.layer} went from this disk; try again")
        return tensors
