// Content for the worker: the manifest of a model, and the experts of one slice, in the store and pinned there.
import { concat } from '../base/bytes.js'
import { DataError } from '../base/errors.js'
import { type Cid, type PeerId, type SliceId, expertsOf, sliceText } from '../base/ids.js'
import { type BlobRef, type Manifest, decodeBlobNode, decodeLayerNode, decodeManifest, isNode } from '../model/manifest.js'
import { type DownloadTools, fetchBlocks, readBlock } from './download.js'

/** A slice whose blocks are in the store. */
export interface FetchedSlice { readonly manifest: Manifest, readonly experts: ReadonlyMap<number, BlobRef> }

export interface FetchOptions {
  readonly providers: readonly PeerId[]
  readonly owner: string // that pins the blocks, until `store.unpin`
  readonly signal: AbortSignal
  readonly progress: (bytes: number, bytesInAll: number) => void
}

/** Rejects with Unreachable, CapacityError, or DataError when the model has no such slice or cannot be computed here. */
export async function fetchSlice (tools: DownloadTools, model: Cid, slice: SliceId, options: FetchOptions): Promise<FetchedSlice> {
  const manifest = decodeManifest(await fetchBlock(tools, model, options))
  const node = manifest.layerNodes.get(slice.layer)
  if (node === undefined || slice.last >= manifest.expertsPerLayer) throw new DataError(`model ${manifest.name} has no slice ${sliceText(slice)}`)
  const blobs = decodeLayerNode(await fetchBlock(tools, node, options), manifest, slice.layer)
  const experts = new Map(expertsOf(slice).map(index => [index, blobs[index]!]))
  const nodes = [...experts.values()].filter(isNode)
  await fetchMany(tools, nodes.map(blob => blob.cid), options, () => {})
  const blocks = (await Promise.all([...experts.values()].map(async blob => await blocksOf(tools, blob)))).flat()
  const bytesInAll = [...experts.values()].reduce((sum, blob) => sum + blob.size, 0)
  let fetched = 0
  await fetchMany(tools, blocks, options, bytes => { options.progress(fetched += bytes, bytesInAll) })
  tools.tally.reused += Math.max(0, bytesInAll - fetched)
  return { manifest, experts }
}

async function fetchMany (tools: DownloadTools, cids: readonly Cid[], options: FetchOptions, progress: (bytes: number) => void): Promise<void> {
  tools.store.pin(options.owner, cids)
  await fetchBlocks(tools, options.providers, cids, options.signal, progress)
}

async function fetchBlock (tools: DownloadTools, cid: Cid, options: FetchOptions): Promise<Uint8Array> {
  await fetchMany(tools, [cid], options, () => {})
  return await readBlock(tools, cid)
}

async function blocksOf (tools: DownloadTools, blob: BlobRef): Promise<Cid[]> {
  return isNode(blob) ? decodeBlobNode(await readBlock(tools, blob.cid), blob) : [blob.cid]
}

/** A whole blob in memory of its own, every block verified. Rejects with DataError. */
export async function readBlob (tools: DownloadTools, blob: BlobRef): Promise<Uint8Array> {
  const blocks = await Promise.all((await blocksOf(tools, blob)).map(async cid => await readBlock(tools, cid)))
  const bytes = blocks.reduce((sum, block) => sum + block.length, 0)
  if (bytes !== blob.size) throw new DataError(`blob ${blob.cid} has ${bytes} of the ${blob.size} bytes that were promised`)
  return concat(blocks)
}
