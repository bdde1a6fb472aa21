// The experts that one thread holds and computes: a Compute of its own in Node.js, and what a compute Worker runs.
import { Overloaded } from '../base/errors.js'
import { type ExpertSizes, readExpert } from '../model/expertFile.js'
import { type Kernel, Shard } from '../model/shard.js'
import { type ExpertRequest, readRows } from '../wire/tensors.js'
import type { Compute, ExpertBlob, Sums } from './compute.js'

export class Shards implements Compute {
  private readonly shards = new Map<string, Shard>()

  constructor (private readonly kernel: Kernel, readonly bytesMax: number) {}

  places (count: number): number[] {
    return new Array<number>(count).fill(0)
  }

  async load (key: string, sizes: ExpertSizes, blob: ExpertBlob): Promise<void> {
    this.loadNow(key, sizes, blob)
  }

  loadNow (key: string, sizes: ExpertSizes, blob: ExpertBlob): void {
    let shard = this.shards.get(key)
    if (shard === undefined) this.shards.set(key, shard = new Shard(this.kernel, sizes))
    if (!shard.holds(blob.layer, blob.index)) shard.add(blob.layer, blob.index, readExpert(blob.file, blob.parts, sizes, blob.isInt8))
  }

  drop (key: string, layer: number, index: number): void {
    const shard = this.shards.get(key)
    shard?.remove(layer, index)
    if (shard?.isEmpty === true) this.shards.delete(key)
  }

  async sums (key: string, request: ExpertRequest): Promise<Sums> {
    const shard = this.shards.get(key)
    const missing = request.pairExpert.find(index => shard?.holds(request.layer, index) !== true)
    if (missing !== undefined) throw new Overloaded(`expert ${missing} of layer ${request.layer} is not held here (any more)`)
    return this.sumsNow(key, request)
  }

  /** Sums over those pairs whose experts are held here. */
  sumsNow (key: string, request: ExpertRequest): Sums {
    const shard = this.shards.get(key)
    if (shard === undefined) throw new Overloaded(`no experts of layer ${request.layer} are held here (any more)`)
    const beganAt = performance.now()
    const rows = readRows(request)
    const pairs = { row: request.pairRow, expert: request.pairExpert, weight: request.pairWeight }
    const values = shard.sums(request.layer, rows, pairs)
    return { values, computedS: (performance.now() - beganAt) / 1000 }
  }
}
