"""Whether a worker's answer may be used: its shape, and some or all of its rows held against the truth.

It does not know routes, deadlines or what a fault costs (the crew and the ledger). Any computing thread may ask.

With `verifies_all` every row is computed twice before any of it is used: by another worker where one was asked (a
call's twin), else here. Two workers that agree are believed; where they differ our own result says who lied.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace

import torch

from kvasir_node.base.errors import Misbehaved
from kvasir_node.decide.spot_checks import SpotChecks
from kvasir_node.model.missing import ExpertsMissing
from kvasir_node.roles.comparing import agrees, rows_of, wrong_result
from kvasir_node.roles.own_experts import OwnExperts
from kvasir_node.roles.remote_call import RemoteCall
from kvasir_node.wire.tensors import Encoding, ExpertRequest, through_wire


@dataclass(frozen=True, slots=True)
class Verdict:
    """`sums` [R, D] are to be used, in any dtype of the wire; None = the call's rows must be computed here. `fault`:
    why the answer was wrong. `compared` rows were computed here for it."""

    sums: torch.Tensor | None
    fault: Misbehaved | None = None
    compared: int = 0


_NO_ROWS = torch.zeros(0, dtype=torch.int64)


class AnswerChecks:
    def __init__(self, own: OwnExperts, spot_checks: SpotChecks, *, verifies_all: bool) -> None:
        self._own = own
        self._spot_checks = spot_checks
        self.verifies_all = verifies_all
        self._lock = threading.Lock()  # of the spot checks

    def watch(self, call: RemoteCall) -> None:
        """Its worker was caught."""
        with self._lock:
            self._spot_checks.watch(call.peer)

    def prepare(self, call: RemoteCall) -> None:
        """Draws the rows that will be compared and computes them, while the answer is awaited anyway.

        Its worker cannot know them any more: the frame has left.
        """
        call.check = self._draw(call)

    def compares(self, call: RemoteCall) -> bool:
        """Whether something of a call's answer is compared before it is used, as far as that is known."""
        return self.verifies_all or call.check is None or call.check[1] is not None

    def judge(self, call: RemoteCall, sums: torch.Tensor, twin_sums: torch.Tensor | None = None) -> Verdict:
        """`sums` and those of the call's twin are finite and of the right shape."""
        if twin_sums is not None and agrees(sums.float(), twin_sums.float(), call.encoding):
            return Verdict(sums)
        drawn, own = call.check or self._draw(call)
        if own is None:
            return Verdict(None if self.verifies_all else sums)
        compared = own.shape[0]
        if not agrees(sums[drawn].float(), own, call.encoding):
            return Verdict(None, wrong_result(), compared)
        # Where we know all of the truth it is used: a lie within the tolerance gains nothing.
        return Verdict(own if compared == call.part.rows else sums, None, compared)

    def is_right(self, call: RemoteCall, sums: torch.Tensor) -> bool:
        """Whether sums of all of a call's rows are the truth. Raises ExpertsMissing."""
        return agrees(sums.float(), self._own.sums(_as_sent(call)), call.encoding)

    def _draw(self, call: RemoteCall) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The rows that are compared, and our own sums for them; None when there are none to compare.

        That is also when they take experts which are not on this machine: these are fetched, and a later answer is
        compared, because no token should wait to be checked.
        """

        by_row: list[list[int]] = []  # made when the first one is asked for, as most calls have none to compare

        def experts_of(row: int) -> list[int]:
            if not by_row:
                by_row.extend([] for _ in range(call.part.rows))
                for its_row, expert in zip(
                    call.request.pair_row.tolist(), call.request.pair_expert.tolist(), strict=True
                ):
                    by_row[its_row].append(expert)
            return by_row[row]

        rows = call.part.rows
        if self.verifies_all:
            drawn = tuple(range(rows))
        else:
            with self._lock:
                drawn = self._spot_checks.pick(call.peer, call.layer, rows, experts_of)
        if not drawn:
            return _NO_ROWS, None
        picked = torch.tensor(drawn, dtype=torch.int64)
        request = _as_sent(call)
        try:
            return picked, self._own.sums(request if len(drawn) == rows else rows_of(request, picked))
        except ExpertsMissing as missing:
            self._own.want(missing.layer, missing.experts)
            return picked, None


def _as_sent(call: RemoteCall) -> ExpertRequest:
    """The request with its rows as the worker reads them."""
    request = call.request
    if call.encoding is not Encoding.INT8:
        return request
    return replace(request, rows=through_wire(request.rows, call.encoding))
