// Who is in the swarm with us: connects to hubs and keeps them, proves membership, and believes roles by their grants.
// It does not know what any role does.
import { Backoff } from '../base/backoff.js'
import { type KvasirError, Misbehaved, PeerError, Refused, Unreachable, wordsOf } from '../base/errors.js'
import type { PeerId } from '../base/ids.js'
import type { Log } from '../base/log.js'
import { HELLO_PROTOCOL, hello } from '../net/hello.js'
import type { Network } from '../net/network.js'
import { type Pass, mayTake } from '../net/pairing.js'
import { type About, encodeAbout, readAbout } from '../wire/messages.js'

const HELLO_S = 10
const PAUSE_S = 0.5 // after a failed attempt; doubles ...
const PAUSE_MAX_S = 15 // ... up to this
const HUBS_MAX = 4 // that are kept
export const VERSION = '1.0.0'

export interface MembersEvents {
  /** Hubs that we are in one swarm with now. */
  readonly hubsChanged: (hubs: PeerId[]) => void
  /** No hub of the pass lets us in (any more), and why. */
  readonly refused: (words: string) => void
}

export class Members {
  private readonly joined = new Map<PeerId, About>()
  private readonly joining = new Map<PeerId, Promise<void>>()
  private readonly hubs = new Set<PeerId>()
  private readonly refusing = new Set<PeerId>() // hubs that do not let us in
  private readonly about: Uint8Array
  private isStopped = false
  private wakers: Array<() => void> = []
  problem = ''

  constructor (private readonly network: Network, private readonly pass: Pass, name: string, private readonly events: MembersEvents, private readonly log: Log) {
    this.about = encodeAbout({ name, version: VERSION, roles: ['worker'], addresses: [], grants: [] })
    network.onPeerLost(peer => { this.lost(peer) })
  }

  /** Keeps connected to the hubs of the pass, until `stop`. */
  run (): void {
    for (const [hub, addresses] of hubsOf(this.pass)) void this.keep(hub, addresses)
  }

  stop (): void {
    this.isStopped = true
    this.wake()
  }

  /** Tries again now: the page is seen again, so the network is worth another look. */
  wake (): void {
    const wakers = this.wakers
    this.wakers = []
    for (const wake of wakers) wake()
  }

  get hubCount (): number {
    return this.hubs.size
  }

  /** Connected to a peer, which has proved that it is of our swarm and we to it. Rejects with PeerError. */
  async require (peer: PeerId, addresses: readonly string[]): Promise<About> {
    while (!this.joined.has(peer)) {
      const joining = this.joining.get(peer) ?? this.join(peer, addresses).finally(() => { this.joining.delete(peer) })
      this.joining.set(peer, joining)
      await joining
    }
    return this.joined.get(peer)!
  }

  /** Whether a member may give us work to compute. */
  async isCoordinator (peer: PeerId): Promise<boolean> {
    return await this.mayBe(peer, 'coordinator')
  }

  private async mayBe (peer: PeerId, role: 'hub' | 'coordinator'): Promise<boolean> {
    const about = this.joined.get(peer)
    return about !== undefined && about.roles.includes(role) && await mayTake(this.pass, peer, role, about.grants)
  }

  private async join (peer: PeerId, addresses: readonly string[]): Promise<void> {
    await this.connect(peer, addresses)
    const stream = await this.network.openStream(peer, HELLO_PROTOCOL)
    const timer = setTimeout(() => { stream.reset() }, HELLO_S * 1000)
    try {
      const told = await hello(stream, { own: this.network.peerId, peer, secret: this.pass.key, about: this.about })
      const about = readAbout(told)
      if (!this.network.isConnected(peer)) throw new Unreachable(`${peer} has hung up`)
      this.joined.set(peer, about)
    } finally {
      clearTimeout(timer)
      stream.reset()
    }
  }

  private async connect (peer: PeerId, addresses: readonly string[]): Promise<void> {
    if (this.network.isConnected(peer)) return
    const direct = addresses.filter(address => !address.includes('/p2p-circuit'))
    const relayed = addresses.filter(address => address.includes('/p2p-circuit'))
    try {
      await this.network.connect(peer, direct)
    } catch (error) {
      if (relayed.length === 0) throw error
      for (const address of relayed) { // the hub lets only members ask for a connection
        const hub = /\/p2p\/([^/]+)\/p2p-circuit/.exec(address)?.[1]
        if (hub !== undefined && hub !== peer) await this.require(hub, [address.split('/p2p-circuit')[0]!]).catch((failure: unknown) => { this.log(wordsOf(failure)) })
      }
      await this.network.connect(peer, relayed)
    }
  }

  private async keep (hub: PeerId, addresses: readonly string[]): Promise<void> {
    const backoff = new Backoff(PAUSE_S, PAUSE_MAX_S, Math.random)
    while (!this.isStopped) {
      try {
        await this.require(hub, addresses)
        if (!await this.mayBe(hub, 'hub')) throw new Misbehaved('not_a_member', `${hub} is no hub of this swarm`)
        this.problem = ''
        this.refusing.delete(hub)
        backoff.reset()
        this.hubs.add(hub)
        this.events.hubsChanged([...this.hubs])
        await this.untilLost(hub)
      } catch (error) {
        if (!(error instanceof PeerError)) throw error
        this.noteProblem(hub, error)
      }
      if (!this.isStopped) await this.pause(backoff.next())
    }
  }

  private noteProblem (hub: PeerId, error: KvasirError): void {
    if (this.problem !== error.message) this.log(error.message)
    this.problem = error.message
    if (!(error instanceof Refused)) return
    this.refusing.add(hub)
    if (this.refusing.size === hubsOf(this.pass).length) this.events.refused(error.message)
  }

  private async untilLost (hub: PeerId): Promise<void> {
    while (this.hubs.has(hub) && !this.isStopped) await new Promise<void>(resolve => { this.wakers.push(resolve) })
  }

  private async pause (seconds: number): Promise<void> {
    await new Promise<void>(resolve => {
      const timer = setTimeout(resolve, seconds * 1000)
      this.wakers.push(() => { clearTimeout(timer); resolve() })
    })
  }

  private lost (peer: PeerId): void {
    this.joined.delete(peer)
    if (!this.hubs.delete(peer)) return
    this.events.hubsChanged([...this.hubs])
    this.wake()
  }
}

function hubsOf (pass: Pass): Array<[PeerId, string[]]> {
  const hubs = new Map<PeerId, string[]>()
  for (const address of pass.addresses) {
    const peer = /\/p2p\/([^/]+)$/.exec(address)?.[1]
    if (peer !== undefined) hubs.set(peer, [...hubs.get(peer) ?? [], address])
  }
  return [...hubs].slice(0, HUBS_MAX)
}
