"""Experts that a coordinator neither holds nor has on its disk, brought from the swarm when it must compute one.

That is: when no worker computes it any more, or to check what a worker answers. It does not know who asks nor what for.
They stay in the block store until others need their room; those that somebody waits for are pinned there, so that what
does not fit beside each other is an error and not an endless round.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import trio

from kvasir_node.base.errors import CapacityError, KvasirError, Unreachable
from kvasir_node.base.ids import Cid, ExpertId, PeerId
from kvasir_node.model.manifest import LayerNode, Manifest, decode_layer_node
from kvasir_node.model.missing import ExpertsMissing
from kvasir_node.model.tensor_file import parse_expert_file
from kvasir_node.roles.content import Fetcher, read_blob, read_block
from kvasir_node.wire.blobs import BlobRef, decode_blob_node, is_node
from kvasir_node.wire.tensors import ExpertRequest

logger = logging.getLogger(__name__)

PATIENCE_S = 20.0  # without a single block; workers and other members may come meanwhile
PAUSE_S = 0.5  # after a fetch for which nobody was there
FETCHES_MAX = 4  # at once
COMING_MAX = 4096  # experts that are being fetched or wait for that


@dataclass(slots=True, eq=False)
class _Coming:
    """One expert on its way."""

    over: trio.Event = field(default_factory=trio.Event)
    error: KvasirError | None = None


class MissingExperts:
    """Made on the trio loop whose network it uses, and run there; `read`, `has` and `want` are for any thread."""

    def __init__(self, fetcher: Fetcher, manifest: Manifest, providers: Callable[[], Sequence[PeerId]]) -> None:
        self._fetcher = fetcher
        self._manifest = manifest
        self._providers = providers
        self._loop = trio.lowlevel.current_trio_token()
        self._nursery: trio.Nursery | None = None
        self._fetches = trio.CapacityLimiter(FETCHES_MAX)
        self._coming: dict[ExpertId, _Coming] = {}
        self._layers: dict[int, LayerNode] = {}  # those that were needed so far, as the next one
        self._children: dict[Cid, tuple[Cid, ...]] = {}  # blocks of an expert's blob, by its node

    async def run(self, *, task_status: Any = trio.TASK_STATUS_IGNORED) -> None:
        """Fetches what is asked for, until cancelled."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            task_status.started()
            try:
                await trio.sleep_forever()
            finally:
                self._nursery = None

    # Any thread -----------------------------------------------------------------------------------------------

    def has(self, expert: ExpertId) -> bool:
        """Whether all its blocks are in the store. Looks at the disk."""
        layer = self._layers.get(expert.layer)
        return layer is not None and all(map(self._fetcher.store.has, self._blocks(layer.experts[expert.index])))

    def read(self, expert: ExpertId) -> Mapping[str, torch.Tensor] | None:
        """Its tensors, None when it is not (any more) in the store. Raises DataError for one that is not an expert."""
        if not self.has(expert):
            return None
        data = read_blob(self._fetcher.store, self._layers[expert.layer].experts[expert.index])
        return parse_expert_file(data, self._manifest.expert_parts(expert.layer))

    def want(self, layer: int, experts: Collection[int]) -> None:
        """Begins to fetch experts that will be needed; returns at once, whatever comes of it."""
        wanted = [ExpertId(layer, index) for index in experts]
        try:
            self._loop.run_sync_soon(self._begin_unasked, wanted)
        except trio.RunFinishedError:
            logger.debug("the node has ended; nothing is fetched any more")

    def _begin_unasked(self, wanted: Sequence[ExpertId]) -> None:
        try:
            self._begin(wanted)
        except CapacityError as error:
            logger.debug("%s", error)

    def patient(self, compute: Callable[[ExpertRequest], torch.Tensor]) -> Callable[[ExpertRequest], torch.Tensor]:
        """The same, but in a thread that may wait for the network: what is missing is brought, once."""

        def computed(request: ExpertRequest) -> torch.Tensor:
            try:
                return compute(request)
            except ExpertsMissing as missing:
                owner = f"a check of layer {missing.layer}, {id(request)}"
                trio.from_thread.run(self.bring, owner, missing.layer, missing.experts, trio_token=self._loop)
                try:
                    return compute(request)
                finally:
                    trio.from_thread.run_sync(self.let_go, owner, trio_token=self._loop)

        return computed

    # The trio loop --------------------------------------------------------------------------------------------

    async def bring(self, owner: str, layer: int, experts: Collection[int]) -> None:
        """Returns when the experts are in the store, pinned for `owner` until it lets go.

        Raises CapacityError when they do not come for PATIENCE_S, or do not fit. Cancel-safety: what is on its way
        still comes; the caller lets go.
        """
        wanted = [ExpertId(layer, index) for index in experts]
        for coming in self._begin(wanted):
            await coming.over.wait()
            if coming.error is not None:
                shown = ", ".join(str(expert.index) for expert in wanted[:5])
                raise CapacityError(
                    f"experts {shown} of layer {layer} are not on this machine, no worker computes them, and they "
                    f"could not be fetched: {coming.error}; start a worker, or hold more with coordinator.hold"
                ) from coming.error
        await self._fetcher.run_blocking(self._pin, owner, wanted)

    def let_go(self, owner: str) -> None:
        """What was brought for this owner may make room for others."""
        self._fetcher.store.unpin(_pin_name(owner))

    def _begin(self, wanted: Sequence[ExpertId]) -> list[_Coming]:
        """Those on their way from now on, one for each of `wanted`. Nothing is begun while `run` does not."""
        if self._nursery is None:
            raise CapacityError("this node is stopping, so missing experts are not fetched any more")
        new = [expert for expert in dict.fromkeys(wanted) if expert not in self._coming]
        if len(self._coming) + len(new) > COMING_MAX:
            raise CapacityError(f"{len(self._coming)} missing experts are being fetched already; try again later")
        for expert in new:
            self._coming[expert] = _Coming()
        if new:
            self._nursery.start_soon(self._fetch, new)
        return [self._coming[expert] for expert in wanted]

    async def _fetch(self, experts: Sequence[ExpertId]) -> None:
        """Brings experts of one layer and tells whoever waits. Raises nothing."""
        error: KvasirError | None = CapacityError("this node is stopping")
        owner = f"fetch of {experts[0]}"
        try:
            async with self._fetches:
                await self._bring_patiently(owner, experts)
            error = None
        except KvasirError as raised:
            error = raised
            logger.warning("missing experts of layer %d could not be fetched: %s", experts[0].layer, error)
        finally:
            for expert in experts:
                coming = self._coming.pop(expert)
                coming.error = error
                coming.over.set()
            self.let_go(owner)

    async def _bring_patiently(self, owner: str, experts: Sequence[ExpertId]) -> None:
        tally = self._fetcher.tally
        seen, give_up_at = tally.bytes_fetched, trio.current_time() + PATIENCE_S
        while True:
            try:
                with trio.fail_at(give_up_at):
                    return await self._bring(owner, experts)
            except (Unreachable, trio.TooSlowError) as error:
                if tally.bytes_fetched != seen:
                    seen, give_up_at = tally.bytes_fetched, trio.current_time() + PATIENCE_S
                elif trio.current_time() + PAUSE_S >= give_up_at:
                    raise Unreachable(str(error) or f"nothing came within {PATIENCE_S:g} s") from error
            await trio.sleep(PAUSE_S)

    async def _bring(self, owner: str, experts: Sequence[ExpertId]) -> None:
        layer, providers = experts[0].layer, self._providers()
        if layer not in self._layers:
            cid = self._manifest.layer_nodes[layer]
            await self._fetcher.fetch_blocks(providers, [cid])
            self._layers[layer] = await self._fetcher.run_blocking(self._read_layer, layer)
        blobs = [self._layers[layer].experts[expert.index] for expert in experts]
        await self._fetcher.fetch_pinned(_pin_name(owner), providers, blobs)

    def _read_layer(self, layer: int) -> LayerNode:
        data = read_block(self._fetcher.store, self._manifest.layer_nodes[layer])
        return decode_layer_node(data, self._manifest, layer)

    def _pin(self, owner: str, experts: Sequence[ExpertId]) -> None:
        for expert in experts:
            blob = self._layers[expert.layer].experts[expert.index]
            self._fetcher.store.pin(_pin_name(owner), self._blocks(blob))

    def _blocks(self, blob: BlobRef) -> tuple[Cid, ...]:
        """The blob's blocks as far as they are known: while its node is not here, the node alone."""
        if not is_node(blob.cid):
            return (blob.cid,)
        if blob.cid not in self._children:
            data = self._fetcher.store.get(blob.cid)
            if data is None:
                return (blob.cid,)
            self._children[blob.cid] = decode_blob_node(data).blocks
        return (blob.cid, *self._children[blob.cid])


def _pin_name(owner: str) -> str:
    return f"missing experts, {owner}"
