// Blocks by content address, kept within a quota: what nothing pins makes room, the longest unused first.
// It does not know where bytes lie: that is `BlockDisk`, in IndexedDB for a page and in memory for tests. Blocks are
// written behind the back of whoever brings them, many at once: a browser takes as long for one as for eight.
import { CapacityError } from '../base/errors.js'
import type { Cid } from '../base/ids.js'

const UNWRITTEN_BYTES_MAX = 32 << 20 // who brings more waits for the disk

export interface BlockMeta { readonly size: number, usedAt: number }

/** What is to be changed at once, or not at all. */
export interface Changes {
  readonly blocks: ReadonlyMap<Cid, Uint8Array>
  readonly metas: ReadonlyMap<Cid, BlockMeta>
  readonly deleted: readonly Cid[]
}

/** Where blocks lie. `write` rejects with CapacityError where there is no room. */
export interface BlockDisk {
  readonly list: () => Promise<Map<Cid, BlockMeta>>
  readonly get: (cid: Cid) => Promise<Uint8Array | undefined>
  readonly write: (changes: Changes) => Promise<void>
}

export class BlockStore {
  private bytes = 0
  private readonly pins = new Map<string, Set<Cid>>() // by owner
  private readonly unwritten = new Map<Cid, Uint8Array>() // until the disk has them
  private unwrittenBytes = 0
  private readonly touched = new Set<Cid>()
  private readonly deleted = new Set<Cid>()
  private writing: Promise<void> | undefined
  private failure: unknown // of the disk, for whoever brings the next block

  private constructor (private readonly disk: BlockDisk, private readonly known: Map<Cid, BlockMeta>, private readonly bytesMax: number, private readonly now: () => number) {
    for (const meta of known.values()) this.bytes += meta.size
  }

  static async open (disk: BlockDisk, bytesMax: number, now: () => number = Date.now): Promise<BlockStore> {
    return new BlockStore(disk, await disk.list(), bytesMax, now)
  }

  get usedBytes (): number {
    return this.bytes
  }

  has (cid: Cid): boolean {
    return this.known.has(cid)
  }

  async get (cid: Cid): Promise<Uint8Array | undefined> {
    const meta = this.known.get(cid)
    if (meta === undefined) return undefined
    const block = this.unwritten.get(cid) ?? await this.disk.get(cid)
    if (block === undefined) { // the browser cleared it
      this.forget(cid)
      return undefined
    }
    meta.usedAt = this.now()
    this.touched.add(cid) // goes along with the next write: a lost one costs little
    return block
  }

  /** Keeps a block that was verified. Rejects with CapacityError when what is pinned leaves no room, or the disk has none. */
  async put (cid: Cid, block: Uint8Array): Promise<void> {
    if (this.known.has(cid)) return
    this.makeRoom(block.length)
    this.known.set(cid, { size: block.length, usedAt: this.now() })
    this.bytes += block.length
    this.deleted.delete(cid)
    this.unwritten.set(cid, block)
    this.unwrittenBytes += block.length
    const writing = this.write()
    if (this.unwrittenBytes > UNWRITTEN_BYTES_MAX) await writing
    this.throwFailure()
  }

  /** Returns when the disk has all that was put. Rejects with CapacityError. */
  async flush (): Promise<void> {
    while (this.unwritten.size > 0 || this.deleted.size > 0) await this.write()
    this.throwFailure()
  }

  drop (cid: Cid): void {
    if (!this.known.has(cid)) return
    this.forget(cid)
    this.deleted.add(cid)
  }

  private throwFailure (): void {
    const { failure } = this
    this.failure = undefined
    if (failure !== undefined) throw failure
  }

  /** One write at a time; what comes meanwhile goes with the next one. */
  private async write (): Promise<void> {
    this.writing ??= this.writeAll().finally(() => { this.writing = undefined })
    await this.writing
  }

  private async writeAll (): Promise<void> {
    while (this.unwritten.size > 0 || this.deleted.size > 0) {
      const blocks = new Map(this.unwritten)
      const deleted = [...this.deleted]
      const metas = new Map([...blocks.keys(), ...this.touched].flatMap(cid => {
        const meta = this.known.get(cid)
        return meta === undefined ? [] : [[cid, meta] as const]
      }))
      this.touched.clear()
      this.deleted.clear()
      try {
        await this.disk.write({ blocks, metas, deleted })
      } catch (error) {
        this.failure = error
        for (const cid of blocks.keys()) this.forget(cid)
      }
      for (const [cid, block] of blocks) if (this.unwritten.delete(cid)) this.unwrittenBytes -= block.length
    }
  }

  /** What an owner needs makes no room for others until `unpin`. */
  pin (owner: string, cids: Iterable<Cid>): void {
    this.pins.set(owner, new Set([...this.pins.get(owner) ?? [], ...cids]))
  }

  unpin (owner: string): void {
    this.pins.delete(owner)
  }

  private makeRoom (size: number): void {
    if (this.bytes + size <= this.bytesMax) return
    const pinned = new Set([...this.pins.values()].flatMap(cids => [...cids]))
    const loose = [...this.known].filter(([cid]) => !pinned.has(cid)).sort(([, a], [, b]) => a.usedAt - b.usedAt)
    for (const [cid] of loose) {
      if (this.bytes + size <= this.bytesMax) break
      this.drop(cid)
    }
    if (this.bytes + size > this.bytesMax) throw new CapacityError(`no room for a block of ${size} bytes: ${this.bytes} of ${this.bytesMax} are in use`)
  }

  private forget (cid: Cid): void {
    this.bytes -= this.known.get(cid)?.size ?? 0
    this.known.delete(cid)
    const block = this.unwritten.get(cid)
    if (block !== undefined) {
      this.unwritten.delete(cid)
      this.unwrittenBytes -= block.length
    }
  }
}

/** Blocks in memory, for tests and for browsers that keep nothing. */
export function memoryDisk (): BlockDisk {
  const blocks = new Map<Cid, Uint8Array>()
  return {
    list: async () => new Map([...blocks].map(([cid, block]) => [cid, { size: block.length, usedAt: 0 }])),
    get: async cid => blocks.get(cid),
    write: async changes => {
      for (const cid of changes.deleted) blocks.delete(cid)
      for (const [cid, block] of changes.blocks) blocks.set(cid, block.slice())
    }
  }
}
