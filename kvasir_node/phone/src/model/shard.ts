// Experts in the memory of one kernel: rows in, weighted sums out; kvasir_node/model/experts.py is the same elsewhere.
// It does not know frames' encodings, slices, or which other kernels hold what.
import { viewOf } from '../base/bytes.js'
import { Arena } from './arena.js'
import type { ExpertSizes, ExpertWeights } from './expertFile.js'

const ROWS_AT_ONCE = 64 // of one expert: bounds the room, and the weights are read from memory once for each
const EXPERT_WORDS = 11
const PAGE = 65_536

interface KernelExports {
  readonly expert_outputs: (expert: number, x: number, y: number, hidden: number, rows: number) => void
  readonly __heap_base: WebAssembly.Global
}

/** A (row, expert, weight) triple each; `experts` says which of them are held here. */
export interface Pairs { readonly row: Uint32Array, readonly expert: Uint32Array, readonly weight: Float32Array }

interface Held { readonly at: number, readonly size: number }

/** The memory that the shards of one thread share. */
export class Kernel {
  readonly arena: Arena
  private readonly exports: KernelExports
  private room: Held = { at: 0, size: 0 }

  constructor (module: WebAssembly.Module, readonly memory: WebAssembly.Memory, bytesMax: number) {
    this.exports = new WebAssembly.Instance(module, { env: { memory } }).exports as unknown as KernelExports
    this.arena = new Arena(memory, this.exports.__heap_base.value as number, bytesMax)
  }

  static open (module: WebAssembly.Module, bytesMax: number): Kernel {
    const memory = new WebAssembly.Memory({ initial: 2, maximum: Math.ceil(bytesMax / PAGE) })
    return new Kernel(module, memory, bytesMax)
  }

  /** Outputs [n,D] of one expert for `rows` [n,D], n at most ROWS_AT_ONCE; a view that the next call overwrites. */
  outputs (expert: number, sizes: ExpertSizes, fill: (x: Float32Array) => void, count: number): Float32Array {
    const { hiddenSize: width, expertHiddenSize: inner } = sizes
    this.needRoom(4 * ROWS_AT_ONCE * (2 * width + 2 * inner))
    const x = this.room.at
    const y = x + 4 * count * width
    fill(new Float32Array(this.memory.buffer, x, count * width))
    this.exports.expert_outputs(expert, x, y, y + 4 * count * width, count)
    return new Float32Array(this.memory.buffer, y, count * width)
  }

  private needRoom (size: number): void {
    if (this.room.size >= size) return
    if (this.room.size > 0) this.arena.give(this.room.at, this.room.size)
    this.room = { at: 0, size: 0 }
    this.room = { at: this.arena.take(size), size }
  }
}

/** Experts of one model. */
export class Shard {
  private readonly held = new Map<string, Held>()

  constructor (private readonly kernel: Kernel, readonly sizes: ExpertSizes) {}

  /** Takes an expert's weights; one that is held already is ignored. Raises CapacityError, and then nothing is held. */
  add (layer: number, index: number, weights: ExpertWeights): void {
    const key = `${layer}:${index}`
    if (this.held.has(key)) return
    const pieces = [weights.up, weights.down, weights.upBias, weights.downBias]
    const at = new Array<number>(pieces.length).fill(0)
    let size = 4 * EXPERT_WORDS
    for (const [place, piece] of pieces.entries()) {
      if (piece === undefined) continue
      at[place] = size = Math.ceil(size / 16) * 16
      size += piece.byteLength
    }
    const base = this.kernel.arena.take(size)
    for (const [place, piece] of pieces.entries()) {
      if (piece === undefined) continue
      at[place]! += base
      new Uint8Array(this.kernel.memory.buffer, at[place]!, piece.byteLength).set(new Uint8Array(piece.buffer, piece.byteOffset, piece.byteLength))
    }
    this.writeExpert(base, weights.isBfloat16, at)
    this.held.set(key, { at: base, size })
  }

  /** struct Expert of kernel/experts.c. */
  private writeExpert (base: number, isBfloat16: boolean, at: readonly number[]): void {
    const { hiddenSize, expertHiddenSize, maths } = this.sizes
    const view = viewOf(new Uint8Array(this.kernel.memory.buffer, base, 4 * EXPERT_WORDS))
    const numbers = [isBfloat16 ? 1 : 0, maths.gate, maths.activation, hiddenSize, expertHiddenSize]
    for (const [place, value] of numbers.entries()) view.setInt32(4 * place, value, true)
    view.setFloat32(20, maths.limit, true)
    view.setFloat32(24, maths.alpha, true)
    for (const [place, address] of at.entries()) view.setUint32(28 + 4 * place, address, true)
  }

  /** Forgets an expert; one that is not held is ignored. */
  remove (layer: number, index: number): void {
    const held = this.held.get(`${layer}:${index}`)
    if (held === undefined) return
    this.held.delete(`${layer}:${index}`)
    this.kernel.arena.give(held.at, held.size)
  }

  holds (layer: number, index: number): boolean {
    return this.held.has(`${layer}:${index}`)
  }

  get isEmpty (): boolean {
    return this.held.size === 0
  }

  /**
   * Each row's sum of weight × expert(row) over the pairs whose expert is held here; others are left out.
   * Shapes: rows [R,D]; result [R,D]. The order of addition depends on the pairs alone.
   */
  sums (layer: number, rows: Float32Array, pairs: Pairs): Float32Array {
    const width = this.sizes.hiddenSize
    const sums = new Float32Array(rows.length)
    for (const [index, places] of byExpert(pairs.expert)) {
      const held = this.held.get(`${layer}:${index}`)
      if (held === undefined) continue
      for (let first = 0; first < places.length; first += ROWS_AT_ONCE) {
        const chunk = places.slice(first, first + ROWS_AT_ONCE)
        const outputs = this.kernel.outputs(held.at, this.sizes, x => { gather(rows, width, pairs.row, chunk, x) }, chunk.length)
        scatter(outputs, width, pairs, chunk, sums)
      }
    }
    return sums
  }
}

/** The places of each expert's pairs, experts ascending. */
function byExpert (experts: Uint32Array): Array<[number, number[]]> {
  const places = new Map<number, number[]>()
  for (let place = 0; place < experts.length; place++) {
    const known = places.get(experts[place]!)
    if (known === undefined) places.set(experts[place]!, [place])
    else known.push(place)
  }
  return [...places].sort(([a], [b]) => a - b)
}

function gather (rows: Float32Array, width: number, rowOf: Uint32Array, places: readonly number[], x: Float32Array): void {
  for (const [n, place] of places.entries()) {
    const from = rowOf[place]! * width
    x.set(rows.subarray(from, from + width), n * width)
  }
}

function scatter (outputs: Float32Array, width: number, pairs: Pairs, places: readonly number[], sums: Float32Array): void {
  for (const [n, place] of places.entries()) {
    const to = pairs.row[place]! * width
    const from = n * width
    const weight = pairs.weight[place]!
    for (let i = 0; i < width; i++) sums[to + i]! += weight * outputs[from + i]!
  }
}

