"""Experts that a coordinator neither holds nor has on its disk, fetched when it must compute one after all.

That is: to check a worker's trial, or when no worker answered. It does not know who asks. Its threads wait for the
network, for at most FETCH_TIMEOUT_S.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import trio

from kvasir_node.base.errors import CapacityError, DataError, PeerError
from kvasir_node.base.ids import ExpertId, PeerId
from kvasir_node.model.manifest import LayerNode, Manifest, decode_layer_node
from kvasir_node.model.tensor_file import parse_expert_file
from kvasir_node.roles.content import Fetcher, read_blob, read_block

FETCH_TIMEOUT_S = 20.0


class MissingExperts:
    """A `ReadExpert`. Made on the trio loop whose network it uses; called by any other thread."""

    def __init__(self, fetcher: Fetcher, manifest: Manifest, providers: Callable[[], Sequence[PeerId]]) -> None:
        self._fetcher = fetcher
        self._manifest = manifest
        self._providers = providers
        self._loop = trio.lowlevel.current_trio_token()

    def __call__(self, expert: ExpertId) -> Mapping[str, torch.Tensor]:
        try:
            return trio.from_thread.run(self._fetch, expert, trio_token=self._loop)
        except (PeerError, DataError, trio.RunFinishedError, trio.Cancelled) as error:
            raise CapacityError(
                f"expert {expert.index} of layer {expert.layer} is not on this machine, no worker computes it, and it "
                f"could not be fetched: {error}"
            ) from error

    async def _fetch(self, expert: ExpertId) -> Mapping[str, torch.Tensor]:
        """The blocks stay in the store, for the next time, until others need their room."""
        with trio.move_on_after(FETCH_TIMEOUT_S):
            providers = self._providers()
            await self._fetcher.fetch_blocks(providers, [self._manifest.layer_nodes[expert.layer]])
            node = await self._fetcher.run_blocking(self._read_node, expert.layer)
            blob = node.experts[expert.index]
            await self._fetcher.fetch_blobs(providers, [blob])
            data = await self._fetcher.run_blocking(read_blob, self._fetcher.store, blob)
            return parse_expert_file(data, self._manifest.expert_parts(expert.layer))
        raise PeerError(f"it did not come within {FETCH_TIMEOUT_S:g} s")

    def _read_node(self, layer: int) -> LayerNode:
        data = read_block(self._fetcher.store, self._manifest.layer_nodes[layer])
        return decode_layer_node(data, self._manifest, layer)
