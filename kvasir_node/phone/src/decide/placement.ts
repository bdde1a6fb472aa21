// The worker's mind: when to ask the market, what to do with a lease, and when to leave. The same machine as
// kvasir_node/decide/placement.py, without gossiped tables, which a page does not hear. Pure: `handle` takes an event
// and the time (s), and returns commands; roles/worker.ts carries them out.
//
//     (offer) fetching -> loading -> trial -> serving -> draining -> gone
//     lost coordinator: back to trial, connecting again with growing pauses until patience ends, or the lease if the
//     slice was not proven: of one that was, the coordinator remembers the proof, and an outage may be our own
import type { Cid, PeerId, SliceId } from '../base/ids.js'
import { sliceText } from '../base/ids.js'

export type Stage = 'fetching' | 'loading' | 'trial' | 'serving' | 'draining'

/** A lease as the worker holds it. */
export interface Assignment {
  readonly lease: string
  readonly model: Cid
  readonly dtype: string
  readonly slice: SliceId
  readonly coordinator: PeerId
  readonly addresses: readonly string[]
  readonly hub: PeerId
}

export type Event =
  | { readonly kind: 'hubs known', readonly hubs: readonly PeerId[] }
  | { readonly kind: 'offered', readonly assignment: Assignment, readonly ttlS: number }
  | { readonly kind: 'nothing offered', readonly retryAfterS: number }
  | { readonly kind: 'poll failed', readonly hub: PeerId }
  | { readonly kind: 'step done', readonly lease: string }
  | { readonly kind: 'step failed', readonly lease: string, readonly retry: boolean }
  | { readonly kind: 'standing told', readonly lease: string, readonly proven: boolean }
  | { readonly kind: 'coordinator lost', readonly lease: string }
  | { readonly kind: 'renewed', readonly lease: string, readonly ttlS: number }
  | { readonly kind: 'renew failed', readonly lease: string, readonly hub: PeerId }
  | { readonly kind: 'drained', readonly lease: string }
  | { readonly kind: 'paused' } | { readonly kind: 'resumed' } | { readonly kind: 'tick' }

export type Command =
  | { readonly kind: 'poll', readonly hub: PeerId }
  | { readonly kind: 'fetch' | 'load' | 'attach' | 'drain', readonly assignment: Assignment }
  | { readonly kind: 'renew', readonly hub: PeerId, readonly leases: ReadonlyArray<readonly [Assignment, boolean]> }
  | { readonly kind: 'release', readonly hub: PeerId, readonly assignments: readonly Assignment[] }

export interface PlacementLimits {
  readonly slicesMax: number
  readonly pollIntervalS: number
  readonly renewIntervalS: number
}

const ATTACH_PAUSE_S = 0.5 // before the first new attempt; doubles ...
const ATTACH_PAUSE_MAX_S = 8 // ... up to this
const ATTACH_PATIENCE_S = 60 // without a coordinator this long, the lease is given back
const RETRY_MAX_S = 600
const FAILURE_PAUSE_MAX_S = 300 // polls pause after a failed fetch or load: an interval, doubling, up to this

interface Held {
  readonly assignment: Assignment
  stage: Stage
  hub: PeerId // that renews the lease
  expiresAt: number
  renewAt: number
  attaching: boolean
  lostMeanwhile: boolean // the coordinator was lost since the attempt under way began
  attachAt: number | undefined
  attachPauseS: number
  lostAt: number | undefined
  isProven: boolean // by the coordinator's last word
  isRenewing: boolean // a hub was asked and has not answered: two that renew one lease would count it twice
  unanswered: boolean // no hub has answered the latest renewal
}

/** Leases of one worker and the times of its next acts. `chance` gives numbers from 0 to 1. */
export class Placement {
  private readonly held = new Map<string, Held>()
  private hubs: PeerId[] = []
  private asked: PeerId | undefined // by the poll that is under way
  private pollAt = 0
  private failures = 0 // fetches and loads that failed through no peer, since a slice of ours was proven
  private noPollBefore = 0
  private isPaused = false

  constructor (private readonly limits: PlacementLimits, private readonly chance: () => number) {}

  stages (): Array<readonly [Assignment, Stage]> {
    return [...this.held.values()].map(held => [held.assignment, held.stage])
  }

  /** When `tick` must come at the latest; undefined = only another event can change anything. */
  nextAt (): number | undefined {
    const times = this.mayPoll() ? [Math.max(this.pollAt, this.noPollBefore)] : []
    for (const held of this.held.values()) {
      if (held.stage === 'draining') continue
      if (!held.isRenewing) times.push(held.renewAt)
      if (!held.isProven) times.push(held.expiresAt)
      if (held.attachAt !== undefined) times.push(held.attachAt)
    }
    return times.length > 0 ? Math.min(...times) : undefined
  }

  handle (event: Event, now: number): Command[] {
    switch (event.kind) {
      case 'hubs known': return this.onHubs(event.hubs, now)
      case 'offered': return this.onOffer(event.assignment, event.ttlS, now)
      case 'nothing offered': return this.onNothingOffered(event.retryAfterS, now)
      case 'poll failed': return this.onPollFailed(event.hub, now)
      case 'paused':
        this.isPaused = true
        return this.drainAll()
      case 'resumed':
        this.isPaused = false
        this.pollAt = now
        return []
      case 'tick': return this.onTick(now)
      default: {
        const held = this.held.get(event.lease)
        return held === undefined ? [] : this.onLeaseEvent(held, event, now)
      }
    }
  }

  // Polls

  private mayPoll (): boolean {
    return !this.isPaused && this.held.size < this.limits.slicesMax && this.hubs.length > 0 && this.asked === undefined
  }

  private between (low: number, high: number): number {
    return low + (high - low) * this.chance()
  }

  private onHubs (hubs: readonly PeerId[], now: number): Command[] {
    const came = hubs.filter(hub => !this.hubs.includes(hub))
    if (this.hubs.length === 0 && hubs.length > 0) this.pollAt = now + this.between(0, 0.25) * this.limits.pollIntervalS
    this.hubs = [...came, ...this.hubs.filter(hub => hubs.includes(hub))]
    for (const held of this.held.values()) {
      if (this.hubs.length > 0 && !this.hubs.includes(held.hub)) held.hub = this.hubs[0]! // and stays with it
      const soonAt = came.length > 0 ? now + this.between(0, 0.25) * this.limits.renewIntervalS : Infinity
      if (held.unanswered || came.includes(held.hub)) held.renewAt = Math.min(held.renewAt, soonAt)
      // The way to a lost coordinator may be back with it.
      if (held.attachAt !== undefined) held.attachAt = Math.min(held.attachAt, soonAt)
    }
    return []
  }

  /** The hub says when to ask again; within reason, so that it can neither drive us nor silence us. */
  private onNothingOffered (retryAfterS: number, now: number): Command[] {
    if (this.asked !== undefined) this.putLast(this.asked)
    this.asked = undefined
    const retryS = Math.min(Math.max(retryAfterS, this.limits.pollIntervalS / 10), RETRY_MAX_S)
    this.pollAt = now + retryS / Math.max(1, this.hubs.length) * this.between(0.75, 1.25)
    return []
  }

  private onOffer (assignment: Assignment, ttlS: number, now: number): Command[] {
    this.asked = undefined
    this.pollAt = now + this.between(0.05, 0.15) * this.limits.pollIntervalS
    const namesake = this.held.get(assignment.lease)
    if (namesake?.hub === assignment.hub) return [] // giving it back would end the lease that we hold
    const isTaken = [...this.held.values()].some(({ assignment: each }) =>
      each.model === assignment.model && sliceText(each.slice) === sliceText(assignment.slice))
    if (this.isPaused || isTaken || namesake !== undefined || this.held.size >= this.limits.slicesMax) {
      return [{ kind: 'release', hub: assignment.hub, assignments: [assignment] }]
    }
    this.held.set(assignment.lease, {
      assignment,
      stage: 'fetching',
      hub: assignment.hub,
      expiresAt: now + ttlS,
      renewAt: this.renewalDue(ttlS, now),
      attaching: false,
      lostMeanwhile: false,
      attachAt: undefined,
      attachPauseS: 0,
      lostAt: undefined,
      isProven: false,
      isRenewing: false,
      unanswered: false
    })
    return [{ kind: 'fetch', assignment }]
  }

  private onPollFailed (hub: PeerId, now: number): Command[] {
    this.asked = undefined
    this.putLast(hub)
    this.pollAt = now + this.limits.pollIntervalS * this.between(0.5, 1.5)
    return []
  }

  private putLast (hub: PeerId): void {
    if (this.hubs.includes(hub)) this.hubs = [...this.hubs.filter(each => each !== hub), hub]
  }

  // One lease

  private onLeaseEvent (held: Held, event: Extract<Event, { lease: string }>, now: number): Command[] {
    switch (event.kind) {
      case 'step done': return this.onStepDone(held, now)
      case 'step failed': return this.onStepFailed(held, event.retry, now)
      case 'standing told':
        if (isAttached(held)) {
          held.stage = event.proven ? 'serving' : 'trial'
          held.isProven = event.proven
          if (event.proven) this.failures = 0
        }
        return []
      case 'coordinator lost': return this.onCoordinatorLost(held, now)
      case 'renewed':
        held.isRenewing = false
        if (event.ttlS <= 0) return this.startDrain(held, false)
        held.expiresAt = now + event.ttlS
        held.unanswered = false
        held.renewAt = Math.min(held.renewAt, this.renewalDue(event.ttlS, now))
        return []
      case 'renew failed':
        this.putLast(event.hub)
        held.isRenewing = false
        held.unanswered = true
        if (event.hub === held.hub || !this.hubs.includes(held.hub)) held.hub = this.hubs[0] ?? held.hub
        held.renewAt = Math.min(held.renewAt, now + this.limits.renewIntervalS / 3)
        return []
      case 'drained':
        this.held.delete(event.lease)
        // A worker that was let go has room again, but does not ask for the same slice at once.
        this.pollAt = Math.max(this.pollAt, now + this.between(1, 1.5) * this.limits.pollIntervalS)
        return []
    }
  }

  /** Often enough that one renewal may fail, however short the hub's leases are. */
  private renewalDue (ttlS: number, now: number): number {
    return now + Math.min(this.limits.renewIntervalS, Math.max(ttlS / 3, this.limits.renewIntervalS / 10))
  }

  private onStepDone (held: Held, now: number): Command[] {
    if (held.stage === 'fetching') {
      held.stage = 'loading'
      return [{ kind: 'load', assignment: held.assignment }]
    }
    if (held.stage === 'loading') {
      held.stage = 'trial'
      return [this.attach(held)]
    }
    if (!isAttached(held)) return []
    held.attaching = false
    if (held.lostMeanwhile) return this.retryAttach(held, now)
    held.attachPauseS = 0
    held.lostAt = undefined
    return []
  }

  private onStepFailed (held: Held, retry: boolean, now: number): Command[] {
    if (isAttached(held)) {
      held.attaching = false
      if (retry) return this.retryAttach(held, now)
    } else if (held.stage !== 'draining') {
      // A peer's fault, such as a coordinator that died, is no reason to keep away from all others for long.
      const pauseS = this.limits.pollIntervalS * 2 ** (retry ? 0 : Math.min(this.failures, 32))
      this.noPollBefore = now + Math.min(FAILURE_PAUSE_MAX_S, pauseS)
      if (!retry) this.failures++
    }
    return this.startDrain(held, true)
  }

  private onCoordinatorLost (held: Held, now: number): Command[] {
    if (!isAttached(held)) return []
    held.stage = 'trial'
    if (held.attaching) { // how the attempt ends is still to be told
      held.lostMeanwhile = true
      return []
    }
    return this.retryAttach(held, now)
  }

  private attach (held: Held): Command {
    held.attaching = true
    held.lostMeanwhile = false
    held.attachAt = undefined
    return { kind: 'attach', assignment: held.assignment }
  }

  private retryAttach (held: Held, now: number): Command[] {
    held.stage = 'trial'
    held.lostMeanwhile = false
    held.lostAt ??= now
    if (now - held.lostAt > ATTACH_PATIENCE_S) return this.startDrain(held, true)
    if (held.attachAt === undefined) {
      held.attachPauseS = Math.min(ATTACH_PAUSE_MAX_S, Math.max(ATTACH_PAUSE_S, 2 * held.attachPauseS))
      held.attachAt = now + held.attachPauseS * this.between(0.75, 1.25)
    }
    return []
  }

  private startDrain (held: Held, release: boolean): Command[] {
    if (held.stage === 'draining') return []
    held.stage = 'draining'
    held.attachAt = undefined
    const { assignment } = held
    const drain: Command = { kind: 'drain', assignment }
    return release ? [drain, { kind: 'release', hub: this.hubOf(held), assignments: [assignment] }] : [drain]
  }

  private drainAll (): Command[] {
    const leaving = [...this.held.values()].filter(held => held.stage !== 'draining')
    const drains = leaving.flatMap(held => this.startDrain(held, false))
    const releases = this.byHub(leaving).map(([hub, group]): Command => ({ kind: 'release', hub, assignments: group.map(held => held.assignment) }))
    return [...drains, ...releases]
  }

  private byHub (leases: readonly Held[]): Array<[PeerId, Held[]]> {
    const groups = new Map<PeerId, Held[]>()
    for (const held of leases) groups.set(this.hubOf(held), [...groups.get(this.hubOf(held)) ?? [], held])
    return [...groups]
  }

  private hubOf (held: Held): PeerId {
    return this.hubs.includes(held.hub) ? held.hub : this.hubs[0] ?? held.hub
  }

  // Time

  private onTick (now: number): Command[] {
    const commands: Command[] = []
    for (const held of this.held.values()) {
      // Of a proven slice a hub must say that its lease has ended: silence may be our own absence.
      if (held.stage !== 'draining' && now >= held.expiresAt && !held.isProven) commands.push(...this.startDrain(held, false))
    }
    const active = [...this.held.values()].filter(held => held.stage !== 'draining')
    commands.push(...this.renew(active, now))
    for (const held of active) if (held.attachAt !== undefined && now >= held.attachAt) commands.push(this.attach(held))
    if (this.mayPoll() && now >= Math.max(this.pollAt, this.noPollBefore)) {
      this.asked = this.hubs[0]!
      commands.push({ kind: 'poll', hub: this.asked })
    }
    return commands
  }

  /** When one lease is due, all that its hub renews go along. */
  private renew (all: readonly Held[], now: number): Command[] {
    const active = all.filter(held => !held.isRenewing)
    const due = new Set(active.filter(held => now >= held.renewAt).map(held => this.hubOf(held)))
    return this.byHub(active.filter(held => due.has(this.hubOf(held)))).map(([hub, group]) => {
      for (const held of group) {
        held.renewAt = now + this.limits.renewIntervalS
        held.isRenewing = true
      }
      return { kind: 'renew', hub, leases: group.map(held => [held.assignment, held.stage === 'serving'] as const) }
    })
  }
}

function isAttached (held: Held): boolean {
  return held.stage === 'trial' || held.stage === 'serving'
}
