// The worker: carries out what decide/placement.ts decides, and computes experts for coordinators. It pulls: it asks
// hubs, fetches, connects out, and leaves when its lease ends. kvasir_node/roles/worker.py is the same elsewhere.
import { CapacityError, DataError, KvasirError, Misbehaved, PeerError, wordsOf } from '../base/errors.js'
import { type PeerId, sliceText } from '../base/ids.js'
import { type Assignment, type Command, type Event, Placement, type Stage } from '../decide/placement.js'
import { weightsBytes } from '../model/expertFile.js'
import { CallStream } from '../net/callStream.js'
import type { Network } from '../net/network.js'
import { EXPERTS_PROTOCOL, MARKET_PROTOCOL, MarketMethod, type Part, type Renewal, encodePoll, encodeRenewals, readPollAnswer, readVerdicts } from '../wire/messages.js'
import { Encoding } from '../wire/tensors.js'
import type { Compute } from './compute.js'
import type { DownloadTools } from './download.js'
import { type FetchedSlice, fetchSlice, readBlob } from './fetcher.js'
import { Link } from './link.js'
import type { Members } from './members.js'
import type { SlicesOnDisk } from './slicesOnDisk.js'

const CALL_S = 5 // of the market
const MARKET_BYTES_MAX = 1 << 20
const UNLOAD_GRACE_MS = 1000 // calls that were on their way when we detached are still answered
const SLICE_GUESS_BYTES = 16 << 20 // of a slice of an unknown model
const TIMED_ROWS = 16 // what a call's computing is told for, see docs/phone_protocol.md
export const LIMITS = { slicesMax: 16, pollIntervalS: 2, renewIntervalS: 3 }

export interface WorkerTools extends DownloadTools {
  readonly network: Network
  readonly members: Members
  readonly compute: Compute
  readonly onDisk: SlicesOnDisk
  readonly changed: () => void // the snapshot is another one
}

export interface WorkerSnapshot {
  readonly stages: ReadonlyArray<{ readonly slice: string, readonly model: string, readonly stage: Stage }>
  readonly calls: number
  readonly rows: number
  readonly fetchedBytes: number
  readonly reusedBytes: number
  readonly problem: string
}

interface Step { readonly controller: AbortController, readonly ended: Promise<void> }

export class Worker {
  private readonly mind = new Placement(LIMITS, Math.random)
  private readonly steps = new Map<string, Step>()
  private readonly fetched = new Map<string, FetchedSlice>() // by lease, until its drain
  private readonly loadedBytes = new Map<string, number>() // by lease
  private readonly links = new Map<string, Promise<Link>>()
  private readonly progress = new Map<string, number>()
  private readonly callS = new Map<PeerId, number>() // the computing of TIMED_ROWS, by coordinator
  private timer: ReturnType<typeof setTimeout> | undefined
  private problem = ''
  private calls = 0
  private rows = 0

  constructor (private readonly tools: WorkerTools) {}

  /** Tells the mind something; what it commands is begun at once. */
  tell (event: Event): void {
    for (const command of this.mind.handle(event, performance.now() / 1000)) this.begin(command)
    this.schedule()
    this.tools.changed()
  }

  /** Gives everything back in good order and takes nothing new; nothing in flight is dropped. */
  pause (): void {
    this.tell({ kind: 'paused' })
  }

  resume (): void {
    this.tell({ kind: 'resumed' })
  }

  get isEmpty (): boolean {
    return this.mind.stages().length === 0
  }

  snapshot (): WorkerSnapshot {
    const stages = this.mind.stages().map(([assignment, stage]) => ({
      slice: sliceText(assignment.slice), stage, model: this.fetched.get(assignment.lease)?.manifest.name ?? ''
    }))
    const { fetched, reused } = this.tools.tally
    return { stages, calls: this.calls, rows: this.rows, fetchedBytes: fetched, reusedBytes: reused, problem: this.problem }
  }

  private schedule (): void {
    clearTimeout(this.timer)
    const at = this.mind.nextAt()
    if (at === undefined) return
    const pauseMs = Math.max(10, at * 1000 - performance.now())
    this.timer = setTimeout(() => { this.tell({ kind: 'tick' }) }, Math.min(pauseMs, 60_000))
  }

  // Commands

  private begin (command: Command): void {
    switch (command.kind) {
      case 'poll': return this.start(async () => await this.poll(command.hub), { kind: 'poll failed', hub: command.hub })
      case 'renew': return this.start(
        async () => await this.renew(command.hub, command.leases),
        ...command.leases.map(([assignment]): Event => ({ kind: 'renew failed', lease: assignment.lease, hub: command.hub }))
      )
      case 'release': return this.start(async () => await this.release(command.hub, command.assignments))
      case 'drain': return this.start(async () => await this.drain(command.assignment), { kind: 'drained', lease: command.assignment.lease })
      case 'fetch': return this.startStep(command.assignment, async signal => { await this.fetch(command.assignment, signal) })
      case 'load': return this.startStep(command.assignment, async signal => { await this.load(command.assignment, signal) })
      case 'attach': return this.startStep(command.assignment, async () => { await this.attach(command.assignment) })
    }
  }

  /** `failed` is what the mind hears when it cannot be done; a bug costs one command, not the page. */
  private start (act: () => Promise<Event[]>, ...failed: Event[]): void {
    act().catch((error: unknown) => {
      this.tools.log(error instanceof KvasirError ? error.message : `a bug of ours: ${String(error)}`)
      return failed
    }).then(events => { for (const event of events) this.tell(event) }, () => {})
  }

  private startStep (assignment: Assignment, act: (signal: AbortSignal) => Promise<void>): void {
    const { lease } = assignment
    const controller = new AbortController()
    const taken = act(controller.signal).then((): Event => {
      this.advance(lease)
      this.problem = ''
      return { kind: 'step done', lease }
    }, (error: unknown): Event => {
      if (!controller.signal.aborted) {
        this.problem = error instanceof KvasirError ? error.message : `a bug of ours: ${String(error)}`
        this.tools.log(`slice ${sliceText(assignment.slice)}: ${this.problem}`)
      }
      return { kind: 'step failed', lease, retry: error instanceof PeerError && error.retryable }
    })
    const ended = taken.then(event => { if (!controller.signal.aborted) this.tell(event) })
    this.steps.set(lease, { controller, ended: taken.then(() => {}) })
    void ended
  }

  private advance (lease: string): void {
    this.progress.set(lease, (this.progress.get(lease) ?? 0) + 1)
  }

  // The market

  private async ask (hub: PeerId, method: number, body: Uint8Array): Promise<Uint8Array> {
    const calls = new CallStream(await this.tools.network.openStream(hub, MARKET_PROTOCOL), { inFlightMax: 1, bodyBytesMax: MARKET_BYTES_MAX })
    try {
      return await calls.call(method, body, CALL_S)
    } finally {
      calls.reset('asked')
    }
  }

  private async poll (hub: PeerId): Promise<Event[]> {
    const poll = encodePoll({
      memoryBytes: this.room(),
      have: this.tools.onDisk.list(),
      busy: this.mind.stages().map(([assignment]): Part => assignment),
      roundTrips: this.roundTrips()
    })
    const answer = readPollAnswer(await this.ask(hub, MarketMethod.POLL, poll))
    if ('retryAfterS' in answer) return [{ kind: 'nothing offered', retryAfterS: answer.retryAfterS }]
    this.tools.log(`took a lease on slice ${sliceText(answer.slice)} of ${answer.model}`)
    return [{ kind: 'offered', assignment: { ...answer, hub }, ttlS: answer.ttlS }]
  }

  /** What a call to each coordinator that we know takes: the way there and back, and computing. */
  private roundTrips (): Array<[PeerId, number]> {
    return [...this.callS].flatMap(([peer, computeS]): Array<[PeerId, number]> => {
      const rttS = this.tools.network.roundTripS(peer)
      return rttS === undefined ? [] : [[peer, rttS + computeS]]
    })
  }

  /** Memory that is free when all that is being fetched has come. */
  private room (): number {
    const taken = this.mind.stages().reduce((sum, [{ lease }]) => sum + (this.loadedBytes.get(lease) ?? SLICE_GUESS_BYTES), 0)
    return Math.max(0, Math.trunc(this.tools.compute.bytesMax - taken))
  }

  private async renew (hub: PeerId, leases: ReadonlyArray<readonly [Assignment, boolean]>): Promise<Event[]> {
    const request = encodeRenewals(leases.map(([assignment, serving]) => this.renewal(assignment, serving)))
    const verdicts = readVerdicts(await this.ask(hub, MarketMethod.RENEW, request))
    if (verdicts.length !== leases.length) throw new Misbehaved('bad_message', `${leases.length} renewals were answered with ${verdicts.length} verdicts`)
    return leases.map(([{ lease, slice }], place) => {
      const { ttlS, reason } = verdicts[place]!
      if (ttlS <= 0) this.tools.log(`the lease on slice ${sliceText(slice)} ends: ${reason}`)
      return { kind: 'renewed', lease, ttlS }
    })
  }

  private async release (hub: PeerId, assignments: readonly Assignment[]): Promise<Event[]> {
    await this.ask(hub, MarketMethod.RELEASE, encodeRenewals(assignments.map(each => this.renewal(each, false))))
    return []
  }

  private renewal (assignment: Assignment, serving: boolean): Renewal {
    const { lease, model, slice, coordinator } = assignment
    return { lease, model, slice, coordinator, serving, progress: this.progress.get(lease) ?? 0 }
  }

  // Fetch, load, attach, leave

  private async reach (assignment: Assignment): Promise<void> {
    const { coordinator, addresses } = assignment
    await this.tools.members.require(coordinator, addresses.filter(address => address.endsWith(`/p2p/${coordinator}`)))
    if (!await this.tools.members.isCoordinator(coordinator)) throw new Misbehaved('not_a_member', `${coordinator} may not be a coordinator`)
  }

  private async fetch (assignment: Assignment, signal: AbortSignal): Promise<void> {
    await this.reach(assignment)
    const fetched = await fetchSlice(this.tools, assignment.model, assignment.slice, {
      providers: [assignment.coordinator],
      owner: assignment.lease,
      signal,
      progress: () => { this.advance(assignment.lease); this.tools.changed() }
    })
    this.fetched.set(assignment.lease, fetched)
    this.tools.store.flush().then(async () => { await this.tools.onDisk.note(assignment) }, (error: unknown) => { this.tools.log(wordsOf(error)) })
  }

  private async load (assignment: Assignment, signal: AbortSignal): Promise<void> {
    const { manifest, experts } = this.fetched.get(assignment.lease)!
    const { layer } = assignment.slice
    const parts = manifest.layerParts.get(layer)!
    const isInt8 = assignment.dtype === 'int8'
    const bytes = experts.size * weightsBytes(parts, isInt8)
    const others = [...this.loadedBytes].reduce((sum, [lease, size]) => sum + (lease === assignment.lease ? 0 : size), 0)
    if (others + bytes > this.tools.compute.bytesMax) throw new CapacityError(`${experts.size} experts take ${bytes} bytes; ${others} of ${this.tools.compute.bytesMax} are taken`)
    this.loadedBytes.set(assignment.lease, bytes)
    const places = this.tools.compute.places(experts.size, bytes)
    for (const [place, [index, blob]] of [...experts].entries()) {
      signal.throwIfAborted()
      const file = await readBlob(this.tools, blob)
      await this.tools.compute.load(assignment.model, manifest, { layer, index, file, parts, isInt8 }, places[place]!)
    }
    await this.selfTest(assignment, [...experts.keys()])
  }

  /** Rows of ones through each expert: what is not finite here would only fail its trial. It also times a call. */
  private async selfTest (assignment: Assignment, experts: readonly number[]): Promise<void> {
    const { manifest } = this.fetched.get(assignment.lease)!
    const values = new Float32Array(TIMED_ROWS * manifest.hiddenSize).fill(1)
    const count = Math.max(TIMED_ROWS, experts.length)
    const { values: sums, computedS } = await this.tools.compute.sums(assignment.model, {
      layer: assignment.slice.layer,
      encoding: Encoding.FLOAT32,
      rowCount: TIMED_ROWS,
      hiddenSize: manifest.hiddenSize,
      pairWeight: new Float32Array(count).fill(1),
      pairRow: Uint32Array.from({ length: count }, (_, place) => place % TIMED_ROWS),
      pairExpert: Uint32Array.from({ length: count }, (_, place) => experts[place % experts.length]!),
      values: new Uint8Array(values.buffer)
    })
    if (!sums.every(Number.isFinite)) throw new DataError(`the experts of layer ${assignment.slice.layer} give values that are not finite here`)
    this.callS.set(assignment.coordinator, computedS)
  }

  private async attach (assignment: Assignment): Promise<void> {
    await this.reach(assignment)
    const link = await this.linkTo(assignment)
    await link.attach(assignment)
  }

  /** The link that all slices of one coordinator share; opened by the first that needs it. */
  private async linkTo (assignment: Assignment): Promise<Link> {
    const key = linkKey(assignment)
    const known = this.links.get(key)
    if (known !== undefined) return await known
    const opening = this.openLink(assignment)
    this.links.set(key, opening)
    opening.catch(() => { this.links.delete(key) })
    return await opening
  }

  private async openLink (assignment: Assignment): Promise<Link> {
    const { coordinator, model, dtype, lease } = assignment
    const { manifest } = this.fetched.get(lease)!
    const link = new Link(await this.tools.network.openStream(coordinator, EXPERTS_PROTOCOL), coordinator, model, dtype, manifest, {
      compute: this.tools.compute,
      log: this.tools.log,
      computed: rows => { this.calls++; this.rows += rows },
      standingTold: (told, proven) => { this.tell({ kind: 'standing told', lease: told, proven }) }
    })
    void link.ended.then(reason => {
      this.tools.log(`the link to the coordinator ended: ${reason}`)
      this.links.delete(linkKey(assignment))
      for (const each of link.leases()) this.tell({ kind: 'coordinator lost', lease: each })
    })
    return link
  }

  /** Orderly: tell the coordinator, answer what is still on its way, then forget the weights. */
  private async drain (assignment: Assignment): Promise<Event[]> {
    const { lease, model, slice } = assignment
    const step = this.steps.get(lease)
    step?.controller.abort()
    await step?.ended
    const link = await this.links.get(linkKey(assignment))?.catch(() => undefined)
    if (link !== undefined && await link.detach(assignment)) {
      await new Promise(resolve => setTimeout(resolve, UNLOAD_GRACE_MS))
      await link.finishCalls()
    }
    for (const index of this.fetched.get(lease)?.experts.keys() ?? []) this.tools.compute.drop(model, slice.layer, index)
    this.tools.store.unpin(lease)
    for (const table of [this.steps, this.fetched, this.loadedBytes, this.progress]) table.delete(lease)
    if (link !== undefined && link.leases().length === 0) {
      this.links.delete(linkKey(assignment))
      link.close()
    }
    this.tools.log(`left slice ${sliceText(slice)}`)
    return [{ kind: 'drained', lease }]
  }
}

function linkKey (assignment: Assignment): string {
  return `${assignment.coordinator}/${assignment.model}/${assignment.dtype}`
}

