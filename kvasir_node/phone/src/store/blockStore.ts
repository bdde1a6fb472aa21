// Blocks by content address, kept within a quota: what nothing pins makes room, the longest unused first.
// It does not know where bytes lie: that is `BlockDisk`, in IndexedDB for a page and in memory for tests.
import { CapacityError } from '../base/errors.js'
import type { Cid } from '../base/ids.js'

export interface BlockMeta { readonly size: number, usedAt: number }

/** Where blocks lie. `put` rejects with CapacityError where there is no room. */
export interface BlockDisk {
  readonly list: () => Promise<Map<Cid, BlockMeta>>
  readonly get: (cid: Cid) => Promise<Uint8Array | undefined>
  readonly put: (cid: Cid, block: Uint8Array, meta: BlockMeta) => Promise<void>
  readonly touch: (cid: Cid, meta: BlockMeta) => Promise<void>
  readonly delete: (cids: readonly Cid[]) => Promise<void>
}

export class BlockStore {
  private bytes = 0
  private readonly pins = new Map<string, Set<Cid>>() // by owner

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
    const block = await this.disk.get(cid)
    if (block === undefined) { // the browser cleared it
      this.forget(cid)
      return undefined
    }
    meta.usedAt = this.now()
    await this.disk.touch(cid, meta)
    return block
  }

  /** Keeps a block that was verified. Rejects with CapacityError when what is pinned leaves no room. */
  async put (cid: Cid, block: Uint8Array): Promise<void> {
    if (this.known.has(cid)) return
    await this.makeRoom(block.length)
    const meta = { size: block.length, usedAt: this.now() }
    this.known.set(cid, meta)
    this.bytes += meta.size
    try {
      await this.disk.put(cid, block, meta)
    } catch (error) {
      this.forget(cid)
      throw error
    }
  }

  async drop (cid: Cid): Promise<void> {
    if (!this.known.has(cid)) return
    this.forget(cid)
    await this.disk.delete([cid])
  }

  /** What an owner needs makes no room for others until `unpin`. */
  pin (owner: string, cids: Iterable<Cid>): void {
    this.pins.set(owner, new Set([...this.pins.get(owner) ?? [], ...cids]))
  }

  unpin (owner: string): void {
    this.pins.delete(owner)
  }

  async clear (): Promise<void> {
    await this.disk.delete([...this.known.keys()])
    this.known.clear()
    this.bytes = 0
  }

  private async makeRoom (size: number): Promise<void> {
    if (this.bytes + size <= this.bytesMax) return
    const pinned = new Set([...this.pins.values()].flatMap(cids => [...cids]))
    const loose = [...this.known].filter(([cid]) => !pinned.has(cid)).sort(([, a], [, b]) => a.usedAt - b.usedAt)
    const evicted: Cid[] = []
    for (const [cid] of loose) {
      if (this.bytes + size <= this.bytesMax) break
      this.forget(cid)
      evicted.push(cid)
    }
    if (evicted.length > 0) await this.disk.delete(evicted)
    if (this.bytes + size > this.bytesMax) throw new CapacityError(`no room for a block of ${size} bytes: ${this.bytes} of ${this.bytesMax} are in use`)
  }

  private forget (cid: Cid): void {
    this.bytes -= this.known.get(cid)?.size ?? 0
    this.known.delete(cid)
  }
}

/** Blocks in memory, for tests and for browsers that keep nothing. */
export function memoryDisk (): BlockDisk {
  const blocks = new Map<Cid, Uint8Array>()
  return {
    list: async () => new Map([...blocks].map(([cid, block]) => [cid, { size: block.length, usedAt: 0 }])),
    get: async cid => blocks.get(cid),
    put: async (cid, block) => { blocks.set(cid, block.slice()) },
    touch: async () => {},
    delete: async cids => { for (const cid of cids) blocks.delete(cid) }
  }
}
