// How many calls may be under way on a stream; see kvasir_node/net/rpc_credits.py. Pure.
import { Misbehaved, Overloaded, UsageError } from '../base/errors.js'
import type { Grant } from './frames.js'

export const WAITING_MAX = 256
const FIRST: Grant = { calls: 1, bytes: 64 * 1024 } // what holds until a peer's GRANT has come

/** The calling side's account: which of our calls may go, in the order they came. */
export class Credits {
  private grant: Grant = FIRST
  private isGranted = false
  private readonly sent = new Map<number, number>() // id -> bytes of its body
  private sentBytes = 0
  private readonly waiting = new Map<number, number>()

  constructor (private readonly callsMax: number) {}

  /** Raises Misbehaved for less than was granted before. Returns waiting calls that will never be taken. */
  granted (grant: Grant): number[] {
    if (grant.calls < this.grant.calls || grant.bytes < this.grant.bytes) {
      throw new Misbehaved('bad_frame', `a grant of ${grant.calls} calls and ${grant.bytes} bytes is less than the one before`)
    }
    this.grant = grant
    this.isGranted = true
    const hopeless = [...this.waiting].filter(([, size]) => size > grant.bytes).map(([id]) => id)
    for (const id of hopeless) this.waiting.delete(id)
    return hopeless
  }

  /** Raises Overloaded when too many wait, UsageError for a body that the peer will never take. */
  wait (id: number, sizeBytes: number): void {
    if (this.isGranted && sizeBytes > this.grant.bytes) throw new UsageError(`a call's body of ${sizeBytes} bytes; the peer takes at most ${this.grant.bytes}`)
    if (this.waiting.size >= WAITING_MAX) throw new Overloaded(`${WAITING_MAX} calls wait for one of them to end, which is all that may`)
    this.waiting.set(id, sizeBytes)
  }

  /** The waiting calls that may go now; each has taken its credit. A large body is not overtaken by smaller ones. */
  nextCalls (): number[] {
    const next: number[] = []
    for (const [id, size] of this.waiting) {
      const calls = Math.min(this.isGranted ? this.callsMax : FIRST.calls, this.grant.calls)
      if (this.sent.size >= calls || this.sentBytes + size > this.grant.bytes) break
      this.waiting.delete(id)
      this.sent.set(id, size)
      this.sentBytes += size
      next.push(id)
    }
    return next
  }

  /** The call is over; false when it had not been sent and only waited. */
  giveBack (id: number): boolean {
    const size = this.sent.get(id)
    if (size === undefined) {
      this.waiting.delete(id)
      return false
    }
    this.sent.delete(id)
    this.sentBytes -= size
    return true
  }
}

/** The answering side's account of one caller. */
export class Served {
  readonly grant: Grant
  private readonly sizes = new Map<number, number>()
  private bytes = 0

  constructor (grant: Grant) {
    this.grant = { calls: Math.max(grant.calls, FIRST.calls), bytes: Math.max(grant.bytes, FIRST.bytes) }
  }

  /** Raises Misbehaved for a call beyond the grant, or an id that is in use. */
  arrived (id: number, sizeBytes: number): void {
    if (this.sizes.has(id)) throw new Misbehaved('bad_frame', `call id ${id} is used twice at once`)
    if (this.sizes.size >= this.grant.calls || this.bytes + sizeBytes > this.grant.bytes) {
      throw new Misbehaved('too_many', `a call of ${sizeBytes} bytes beside ${this.sizes.size} overruns the grant`)
    }
    this.sizes.set(id, sizeBytes)
    this.bytes += sizeBytes
  }

  over (id: number): void {
    this.bytes -= this.sizes.get(id) ?? 0
    this.sizes.delete(id)
  }
}
