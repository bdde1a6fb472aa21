// Brings blocks from peers into the store, each verified before it is kept. Several providers at once; a bad block
// blames its provider, and another one is asked. It does not know models.
import { DataError, Misbehaved, PeerError, Unreachable, wordsOf } from '../base/errors.js'
import type { Log } from '../base/log.js'
import { type Cid, type PeerId, digestOf } from '../base/ids.js'
import { equal } from '../base/bytes.js'
import { CallStream } from '../net/callStream.js'
import type { ByteStream } from '../net/byteStream.js'
import type { BlockStore } from '../store/blockStore.js'
import { BLOCKS_PROTOCOL } from '../wire/messages.js'
import { CALLS_MAX, WANT, answerBytesMax, decodeAnswer, encodeWant } from '../wire/blocks.js'

const ASK_MAX = 2 // blocks of one call: a slow link loses little to a timeout, and calls still overlap
const LANES = CALLS_MAX / ASK_MAX // calls to one provider at once
const TIMEOUT_S = 20 // of one call
const BAD_BLOCKS_MAX = 3 // of one provider, before it is left
const FAILURES_MAX = 5 // calls to one provider that failed in a row
const PAUSE_MS = 250 // after a failed call

export type Sha256 = (data: Uint8Array) => Promise<Uint8Array>
export type OpenStream = (peer: PeerId, protocol: string) => Promise<ByteStream>

/** What downloads cost, since the start. */
export interface FetchTally { fetched: number, reused: number, wasted: number }

export interface DownloadTools {
  readonly open: OpenStream
  readonly store: BlockStore
  readonly sha256: Sha256
  readonly tally: FetchTally
  readonly log: Log
}

interface Wanted { readonly cid: Cid, readonly without: Set<PeerId> } // who does not have it, or sent it bad

/** Blocks that are not in the store come; rejects with Unreachable, CapacityError, or the signal's reason. */
export async function fetchBlocks (
  tools: DownloadTools, providers: readonly PeerId[], cids: Iterable<Cid>, signal: AbortSignal, progress: (bytes: number) => void = () => {}
): Promise<void> {
  const missing = [...new Set(cids)].filter(cid => !tools.store.has(cid))
  if (missing.length === 0) return
  const download = new Download(tools, missing, signal, progress)
  await Promise.all([...new Set(providers)].map(async provider => { await download.runProvider(provider) }))
  download.check()
}

class Download {
  private readonly waiting: Wanted[]
  private asked = 0
  private failure: unknown
  private lastWords = 'there is no provider to ask'
  private wakers: Array<() => void> = []

  constructor (private readonly tools: DownloadTools, cids: readonly Cid[], private readonly signal: AbortSignal, private readonly progress: (bytes: number) => void) {
    this.waiting = cids.map(cid => ({ cid, without: new Set<PeerId>() }))
  }

  check (): void {
    this.signal.throwIfAborted()
    if (this.failure !== undefined) throw this.failure
    if (this.waiting.length > 0) throw new Unreachable(`${this.waiting.length} blocks could not be fetched: ${this.lastWords}`)
  }

  async runProvider (peer: PeerId): Promise<void> {
    let calls: CallStream
    try {
      calls = new CallStream(await this.tools.open(peer, BLOCKS_PROTOCOL), { inFlightMax: CALLS_MAX, bodyBytesMax: answerBytesMax(ASK_MAX) })
    } catch (error) {
      this.lastWords = wordsOf(error)
      return
    }
    const provider = { peer, calls, bad: 0, failures: 0 }
    try {
      await Promise.all(Array.from({ length: LANES }, async () => { await this.runLane(provider) }))
    } finally {
      calls.reset('the download is over')
    }
  }

  private async runLane (provider: { peer: PeerId, calls: CallStream, bad: number, failures: number }): Promise<void> {
    while (this.failure === undefined && !this.signal.aborted && provider.bad < BAD_BLOCKS_MAX && provider.failures < FAILURES_MAX) {
      const batch = this.take(provider.peer)
      if (batch.length === 0) {
        if (this.asked === 0) return
        await new Promise<void>(resolve => { this.wakers.push(resolve) }) // what others owe may come back to be asked
        continue
      }
      try {
        await this.ask(provider, batch)
        provider.failures = 0
      } catch (error) {
        if (!(error instanceof PeerError)) this.failure ??= error
        this.lastWords = wordsOf(error)
        provider.failures += error instanceof Misbehaved ? FAILURES_MAX : 1
        await new Promise(resolve => setTimeout(resolve, PAUSE_MS))
      }
    }
  }

  private take (peer: PeerId): Wanted[] {
    const batch: Wanted[] = []
    for (let at = 0; at < this.waiting.length && batch.length < ASK_MAX;) {
      if (this.waiting[at]!.without.has(peer)) at++
      else batch.push(...this.waiting.splice(at, 1))
    }
    this.asked += batch.length
    return batch
  }

  private async ask (provider: { peer: PeerId, calls: CallStream, bad: number }, batch: Wanted[]): Promise<void> {
    const left = new Set(batch)
    try {
      const body = await provider.calls.call(WANT, encodeWant(batch.map(wanted => wanted.cid)), TIMEOUT_S, this.signal)
      const answer = decodeAnswer(body, batch.length)
      await Promise.all(batch.map(async (wanted, place) => {
        const block = answer[place]!
        if (block === 'missing') wanted.without.add(provider.peer)
        else if (block !== 'not now' && await this.keep(provider, wanted, block)) left.delete(wanted)
      }))
    } finally {
      this.waiting.unshift(...left)
      this.asked -= batch.length
      const wakers = this.wakers
      this.wakers = []
      for (const wake of wakers) wake()
    }
  }

  private async keep (provider: { peer: PeerId, bad: number }, wanted: Wanted, block: Uint8Array): Promise<boolean> {
    const { tally, store, sha256, log } = this.tools
    if (!equal(await sha256(block), digestOf(wanted.cid))) {
      tally.wasted += block.length
      wanted.without.add(provider.peer)
      provider.bad++
      this.lastWords = `${provider.peer} sent bytes that are not block ${wanted.cid}`
      log(this.lastWords)
      return false
    }
    await store.put(wanted.cid, block)
    tally.fetched += block.length
    this.progress(block.length)
    return true
  }
}

/** A block of the store, verified again: what a browser keeps may be damaged. Rejects with DataError. */
export async function readBlock (tools: DownloadTools, cid: Cid): Promise<Uint8Array> {
  const block = await tools.store.get(cid)
  if (block !== undefined && equal(await tools.sha256(block), digestOf(cid))) return block
  tools.store.drop(cid)
  throw new DataError(`block ${cid} is not here, or was damaged and dropped; fetch it again`)
}

