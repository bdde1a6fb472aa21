"""Keeps the hottest experts in a coordinator's memory, when not all that it should hold fit there.

It does not know which are hot (roles/dispatch.py counts) nor which should stay (decide/residency.py decides). One
expert after the other is read in a thread, so that nothing that computes waits, and a disk is never kept busy.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

import trio

from kvasir_node.base.errors import DataError
from kvasir_node.base.ids import ExpertId
from kvasir_node.decide.residency import Heat, Swap, plan_swaps
from kvasir_node.roles.download import RunBlocking
from kvasir_node.roles.own_experts import OwnExperts

logger = logging.getLogger(__name__)

INTERVAL_S = 2.0
SWAP_BYTES_MAX = 128 << 20  # of experts that are read in one interval, but always one


class Residency:
    """`changed` hears, on the loop, each layer of which other experts are held now."""

    def __init__(
        self,
        own: OwnExperts,
        wanted: frozenset[ExpertId],
        held: Mapping[int, frozenset[int]],
        expert_bytes: int,
        *,
        heat: Callable[[], Heat],
        changed: Callable[[frozenset[int]], None],
        run_blocking: RunBlocking = trio.to_thread.run_sync,
    ) -> None:
        self._own = own
        self._wanted = wanted
        self._held = held
        self._swaps_max = max(1, SWAP_BYTES_MAX // expert_bytes)
        self._heat = heat
        self._changed = changed
        self._run_blocking = run_blocking
        self.swaps = 0

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await trio.sleep(INTERVAL_S)
            for swap in await self._run_blocking(self._plan, self._heat()):
                await self._carry_out(swap)

    def _plan(self, heat: Heat) -> list[Swap]:
        return plan_swaps(wanted=self._wanted, held=self._held, heat=heat, swaps_max=self._swaps_max)

    async def _carry_out(self, swap: Swap) -> None:
        """Room first, so that memory never holds more than it may."""
        await self._run_blocking(self._own.give_up, swap.given_up)
        self._changed(frozenset((swap.given_up.layer,)))
        if await self._keep(swap.taken):
            self.swaps += 1
        else:
            await self._keep(swap.given_up)

    async def _keep(self, expert: ExpertId) -> bool:
        """False for one that cannot be read, which is not wanted any more."""
        try:
            await self._run_blocking(self._own.keep, expert)
        except DataError as error:
            logger.warning("expert %d of layer %d is not held: %s", expert.index, expert.layer, error)
            self._wanted -= {expert}
            return False
        self._changed(frozenset((expert.layer,)))
        return True
