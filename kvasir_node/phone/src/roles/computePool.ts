// A Compute spread over Workers, one for each core: each holds experts of its own, and a call goes to those that hold
// what it asks for. Their partial sums are added here. Small slices are computed in this thread.
import { CapacityError, Overloaded } from '../base/errors.js'
import type { ExpertSizes } from '../model/expertFile.js'
import type { ExpertRequest } from '../wire/tensors.js'
import type { Compute, ExpertBlob, Sums } from './compute.js'
import { type FromCompute, type ToCompute, receivedError } from './computeMessages.js'

const SMALL_BYTES = 4 << 20 // a slice that is smaller is computed here: waking a Worker costs more than computing it
const CALLS_MAX = 2 // given to the Workers at once: one computes, one waits; the others can still be cancelled
const ROOM_BYTES = 64 << 20 // for rows, beside weights

/** As much of a Worker as is used. */
export interface Port {
  postMessage: (message: ToCompute, transfer: Transferable[]) => void
  onmessage: ((event: { data: FromCompute }) => void) | null
  onerror: ((event: { message: string }) => void) | null
}

interface Waiting { readonly resolve: (sums: Sums | undefined) => void, readonly reject: (error: Error) => void }

export class ComputePool implements Compute {
  private readonly bytes: number[]
  private readonly held = new Map<string, { readonly place: number, readonly bytes: number }>()
  private readonly waiting = new Map<number, Waiting>()
  private nextId = 1
  private calls = 0
  private readonly turns: Array<() => void> = []

  /** The first port is `portHere`, for small slices; the others are Workers. */
  constructor (private readonly ports: readonly Port[], module: WebAssembly.Module, readonly bytesMax: number) {
    this.bytes = ports.map(() => 0)
    for (const port of ports) {
      port.postMessage({ kind: 'open', module, bytesMax: bytesMax + ROOM_BYTES }, [])
      port.onmessage = ({ data }) => { this.answered(data) }
      port.onerror = ({ message }) => { this.failed(new CapacityError(`a compute Worker ended: ${message}`)) }
    }
  }

  places (count: number, bytes: number): number[] {
    if (bytes < SMALL_BYTES) return new Array<number>(count).fill(0)
    const loads = [Infinity, ...this.bytes.slice(1)]
    return Array.from({ length: count }, () => {
      const place = loads.indexOf(Math.min(...loads))
      loads[place]! += bytes / count
      return place
    })
  }

  async load (shard: string, sizes: ExpertSizes, blob: ExpertBlob, place: number): Promise<void> {
    const key = keyOf(shard, blob.layer, blob.index)
    if (this.held.has(key)) return
    const bytes = blob.file.length
    this.held.set(key, { place, bytes })
    this.bytes[place]! += bytes
    try {
      await this.send(place, id => ({ kind: 'load', id, shard, sizes, blob }), [blob.file.buffer as ArrayBuffer])
    } catch (error) {
      this.forget(key)
      throw error
    }
  }

  drop (shard: string, layer: number, index: number): void {
    const held = this.held.get(keyOf(shard, layer, index))
    if (held === undefined) return
    this.forget(keyOf(shard, layer, index))
    this.ports[held.place]!.postMessage({ kind: 'drop', shard, layer, index }, [])
  }

  async sums (shard: string, request: ExpertRequest, signal?: AbortSignal): Promise<Sums> {
    if (this.calls >= CALLS_MAX) await new Promise<void>(resolve => { this.turns.push(resolve) })
    this.calls++
    try {
      signal?.throwIfAborted()
      return await this.sumsOf([...this.placesOf(shard, request)], shard, request)
    } finally {
      this.calls--
      this.turns.shift()?.()
    }
  }

  private placesOf (shard: string, request: ExpertRequest): Set<number> {
    const places = new Set<number>()
    for (const index of new Set(request.pairExpert)) {
      const held = this.held.get(keyOf(shard, request.layer, index))
      if (held === undefined) throw new Overloaded(`expert ${index} of layer ${request.layer} is not held here (any more)`)
      places.add(held.place)
    }
    return places
  }

  private async sumsOf (places: readonly number[], shard: string, request: ExpertRequest): Promise<Sums> {
    const transfer = places.length === 1 ? [request.values.buffer as ArrayBuffer] : [] // of the whole frame
    const parts = await Promise.all(places.map(async place => await this.send(place, id => ({ kind: 'sums', id, shard, request }), transfer)))
    const [first, ...others] = parts as [Sums, ...Sums[]]
    const values = first.values
    for (const other of others) for (let at = 0; at < values.length; at++) values[at]! += other.values[at]!
    return { values, computedS: Math.max(...parts.map(part => part!.computedS)) }
  }

  private async send (place: number, message: (id: number) => ToCompute, transfer: Transferable[]): Promise<Sums | undefined> {
    const id = this.nextId++
    return await new Promise((resolve, reject) => {
      this.waiting.set(id, { resolve, reject })
      this.ports[place]!.postMessage(message(id), transfer)
    })
  }

  private answered (answer: FromCompute): void {
    const waiting = this.waiting.get(answer.id)
    this.waiting.delete(answer.id)
    if ('error' in answer) waiting?.reject(receivedError(answer.error))
    else waiting?.resolve(answer.sums)
  }

  private failed (error: Error): void {
    for (const waiting of this.waiting.values()) waiting.reject(error)
    this.waiting.clear()
  }

  private forget (key: string): void {
    const held = this.held.get(key)
    if (held !== undefined) this.bytes[held.place]! -= held.bytes
    this.held.delete(key)
  }
}

function keyOf (shard: string, layer: number, index: number): string {
  return `${shard}/${layer}:${index}`
}
