// What a page keeps between visits, in IndexedDB: its key, its pass, its owner's wishes, and blocks.
import { CapacityError, wordsOf } from '../base/errors.js'
import type { Cid } from '../base/ids.js'
import type { BlockDisk, BlockMeta } from './blockStore.js'

const NAME = 'kvasir'
const VERSION = 1
const STATE = 'state' // name -> value
const BLOCKS = 'blocks' // Cid -> bytes
const METAS = 'metas' // Cid -> BlockMeta

export class Database {
  private constructor (private readonly db: IDBDatabase) {}

  static async open (): Promise<Database> {
    const request = indexedDB.open(NAME, VERSION)
    request.onupgradeneeded = () => { for (const store of [STATE, BLOCKS, METAS]) request.result.createObjectStore(store) }
    return new Database(await settled(request))
  }

  async get<T> (name: string): Promise<T | undefined> {
    return await settled<T | undefined>(this.db.transaction(STATE).objectStore(STATE).get(name))
  }

  async set (name: string, value: unknown): Promise<void> {
    await this.write([STATE], transaction => { transaction.objectStore(STATE).put(value, name) })
  }

  async delete (name: string): Promise<void> {
    await this.write([STATE], transaction => { transaction.objectStore(STATE).delete(name) })
  }

  /** Rejects with CapacityError where the browser gives no more room. */
  private async write (stores: string[], change: (transaction: IDBTransaction) => void): Promise<void> {
    // What is lost in a crash is fetched again: waiting for the disk would cost more.
    const transaction = this.db.transaction(stores, 'readwrite', { durability: 'relaxed' })
    change(transaction)
    await new Promise<void>((resolve, reject) => {
      transaction.oncomplete = () => { resolve() }
      transaction.onabort = transaction.onerror = () => {
        reject(new CapacityError(`the browser keeps nothing more for this page: ${wordsOf(transaction.error)}`))
      }
    })
  }

  blocks (): BlockDisk {
    return {
      list: async () => {
        const metas = this.db.transaction(METAS).objectStore(METAS)
        const [cids, values] = await Promise.all([settled(metas.getAllKeys()), settled<BlockMeta[]>(metas.getAll())])
        return new Map(cids.map((cid, place) => [cid as Cid, values[place]!]))
      },
      get: async cid => await settled<Uint8Array | undefined>(this.db.transaction(BLOCKS).objectStore(BLOCKS).get(cid)),
      write: async ({ blocks, metas, deleted }) => {
        await this.write([BLOCKS, METAS], transaction => {
          const [blockStore, metaStore] = [transaction.objectStore(BLOCKS), transaction.objectStore(METAS)]
          for (const cid of deleted) for (const store of [blockStore, metaStore]) store.delete(cid)
          for (const [cid, block] of blocks) blockStore.put(block.slice(), cid) // a view would take its whole buffer along
          for (const [cid, meta] of metas) metaStore.put(meta, cid)
        })
      }
    }
  }
}

async function settled<T> (request: IDBRequest<T>): Promise<T> {
  return await new Promise((resolve, reject) => {
    request.onsuccess = () => { resolve(request.result) }
    request.onerror = () => { reject(new CapacityError(`this browser keeps nothing for this page: ${wordsOf(request.error)}`)) }
  })
}
