// Room in one linear memory: who takes some gives it back, and neighbours grow together. It knows no weights.
import { CapacityError } from '../base/errors.js'

export const ALIGNMENT = 16
const PAGE = 65_536

interface Hole { at: number, size: number }

export class Arena {
  private readonly holes: Hole[] = [] // ascending
  private end: number

  /** `begin` = the first byte that is free; `bytesMax` = how large the memory may become. */
  constructor (private readonly memory: WebAssembly.Memory, begin: number, private readonly bytesMax: number) {
    this.end = roundUp(begin)
  }

  /** The address of `size` bytes. Raises CapacityError when they do not fit. */
  take (size: number): number {
    const wanted = roundUp(size)
    const place = this.holes.findIndex(hole => hole.size >= wanted)
    if (place >= 0) {
      const hole = this.holes[place]!
      const at = hole.at
      hole.at += wanted
      hole.size -= wanted
      if (hole.size === 0) this.holes.splice(place, 1)
      return at
    }
    const at = this.end
    this.growTo(at + wanted)
    this.end += wanted
    return at
  }

  /** Gives back what `take` of the same size gave. */
  give (at: number, size: number): void {
    const place = this.holes.findIndex(hole => hole.at > at)
    this.holes.splice(place < 0 ? this.holes.length : place, 0, { at, size: roundUp(size) })
    for (let next = this.holes.length - 1; next > 0; next--) {
      const [left, right] = [this.holes[next - 1]!, this.holes[next]!]
      if (left.at + left.size === right.at) {
        left.size += right.size
        this.holes.splice(next, 1)
      }
    }
    const last = this.holes.at(-1)
    if (last !== undefined && last.at + last.size === this.end) {
      this.end = last.at
      this.holes.pop()
    }
  }

  private growTo (end: number): void {
    const missing = end - this.memory.buffer.byteLength
    if (missing <= 0) return
    if (end > this.bytesMax) throw new CapacityError(`${end} bytes of memory; at most ${this.bytesMax} are used`)
    try {
      this.memory.grow(Math.ceil(missing / PAGE))
    } catch {
      throw new CapacityError(`the browser gives no more than ${this.memory.buffer.byteLength} bytes of memory`)
    }
  }
}

function roundUp (size: number): number {
  return Math.ceil(size / ALIGNMENT) * ALIGNMENT
}
