// The parts of an expert and the file that they travel in: kvasir_node/model/tensor_file.py and expert_parts.py.
// A page computes plain float weights; quantised ones are refused by name.
import { type Bytes, concat, equal, utf8, viewOf } from '../base/bytes.js'
import { DataError } from '../base/errors.js'
import { LEVELS, roundHalfEven } from '../wire/tensors.js'
import { type ExpertMaths, hasGate } from './maths.js'

const ITEM_BYTES: Readonly<Record<string, number>> = { F32: 4, BF16: 2, F16: 2 }
const ALIGNMENT_BYTES = 8
const STEP = 8 // what widths must be a multiple of in the kernel

/** A part's dtype as safetensors spells it, and its shape. */
export interface TensorSpec { readonly name: string, readonly dtype: string, readonly shape: readonly number[] }

/** What experts of a model are made of: D and I, and how they compute. */
export interface ExpertSizes { readonly hiddenSize: number, readonly expertHiddenSize: number, readonly maths: ExpertMaths }

function countOf (spec: TensorSpec): number {
  return spec.shape.reduce((product, size) => product * size, 1)
}

function bytesOf (spec: TensorSpec): number {
  return countOf(spec) * (ITEM_BYTES[spec.dtype] ?? 0)
}

/** Raises DataError unless these parts make up exactly one expert that the kernel can compute. */
export function checkParts (parts: readonly TensorSpec[], sizes: ExpertSizes): void {
  const { hiddenSize: width, expertHiddenSize: inner, maths } = sizes
  if (width % STEP !== 0 || inner % STEP !== 0) throw new DataError(`experts of ${width} × ${inner}; a page computes sizes in steps of ${STEP}`)
  const names = parts.map(part => part.name)
  const matrices = !hasGate(maths) ? ['up', 'down'] : names.includes('gate_up') ? ['gate_up', 'down'] : ['gate', 'up', 'down']
  const expected = matrices.flatMap(matrix => maths.bias ? [matrix, `${matrix}_bias`] : [matrix])
  if ([...names].sort().join() !== [...expected].sort().join()) {
    throw new DataError(`experts are stored as ${names.join(', ').slice(0, 100)}; a page computes ${expected.join(', ')}`)
  }
  const rowsOf: Record<string, number> = { gate: inner, up: inner, gate_up: 2 * inner, down: width }
  for (const part of parts) {
    const matrix = part.name.replace(/_bias$/, '')
    const rows = rowsOf[matrix]!
    const columns = matrix === 'down' ? inner : width
    const shape = part.name !== matrix ? [rows] : maths.transposed ? [columns, rows] : [rows, columns]
    if (!(part.dtype in ITEM_BYTES)) throw new DataError(`${part.name} is ${part.dtype}; a page computes ${Object.keys(ITEM_BYTES).join(', ')}`)
    if (part.shape.join() !== shape.join()) throw new DataError(`${part.name} has the shape ${part.shape.join(' × ')}, expected ${shape.join(' × ')}`)
  }
}

/** The canonical header of an expert's file. */
function headerOf (parts: readonly TensorSpec[]): Bytes {
  let end = 0
  const entries = parts.map(part => {
    const begin = end
    end += bytesOf(part)
    return `"${part.name}":{"dtype":"${part.dtype}","shape":[${part.shape.join(',')}],"data_offsets":[${begin},${end}]}`
  })
  const text = utf8(`{${entries.join(',')}}`)
  const padded = concat([text, utf8(' '.repeat((ALIGNMENT_BYTES - text.length % ALIGNMENT_BYTES) % ALIGNMENT_BYTES))])
  const length = new Uint8Array(8)
  viewOf(length).setUint32(0, padded.length, true)
  return concat([length, padded])
}

export function expertFileBytes (parts: readonly TensorSpec[]): number {
  return headerOf(parts).length + parts.reduce((sum, part) => sum + bytesOf(part), 0)
}

/** An expert ready to be put into the kernel's memory: `up` has the gate's rows first. */
export interface ExpertWeights {
  readonly isBfloat16: boolean
  readonly up: Bytes
  readonly down: Bytes
  readonly upBias: Float32Array | undefined
  readonly downBias: Float32Array | undefined
}

/** Memory of one expert of these parts, in the form that `readExpert` gives it. */
export function weightsBytes (parts: readonly TensorSpec[], isInt8: boolean): number {
  const item = isAllBfloat16(parts) && !isInt8 ? 2 : 4
  return parts.reduce((sum, part) => sum + countOf(part) * (part.name.endsWith('_bias') ? 4 : item), 0)
}

function isAllBfloat16 (parts: readonly TensorSpec[]): boolean {
  return parts.every(part => part.dtype === 'BF16' || part.name.endsWith('_bias'))
}

/**
 * Reads a file that must have exactly these parts, checked before by `checkParts`. Raises DataError. `isInt8`: with the
 * weights that are left when they are rounded to int8, which is what such a coordinator computes with; kept as float32.
 */
export function readExpert (file: Uint8Array, parts: readonly TensorSpec[], sizes: ExpertSizes, isInt8: boolean): ExpertWeights {
  const header = headerOf(parts)
  const expected = expertFileBytes(parts)
  if (file.length !== expected) throw new DataError(`an expert's file has ${file.length} bytes, expected ${expected}`)
  if (!equal(file.subarray(0, header.length), header)) throw new DataError("an expert's file does not start with its canonical header")
  const data = new Map<string, Uint8Array>()
  let at = header.length
  for (const part of parts) {
    data.set(part.name, file.subarray(at, at + bytesOf(part)))
    at += bytesOf(part)
  }
  const isBfloat16 = isAllBfloat16(parts) && !isInt8
  const matrix = (name: string): Bytes => {
    const spec = parts.find(part => part.name === name)!
    const raw = isBfloat16 ? data.get(name)!.slice() : bytesOfFloats(floats(data.get(name)!, spec.dtype))
    return sizes.maths.transposed ? transposed(raw, spec.shape, isBfloat16 ? 2 : 4) : raw
  }
  const bias = (name: string): Float32Array<ArrayBuffer> => floats(data.get(`${name}_bias`)!, parts.find(part => part.name === `${name}_bias`)!.dtype)
  const ups = data.has('gate_up') ? ['gate_up'] : hasGate(sizes.maths) ? ['gate', 'up'] : ['up']
  const { maths } = sizes
  const isInterleaved = maths.interleaved && ups.length === 1 && hasGate(maths)
  const rowBytes = sizes.hiddenSize * (isBfloat16 ? 2 : 4)
  const up = concat(ups.map(matrix))
  const down = matrix('down')
  if (isInt8) {
    roundToInt8(new Float32Array(up.buffer), sizes.hiddenSize)
    roundToInt8(new Float32Array(down.buffer), sizes.expertHiddenSize)
  }
  const upBias = maths.bias ? bytesOfFloats(concatFloats(ups.map(bias))) : undefined
  return {
    isBfloat16,
    up: isInterleaved ? gateFirst(up, rowBytes) : up,
    down,
    upBias: upBias === undefined ? undefined : new Float32Array((isInterleaved ? gateFirst(upBias, 4) : upBias).buffer),
    downBias: maths.bias ? bias('down') : undefined
  }
}

/** What kvasir_node/model/quantise.py leaves of each row: levels from -127 to 127 times one factor. In place. */
function roundToInt8 (matrix: Float32Array, width: number): void {
  for (let start = 0; start < matrix.length; start += width) {
    const row = matrix.subarray(start, start + width)
    let largest = 0
    for (let at = 0; at < width; at++) largest = Math.max(largest, Math.abs(row[at]!))
    const factor = Math.fround(largest / LEVELS)
    for (let at = 0; at < width; at++) row[at] = factor === 0 ? 0 : roundHalfEven(Math.fround(row[at]! / factor)) * factor
  }
}

function bytesOfFloats (values: Float32Array<ArrayBuffer>): Bytes {
  return new Uint8Array(values.buffer, values.byteOffset, values.byteLength)
}

function concatFloats (pieces: ReadonlyArray<Float32Array<ArrayBuffer>>): Float32Array<ArrayBuffer> {
  const joined = concat(pieces.map(bytesOfFloats))
  return new Float32Array(joined.buffer)
}

/** Float32 values of their own, from little-endian F32, BF16 or F16. */
function floats (raw: Uint8Array, dtype: string): Float32Array<ArrayBuffer> {
  const own = raw.slice()
  if (dtype === 'F32') return new Float32Array(own.buffer)
  const halves = new Uint16Array(own.buffer)
  const words = new Uint32Array(halves.length)
  for (let at = 0; at < halves.length; at++) words[at] = dtype === 'BF16' ? halves[at]! << 16 : float16Bits(halves[at]!)
  return new Float32Array(words.buffer)
}

const SCRATCH = new DataView(new ArrayBuffer(4))

/** The bits of the float32 that equals a float16. */
function float16Bits (half: number): number {
  const sign = (half & 0x8000) << 16
  const exponent = half >> 10 & 31
  const fraction = half & 1023
  if (exponent === 31) return (sign | 0x7f800000 | fraction << 13) >>> 0
  if (exponent > 0) return (sign | (exponent + 112) << 23 | fraction << 13) >>> 0
  SCRATCH.setFloat32(0, fraction * 2 ** -24)
  return (sign | SCRATCH.getUint32(0)) >>> 0
}

function transposed (raw: Bytes, shape: readonly number[], itemBytes: number): Bytes {
  const [rows, columns] = shape as [number, number]
  const from = itemBytes === 2 ? new Uint16Array(raw.buffer) : new Uint32Array(raw.buffer)
  const to = from.slice()
  for (let row = 0; row < rows; row++) for (let column = 0; column < columns; column++) to[column * rows + row] = from[row * columns + column]!
  return new Uint8Array(to.buffer)
}

/** Rows that take turns, gate's then up's, as all of the gate's and then all of up's. */
function gateFirst (raw: Bytes, rowBytes: number): Bytes {
  const rows = raw.length / rowBytes
  const to = new Uint8Array(raw.length)
  for (let row = 0; row < rows; row++) to.set(raw.subarray(row * rowBytes, (row + 1) * rowBytes), ((row >> 1) + (row % 2) * rows / 2) * rowBytes)
  return to
}
