"""A whole model from the swarm to this disk, by its id alone: what makes an empty machine a coordinator.

It does not know how a folder is laid out (roles/assembly.py) nor which block to ask of whom (decide/fetching.py). It
brings one file's blocks after the other, from whoever is a member by then, and goes on where it was stopped.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path

import trio

from kvasir_node.base.errors import DataError, NotFoundError, Unreachable
from kvasir_node.base.ids import DAG_CBOR_CODEC, Cid, ModelId, PeerId, codec_of, parse_cid
from kvasir_node.model.folder import read_experts, read_note
from kvasir_node.model.manifest import LayerNode, Manifest, decode_layer_node, decode_manifest
from kvasir_node.roles.assembly import Assembly, Part
from kvasir_node.roles.content import Fetcher, read_block
from kvasir_node.roles.loading import held_experts
from kvasir_node.store.blocks import BlockStore
from kvasir_node.store.catalog import Catalog, CatalogEntry
from kvasir_node.wire.blobs import is_node

logger = logging.getLogger(__name__)

PATIENCE_S = 60.0  # without a single block; members may come and go meanwhile
PAUSE_S = 0.25  # after a failed try; doubles ...
PAUSE_MAX_S = 5.0  # ... up to this
PROGRESS_INTERVAL_S = 2.0
Providers = Callable[[], Sequence[PeerId]]
Progress = Callable[[str, int, int], None]
"""(name of the model, bytes here, bytes in all)."""


def model_to_pull(store: BlockStore, catalog: Catalog, models_dir: Path, ref: str, hold: str) -> ModelId | None:
    """The id of a model that must be fetched (or mended, or completed) before it can be served.

    None = it is not one of ours to fetch: `Catalog.open` knows it, or says why not. Blocks on the disk.
    """
    entry = catalog.find(ref)
    if entry is None:
        return _model_id(ref)
    if entry.path is not None:
        if entry.path != models_dir / entry.model:
            return None
        if catalog.map_if_fresh(entry) and _is_complete(store, entry.path, entry.model, hold):
            return None
    return entry.model


def _model_id(ref: str) -> ModelId | None:
    with suppress(DataError):
        if codec_of(parse_cid(ref)) == DAG_CBOR_CODEC:
            return ModelId(Cid(ref))
    return None


def _is_complete(store: BlockStore, folder: Path, model: ModelId, hold: str) -> bool:
    """Whether a folder that was fetched has all experts that are to be held."""
    with suppress(DataError):
        manifest = decode_manifest(read_block(store, Cid(model)))
        note = read_note(folder)
        if note is not None:
            here = read_experts([(layer, folder / name) for layer, name in note.layer_files.items()])
            return here.keys() >= set(held_experts(manifest, hold))
    return False


class Puller:
    """`providers` are asked anew for every file."""

    def __init__(self, fetcher: Fetcher, catalog: Catalog, models_dir: Path, providers: Providers) -> None:
        self._fetcher = fetcher
        self._catalog = catalog
        self._models_dir = models_dir
        self._providers = providers
        self._pulling = trio.Lock()  # two at once could write one folder

    async def pull_ref(self, ref: str, hold: str, progress: Progress | None = None) -> CatalogEntry:
        """`pull` by name or id; a checkpoint that was added from elsewhere is not touched.

        Raises NotFoundError for a ref that is neither, and as `pull`.
        """
        entry = await self._fetcher.run_blocking(self._catalog.find, ref)
        if entry is not None and entry.path not in (None, self._models_dir / entry.model):
            return entry
        model = entry.model if entry is not None else _model_id(ref)
        if model is None:
            raise NotFoundError(
                f"no model {ref!r} here, and it is no id to fetch one by; hf:ORG/NAME is one of the Hugging Face hub",
                param="model",
            )
        return await self.pull(model, hold, progress)

    async def pull(self, model: ModelId, hold: str, progress: Progress | None = None) -> CatalogEntry:
        """Fetches what is missing of a model and enters it in the catalog; `hold` as in `coordinator.hold`.

        Raises Unreachable when nothing came for PATIENCE_S, DataError when the content is not what a model is, or one
        that this version cannot serve, CapacityError when there is no room. Cancel-safety: a later call goes on.
        """
        owner = f"pull {model}"
        try:
            async with self._pulling:
                return await self._pull(model, hold, owner, progress or _LoggedProgress())
        finally:
            self._fetcher.store.unpin(owner)
            self._fetcher.store.unpin(_file_owner(owner))

    async def _pull(self, model: ModelId, hold: str, owner: str, progress: Progress) -> CatalogEntry:
        manifest, layers = await self._describe(model, hold, owner)
        run, store = self._fetcher.run_blocking, self._fetcher.store
        assembly = Assembly(store, self._models_dir, manifest, layers, held_experts(manifest, hold), hold)
        await run(assembly.begin)
        parts = assembly.parts()
        total = assembly.total_bytes
        done = total - sum(part.nbytes for part in parts)
        progress(manifest.name, done, total)
        for part in parts:
            await self._bring_part(part, _file_owner(owner), _shifted(progress, manifest.name, done, total))
            done += part.nbytes
        path, content = await run(assembly.finish)
        return await run(self._catalog.add_fetched, content, path)

    async def _describe(self, model: ModelId, hold: str, owner: str) -> tuple[Manifest, dict[int, LayerNode]]:
        """The manifest, the layers' nodes, and (in the store, pinned) the nodes of all blobs that are to come."""
        manifest = decode_manifest(await self._bring_blocks(owner, [Cid(model)]))
        await self._bring_blocks(owner, list(manifest.layer_nodes.values()))
        layers = await self._fetcher.run_blocking(self._read_layers, manifest)
        blobs = [manifest.config, manifest.trunk, *manifest.files.values()]
        blobs += [layers[expert.layer].experts[expert.index] for expert in held_experts(manifest, hold)]
        await self._bring_blocks(owner, [blob.cid for blob in blobs if is_node(blob.cid)])
        return manifest, layers

    def _read_layers(self, manifest: Manifest) -> dict[int, LayerNode]:
        store = self._fetcher.store
        return {
            layer: decode_layer_node(read_block(store, cid), manifest, layer)
            for layer, cid in manifest.layer_nodes.items()
        }

    async def _bring_blocks(self, owner: str, cids: list[Cid]) -> bytes:
        """Returns the first one, or nothing for none."""
        await self._fetcher.run_blocking(self._fetcher.store.pin, owner, cids)
        await self._patiently(lambda providers: self._fetcher.fetch_blocks(providers, cids))
        return await self._fetcher.run_blocking(read_block, self._fetcher.store, cids[0]) if cids else b""

    async def _bring_part(self, part: Part, owner: str, progress: Callable[[int, int], None]) -> None:
        """Twice when a block of it turns out to be damaged on this disk, which is found out when it is read."""
        for is_last in (False, True):
            await self._patiently(lambda providers: self._fetcher.fetch_pinned(owner, providers, part.blobs, progress))
            try:
                await self._fetcher.run_blocking(part.write)
                break
            except DataError as error:
                if is_last:
                    raise
                logger.warning("writing %s: %s; fetching what is missing", part.name, error)
        self._fetcher.store.unpin(owner)

    async def _patiently(self, fetch: Callable[[Sequence[PeerId]], Awaitable[None]]) -> None:
        """Tries again for as long as anything comes, and PATIENCE_S more."""
        tally, pause_s = self._fetcher.tally, PAUSE_S
        seen, give_up_at = tally.bytes_fetched, trio.current_time() + PATIENCE_S
        while True:
            try:
                return await fetch(self._providers())
            except Unreachable as error:
                if tally.bytes_fetched != seen:
                    seen, pause_s = tally.bytes_fetched, PAUSE_S
                    give_up_at = trio.current_time() + PATIENCE_S
                elif trio.current_time() >= give_up_at:
                    raise Unreachable(
                        f"{error}; join a swarm with --join TICKET in which somebody has the model, then start again: "
                        "what came so far is kept"
                    ) from error
                logger.info("%s; trying again in %.2f s", error, pause_s)
            await trio.sleep(pause_s)
            pause_s = min(2 * pause_s, PAUSE_MAX_S)


def _file_owner(owner: str) -> str:
    return f"{owner}, a file"


def _shifted(progress: Progress, name: str, before: int, total: int) -> Callable[[int, int], None]:
    return lambda done, _: progress(name, before + done, total)


class _LoggedProgress:
    """One line in the log every few seconds, and one at the end."""

    def __init__(self) -> None:
        self._said_at = float("-inf")

    def __call__(self, name: str, done: int, total: int) -> None:
        now = trio.current_time()
        if now - self._said_at >= PROGRESS_INTERVAL_S or done >= total:
            self._said_at = now
            logger.info("fetching %s: %d of %d MB (%d %%)", name, done >> 20, total >> 20, 100 * done // max(1, total))
