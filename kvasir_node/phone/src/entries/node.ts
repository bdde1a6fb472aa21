// The page's node, in a Worker of its own: the whole guest runs here, so that the screen never waits for it.
import '../base/polyfill.js'
import { KvasirError, UsageError, wordsOf } from '../base/errors.js'
import { type Wishes, objection } from '../decide/manners.js'
import { Network } from '../net/network.js'
import { gatherSends } from '../net/gatheredSocket.js'
import { PairingRefused, type Pass, readLink } from '../net/pairing.js'
import { DailyTraffic } from '../page/daily.js'
import { openSha256 } from '../page/hashing.js'
import { openKernelModule } from '../page/kernelFile.js'
import type { FromNode, Phase, ToNode } from '../page/messages.js'
import { portHere } from '../roles/computeEndpoint.js'
import { ComputePool, type Port } from '../roles/computePool.js'
import { Guest, becomeGuest } from '../roles/guest.js'
import { Database } from '../store/database.js'
import type { Part } from '../wire/messages.js'

const WISHES: Wishes = { isPaused: false, onBatteryToo: false, bytesPerDayMax: 2e9, memoryBytes: 256e6, diskBytes: 1e9 }
const REPORT_MS = 250
const SEED_BYTES = 32
const WORKERS_MAX = 8

const scope = self as unknown as DedicatedWorkerGlobalScope

class PageNode {
  private phase: Phase = 'starting'
  private words = ''
  private senses: { isHidden: boolean, isCharging: boolean | undefined } = { isHidden: false, isCharging: undefined }
  private wishes = WISHES
  private guest: Guest | undefined
  private isWorking = false
  private isReporting = false

  private constructor (private readonly database: Database, private readonly day: DailyTraffic, private readonly network: Network) {}

  static async open (): Promise<PageNode> {
    const database = await Database.open()
    const seed = await database.get<Uint8Array>('seed') ?? crypto.getRandomValues(new Uint8Array(SEED_BYTES))
    await database.set('seed', seed)
    const network = await Network.open({ seed })
    const node = new PageNode(database, await DailyTraffic.open(database), network)
    node.wishes = { ...WISHES, ...await database.get<Wishes>('wishes') }
    return node
  }

  /** Joins by the pass that is kept, or by the code in the link. */
  async start (link: string, name: string, cores: number): Promise<void> {
    const pass = await this.passFor(link, name)
    if (pass === undefined) {
      this.turn('needs code', 'Scan the code that the node shows: `kvasir-node ticket --phone --qr`.')
      return
    }
    say({ kind: 'linked' })
    this.turn('joining', '')
    const workers = Math.max(1, Math.min(WORKERS_MAX, cores - 1)) // this thread needs one, too
    const ports = [portHere(), ...Array.from({ length: workers }, () => new Worker(new URL('compute.js', import.meta.url), { type: 'module' }) as unknown as Port)]
    this.guest = await Guest.open(this.network, pass, {
      name,
      compute: new ComputePool(ports, await openKernelModule(), this.wishes.memoryBytes),
      disk: this.database.blocks(),
      diskBytesMax: this.wishes.diskBytes,
      notes: {
        read: async () => await this.database.get<Part[]>('slices') ?? [],
        write: async parts => { await this.database.set('slices', parts) }
      },
      sha256: await openSha256(),
      log: text => { console.info(text) },
      changed: () => { this.report() },
      refused: words => { void this.refused(words) }
    })
    this.guest.worker.pause() // until the wishes were looked at
    this.guest.run()
    this.look()
    setInterval(() => { this.look() }, REPORT_MS * 4)
  }

  /** By the link, if there is one; a code that serves no more does not cost the pass that is kept. */
  private async passFor (link: string, name: string): Promise<Pass | undefined> {
    const kept = await this.database.get<Pass>('pass')
    if (link === '') return kept
    this.turn('joining', 'Asking the node for a pass …')
    try {
      const pass = await becomeGuest(this.network, readLink(link), name)
      await this.database.set('pass', pass)
      return pass
    } catch (error) {
      if (kept !== undefined && error instanceof PairingRefused) return kept
      throw error
    }
  }

  private async refused (words: string): Promise<void> {
    await this.database.delete('pass')
    await this.guest?.leave()
    this.turn('needs code', `The node does not let this page in: ${words}`)
  }

  sense (isHidden: boolean, isCharging: boolean | undefined): void {
    if (this.senses.isHidden && !isHidden) this.guest?.members.wake()
    this.senses = { isHidden, isCharging }
    this.look()
  }

  async wish (wishes: Wishes): Promise<void> {
    this.wishes = wishes
    this.look()
    await this.database.set('wishes', wishes)
  }

  async leave (): Promise<void> {
    this.turn('left', 'Giving back what is held …')
    const { guest } = this
    this.guest = undefined
    await guest?.leave()
    this.turn('left', '')
  }

  async forget (): Promise<void> {
    await this.leave()
    for (const name of ['pass', 'seed', 'slices']) await this.database.delete(name)
    const disk = this.database.blocks()
    await disk.write({ blocks: new Map(), metas: new Map(), deleted: [...(await disk.list()).keys()] })
    this.turn('needs code', 'Everything is forgotten. Scan a new code to help again.')
  }

  async moveAway (): Promise<void> {
    await this.leave()
    this.turn('elsewhere', 'Another tab of this browser has taken over.')
  }

  fail (error: unknown): void {
    console.error(error)
    const isOfCode = error instanceof PairingRefused || error instanceof UsageError
    const isKnown = error instanceof KvasirError
    this.turn(isOfCode ? 'needs code' : 'failed', isOfCode ? wordsOf(error) : `${isKnown ? '' : 'A bug of ours: '}${wordsOf(error)}. Reload to try again.`)
  }

  /** Works or rests, as its owner wishes and as things are. */
  private look (): void {
    const { guest } = this
    if (guest === undefined) return
    const { received, sent } = guest.snapshot().traffic
    void this.day.note(received + sent)
    const mayWork = this.objection() === ''
    if (mayWork !== this.isWorking) {
      this.isWorking = mayWork
      if (mayWork) guest.worker.resume()
      else guest.worker.pause()
    }
    this.report()
  }

  private objection (): string {
    return objection(this.wishes, { ...this.senses, bytesToday: this.day.bytes })
  }

  private turn (phase: Phase, words: string): void {
    this.phase = phase
    this.words = words
    this.reportNow()
  }

  private report (): void {
    if (this.isReporting) return
    this.isReporting = true
    setTimeout(() => {
      this.isReporting = false
      this.reportNow()
    }, REPORT_MS)
  }

  private reportNow (): void {
    const guest = this.guest?.snapshot() ?? null
    const phase = this.phase === 'joining' && guest !== null && guest.hubs > 0 ? 'joined' : this.phase === 'joined' && guest?.hubs === 0 ? 'joining' : this.phase
    this.phase = phase
    say({ kind: 'state', state: { phase, words: this.words, objection: this.objection(), bytesToday: this.day.bytes, wishes: this.wishes, guest } })
  }
}

function say (message: FromNode): void {
  scope.postMessage(message)
}

/** One tab works for all of this browser: two would be one peer in two places. The newest goes on. */
function takeOver (moveAway: () => void): void {
  const channel = new BroadcastChannel('kvasir')
  channel.postMessage('here')
  channel.onmessage = () => {
    channel.close()
    moveAway()
  }
}

gatherSends()
const opening = PageNode.open()
scope.onmessage = ({ data: message }: MessageEvent<ToNode>) => {
  opening.then(async node => {
    switch (message.kind) {
      case 'start':
        takeOver(() => { void node.moveAway() })
        return await node.start(message.link, message.name, message.cores).catch((error: unknown) => { node.fail(error) })
      case 'senses': return node.sense(message.isHidden, message.isCharging ?? undefined)
      case 'wishes': return await node.wish(message.wishes)
      case 'leave': return await node.leave()
      case 'forget': return await node.forget()
    }
  }).catch((error: unknown) => {
    console.error(error)
    const words = `This browser keeps nothing for this page, or a bug of ours: ${wordsOf(error)}`
    say({ kind: 'state', state: { phase: 'failed', words, objection: '', bytesToday: 0, wishes: WISHES, guest: null } })
  })
}
