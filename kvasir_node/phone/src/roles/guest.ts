// A whole guest, put together: network, membership, store and worker. What differs between a page and Node.js comes in.
import type { PeerId } from '../base/ids.js'
import type { Log } from '../base/log.js'
import type { Network, Traffic } from '../net/network.js'
import { type Pass, PAIR_PROTOCOL, type PairingLink, pair } from '../net/pairing.js'
import { type BlockDisk, BlockStore } from '../store/blockStore.js'
import type { Compute } from './compute.js'
import type { FetchTally, Sha256 } from './download.js'
import { Members } from './members.js'
import { type Notes, SlicesOnDisk } from './slicesOnDisk.js'
import { Worker, type WorkerSnapshot } from './worker.js'

const PAIR_S = 10
const DRAIN_S = 15 // what is still under way after this is left behind

export interface GuestOptions {
  readonly name: string
  readonly compute: Compute
  readonly disk: BlockDisk
  readonly diskBytesMax: number
  readonly notes: Notes
  readonly sha256: Sha256
  readonly log: Log
  readonly changed: () => void
  readonly refused: (words: string) => void
}

export interface GuestSnapshot extends WorkerSnapshot {
  readonly peerId: PeerId
  readonly hubs: number
  readonly problem: string
  readonly traffic: Traffic
  readonly storedBytes: number
}

/** Asks for a pass with the code of a link. Rejects with PairingRefused or PeerError. */
export async function becomeGuest (network: Network, link: PairingLink, name: string): Promise<Pass> {
  await network.connect(link.peer, link.addresses)
  const stream = await network.openStream(link.peer, PAIR_PROTOCOL)
  const timer = setTimeout(() => { stream.reset() }, PAIR_S * 1000)
  try {
    return await pair(stream, link.code, name)
  } finally {
    clearTimeout(timer)
    stream.reset()
  }
}

export class Guest {
  readonly worker: Worker
  readonly members: Members

  private constructor (readonly network: Network, pass: Pass, private readonly store: BlockStore, onDisk: SlicesOnDisk, options: GuestOptions) {
    const tally: FetchTally = { fetched: 0, reused: 0, wasted: 0 }
    this.members = new Members(network, pass, options.name, {
      hubsChanged: hubs => { this.worker.tell({ kind: 'hubs known', hubs }) },
      refused: options.refused
    }, options.log)
    this.worker = new Worker({
      network,
      members: this.members,
      compute: options.compute,
      onDisk,
      store,
      tally,
      sha256: options.sha256,
      log: options.log,
      changed: options.changed,
      open: async (peer, protocol) => await network.openStream(peer, protocol)
    })
  }

  /** `network` is the one that the pass was got by. Does nothing before `run`. */
  static async open (network: Network, pass: Pass, options: GuestOptions): Promise<Guest> {
    const store = await BlockStore.open(options.disk, options.diskBytesMax)
    return new Guest(network, pass, store, await SlicesOnDisk.open(options.notes), options)
  }

  run (): void {
    this.members.run()
  }

  snapshot (): GuestSnapshot {
    const worker = this.worker.snapshot()
    return {
      ...worker,
      problem: worker.problem === '' ? this.members.problem : worker.problem,
      peerId: this.network.peerId,
      hubs: this.members.hubCount,
      traffic: this.network.traffic,
      storedBytes: this.store.usedBytes
    }
  }

  /** Drains and ends; what is stored stays. */
  async leave (): Promise<void> {
    this.worker.pause()
    const until = performance.now() + DRAIN_S * 1000
    while (!this.worker.isEmpty && performance.now() < until) await new Promise(resolve => setTimeout(resolve, 20))
    this.members.stop()
    await this.network.stop()
  }
}
