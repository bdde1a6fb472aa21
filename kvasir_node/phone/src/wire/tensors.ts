// The frames of expert calls; kvasir_node/wire/tensors.py has the layout. Rows are looked at here, computed elsewhere.
import { type Bytes, aligned, viewOf } from '../base/bytes.js'
import { Misbehaved } from '../base/errors.js'

export const ROWS_MAX = 8192
export const PAIRS_MAX = 65_536
const REQUEST_BYTES = 20
const ANSWER_BYTES = 16
const REQUEST_MAGIC = 0x4b51
const ANSWER_MAGIC = 0x4b41
export const LEVELS = 127 // of int8 on either side of zero; -128 is not used
const SCALE_MIN = 2 ** -100

/** How rows and sums are spelt in a frame. */
export const Encoding = { FLOAT32: 1, BFLOAT16: 2, INT8: 3 } as const
export type Encoding = typeof Encoding[keyof typeof Encoding]

/** Rows [R,D] of one layer and P (row, expert, weight) triples, as views of a frame. */
export interface ExpertRequest {
  readonly layer: number
  readonly encoding: Encoding
  readonly rowCount: number
  readonly hiddenSize: number
  readonly pairWeight: Float32Array
  readonly pairRow: Uint32Array
  readonly pairExpert: Uint32Array
  readonly values: Uint8Array
}

/** Views of a request's arrays; raises Misbehaved for whatever does not add up. Values are read by `readRows`. */
export function readRequest (frame: Uint8Array, hiddenSize: number): ExpertRequest {
  const body = aligned(frame, 4)
  if (body.length < REQUEST_BYTES) throw bad(`a request of ${body.length} bytes has no room for its header`)
  const view = viewOf(body)
  const encoding = view.getUint8(2)
  const [layer, rows, pairs, width] = [4, 8, 12, 16].map(at => view.getUint32(at, true)) as [number, number, number, number]
  if (view.getUint16(0, true) !== REQUEST_MAGIC || view.getUint8(3) !== 0 || !isEncoding(encoding)) {
    throw bad('the header is not that of an expert request')
  }
  if (width !== hiddenSize || rows < 1 || rows > ROWS_MAX || pairs < 1 || pairs > PAIRS_MAX) {
    throw bad(`${rows} rows of ${width} with ${pairs} pairs; expected rows of ${hiddenSize}`)
  }
  if (body.length !== REQUEST_BYTES + 12 * pairs + valuesBytes(encoding, rows, width)) {
    throw bad(`a request of ${body.length} bytes does not hold ${rows} rows and ${pairs} pairs`)
  }
  const at = body.byteOffset + REQUEST_BYTES
  const request = {
    layer,
    encoding,
    rowCount: rows,
    hiddenSize: width,
    pairWeight: new Float32Array(body.buffer, at, pairs),
    pairRow: new Uint32Array(body.buffer, at + 4 * pairs, pairs),
    pairExpert: new Uint32Array(body.buffer, at + 8 * pairs, pairs),
    values: body.subarray(REQUEST_BYTES + 12 * pairs)
  }
  if (request.pairRow.some(row => row >= rows)) throw bad(`a pair points outside the ${rows} rows`)
  if (!request.pairWeight.every(Number.isFinite)) throw bad('a weight is not finite')
  return request
}

function isEncoding (code: number): code is Encoding {
  return code >= Encoding.FLOAT32 && code <= Encoding.INT8
}

export function valuesBytes (encoding: Encoding, rows: number, width: number): number {
  if (encoding === Encoding.INT8) return rows * (width + 4)
  return rows * width * (encoding === Encoding.FLOAT32 ? 4 : 2)
}

/** A request's rows [R,D], in the frame itself where they are spelt so; raises Misbehaved (bad_frame) where one is not finite. */
export function readRows (request: ExpertRequest): Float32Array {
  const { encoding, rowCount, hiddenSize } = request
  const values = aligned(request.values, 4)
  const count = rowCount * hiddenSize
  let rows: Float32Array
  if (encoding === Encoding.FLOAT32) {
    rows = new Float32Array(values.buffer, values.byteOffset, count)
  } else if (encoding === Encoding.BFLOAT16) {
    const halves = new Uint16Array(values.buffer, values.byteOffset, count)
    const words = new Uint32Array(count)
    for (let at = 0; at < count; at++) words[at] = halves[at]! << 16
    rows = new Float32Array(words.buffer)
  } else {
    const scales = new Float32Array(values.buffer, values.byteOffset, rowCount)
    const levels = new Int8Array(values.buffer, values.byteOffset + 4 * rowCount, count)
    rows = new Float32Array(count)
    for (let row = 0; row < rowCount; row++) readLevels(levels.subarray(row * hiddenSize, (row + 1) * hiddenSize), scales[row]!, rows.subarray(row * hiddenSize, (row + 1) * hiddenSize))
  }
  if (!isFinite(rows)) throw bad('a row holds NaN or infinity')
  return rows
}

function readLevels (levels: Int8Array, scale: number, into: Float32Array): void {
  let largest = 0
  for (let at = 0; at < levels.length; at++) {
    const level = levels[at]!
    largest = Math.max(largest, Math.abs(level))
    into[at] = Math.fround(level * Math.fround(1 / LEVELS)) * scale
  }
  const fits = scale >= SCALE_MIN && scale < Infinity && (largest === LEVELS || (scale === SCALE_MIN && largest < LEVELS))
  if (!fits) throw bad("a row's scale is no finite largest magnitude of its levels")
}

/** Whether no value is NaN or infinite: none hides from a sum, and a sum that only overflows is looked at closely. */
function isFinite (values: Float32Array): boolean {
  let sum = 0
  for (let at = 0; at < values.length; at++) sum += values[at]!
  return Number.isFinite(sum) || values.every(Number.isFinite)
}

/** An answer frame with sums [R,D] in `encoding`. */
export function encodeAnswer (sums: Float32Array, rows: number, encoding: Encoding, computedS: number): Bytes {
  const width = sums.length / rows
  const frame = new Uint8Array(ANSWER_BYTES + valuesBytes(encoding, rows, width))
  const view = viewOf(frame)
  view.setUint16(0, ANSWER_MAGIC, true)
  view.setUint8(2, encoding)
  view.setUint32(4, rows, true)
  view.setUint32(8, width, true)
  view.setUint32(12, Math.min(Math.trunc(computedS * 1e6), 0xffffffff), true)
  writeValues(sums, rows, encoding, frame.subarray(ANSWER_BYTES))
  return frame
}

function writeValues (sums: Float32Array, rows: number, encoding: Encoding, into: Bytes): void {
  if (encoding === Encoding.FLOAT32) {
    new Float32Array(into.buffer, into.byteOffset, sums.length).set(sums)
  } else if (encoding === Encoding.BFLOAT16) {
    const words = new Uint32Array(sums.buffer, sums.byteOffset, sums.length)
    const halves = new Uint16Array(into.buffer, into.byteOffset, sums.length)
    for (let at = 0; at < words.length; at++) halves[at] = toBfloat16(words[at]!)
  } else {
    const scales = new Float32Array(into.buffer, into.byteOffset, rows)
    const levels = new Int8Array(into.buffer, into.byteOffset + 4 * rows, sums.length)
    const width = sums.length / rows
    for (let row = 0; row < rows; row++) {
      scales[row] = writeLevels(sums.subarray(row * width, (row + 1) * width), levels.subarray(row * width, (row + 1) * width))
    }
  }
}

/** The upper half of a float32's bits, rounded to nearest, ties to even. */
function toBfloat16 (word: number): number {
  return (word + 0x7fff + (word >>> 16 & 1)) >>> 16
}

function writeLevels (row: Float32Array, into: Int8Array): number {
  let scale = SCALE_MIN
  for (let at = 0; at < row.length; at++) scale = Math.max(scale, Math.abs(row[at]!))
  const perLevel = Math.fround(LEVELS / scale)
  for (let at = 0; at < row.length; at++) into[at] = roundHalfEven(Math.fround(row[at]! * perLevel))
  return scale
}

export function roundHalfEven (value: number): number {
  const rounded = Math.round(value)
  return rounded - value === 0.5 && rounded % 2 !== 0 ? rounded - 1 : rounded
}

function bad (message: string): Misbehaved {
  return new Misbehaved('bad_frame', message)
}
