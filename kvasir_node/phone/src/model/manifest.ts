// A model by content, as far as a worker reads it: kvasir_node/model/manifest.py is the specification.
import { DataError, Misbehaved } from '../base/errors.js'
import { type Cid, DAG_CBOR_CODEC, RAW_CODEC, cidFromBytes, codecOf } from '../base/ids.js'
import { BLOCK_BYTES_MAX } from '../wire/blocks.js'
import { Fields, decode, isInteger, isPlainText } from '../wire/codec.js'
import { type ExpertSizes, type TensorSpec, checkParts, expertFileBytes } from './expertFile.js'
import { readMaths } from './maths.js'

const LAYERS_MAX = 4096
const EXPERTS_MAX = 16_384
const FORMS_MAX = 64
const PARTS_MAX = 16
const SIZE_MAX = 1 << 20
const BLOB_BLOCKS_MAX = 25_000

/** A file of any size, named by one Cid; of codec raw it is one block, else a list of blocks. */
export interface BlobRef { readonly cid: Cid, readonly size: number }

export interface Manifest extends ExpertSizes {
  readonly name: string
  readonly layerNodes: ReadonlyMap<number, Cid>
  readonly layerParts: ReadonlyMap<number, readonly TensorSpec[]>
  readonly expertsPerLayer: number
}

/** Raises DataError that names what is wrong, or what this page cannot compute. */
export function decodeManifest (data: Uint8Array): Manifest {
  return asData(() => {
    const fields = new Fields(decode(data, BLOCK_BYTES_MAX, 'a manifest'), 'manifest')
    checkKind(fields, 'manifest')
    const maths = readMaths(fields.map('maths', 32))
    const layerNodes = new Map(fields.items('layer_nodes', LAYERS_MAX, readLayerNode))
    const forms = fields.items('forms', FORMS_MAX, readForm)
    const numbers = fields.items('layer_forms', LAYERS_MAX, number => {
      if (!isInteger(number, 0, forms.length - 1)) throw new DataError('manifest.layer_forms must number the forms')
      return number
    })
    if (numbers.length !== layerNodes.size) throw new DataError('manifest.layer_forms must have one number for each layer')
    const layers = [...layerNodes.keys()]
    const manifest = {
      name: fields.text('name', 128),
      maths,
      layerNodes,
      layerParts: new Map(layers.map((layer, place) => [layer, forms[numbers[place]!]!])),
      expertsPerLayer: fields.integer('experts_per_layer', 1, EXPERTS_MAX),
      hiddenSize: fields.integer('hidden_size', 1, SIZE_MAX),
      expertHiddenSize: fields.integer('expert_hidden_size', 1, SIZE_MAX)
    }
    for (const parts of new Set(manifest.layerParts.values())) checkParts(parts, manifest)
    return manifest
  })
}

/** The experts of one layer of this manifest, by index. Raises DataError. */
export function decodeLayerNode (data: Uint8Array, manifest: Manifest, layer: number): BlobRef[] {
  return asData(() => {
    const fields = new Fields(decode(data, BLOCK_BYTES_MAX, 'a layer node'), 'layer node')
    checkKind(fields, 'layer')
    fields.integer('layer', layer, layer)
    const experts = fields.items('experts', manifest.expertsPerLayer, readBlob)
    fields.end()
    const parts = manifest.layerParts.get(layer)
    if (parts === undefined || experts.length !== manifest.expertsPerLayer) throw new DataError(`layer node of layer ${layer} has ${experts.length} experts`)
    const bytes = expertFileBytes(parts)
    if (experts.some(blob => blob.size !== bytes)) throw new DataError(`experts of layer ${layer} must all have ${bytes} bytes`)
    return experts
  })
}

export function isNode (blob: BlobRef): boolean {
  return codecOf(blob.cid) === DAG_CBOR_CODEC
}

/** The blocks of a blob, in order. Raises DataError. */
export function decodeBlobNode (data: Uint8Array, blob: BlobRef): Cid[] {
  return asData(() => {
    const fields = new Fields(decode(data, BLOCK_BYTES_MAX, 'a blob node'), 'blob node')
    checkKind(fields, 'blob')
    fields.integer('size', blob.size, blob.size)
    const blocks = fields.items('blocks', BLOB_BLOCKS_MAX, item => readCid(item, RAW_CODEC))
    fields.end()
    if (blob.size < blocks.length || blob.size > blocks.length * BLOCK_BYTES_MAX) throw new DataError(`a blob of ${blob.size} bytes cannot come from ${blocks.length} blocks`)
    return blocks
  })
}

function readLayerNode (item: unknown): [number, Cid] {
  if (!Array.isArray(item) || item.length !== 2 || !isInteger(item[0], 0, LAYERS_MAX - 1)) throw new DataError('manifest.layer_nodes must be pairs of layer and Cid')
  return [item[0], readCid(item[1], DAG_CBOR_CODEC)]
}

function readForm (form: unknown): TensorSpec[] {
  if (!Array.isArray(form) || form.length > PARTS_MAX) throw new DataError('manifest.forms must be lists of parts')
  return form.map((part: unknown) => {
    const [name, dtype, shape] = Array.isArray(part) && part.length === 3 ? part as unknown[] : []
    if (!isPlainText(name, 32) || !isPlainText(dtype, 16) || !Array.isArray(shape) || shape.length > 8) throw new DataError('a part of manifest.forms must be [name, dtype, sizes]')
    if (!shape.every(size => isInteger(size, 1, SIZE_MAX))) throw new DataError(`a size of ${name} in manifest.forms is out of bounds`)
    return { name, dtype, shape: shape as number[] }
  })
}

function readBlob (item: unknown): BlobRef {
  if (!Array.isArray(item) || item.length !== 2 || !isInteger(item[1], 0, BLOB_BLOCKS_MAX * BLOCK_BYTES_MAX)) throw new DataError('a blob must be [Cid, size]')
  return { cid: readCid(item[0], item[1] <= BLOCK_BYTES_MAX ? undefined : DAG_CBOR_CODEC), size: item[1] }
}

function readCid (value: unknown, codec: number | undefined): Cid {
  if (!(value instanceof Uint8Array)) throw new DataError('a Cid must be bytes')
  const cid = cidFromBytes(value)
  if (codec !== undefined && codecOf(cid) !== codec) throw new DataError(`${cid} is of the wrong codec`)
  return cid
}

function checkKind (fields: Fields, kind: string): void {
  fields.integer('v', 1, 1)
  if (fields.text('kind', 16) !== kind) throw new DataError(`expected a ${kind}`)
}

function asData<T> (read: () => T): T {
  try {
    return read()
  } catch (error) {
    throw error instanceof Misbehaved ? new DataError(error.message) : error
  }
}
