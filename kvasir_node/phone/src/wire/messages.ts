// The control messages that a worker sends and reads; kvasir_node/wire/messages.py holds every field and bound.
import type { Bytes } from '../base/bytes.js'
import { Misbehaved, wordsOf } from '../base/errors.js'
import { type Cid, type PeerId, type SliceId, compareSlices, parseSlice, sliceText, cidToBytes } from '../base/ids.js'
import { Fields, decode, encode, isNumber, isPlainText, readRow } from './codec.js'
import { spellSlices } from './columns.js'

export const MARKET_PROTOCOL = '/kvasir/market/1.0.0'
export const EXPERTS_PROTOCOL = '/kvasir/experts/1.0.0'
export const BLOCKS_PROTOCOL = '/kvasir/blocks/1.0.0'
export const MarketMethod = { POLL: 2, RENEW: 3, RELEASE: 4 } as const
export const ExpertsMethod = { ATTACH: 1, DETACH: 2, COMPUTE: 3, STANDING: 4 } as const
export const RENEWALS_MAX = 256
const MESSAGE_BYTES_MAX = 1 << 20
const ADDRESSES_MAX = 16
const ROUND_TRIPS_MAX = 64
const SECONDS_MAX = 86_400
const DTYPES = ['float32', 'bfloat16', 'int8']

/** A slice of a model. */
export interface Part { readonly model: Cid, readonly slice: SliceId }

export interface Poll {
  readonly memoryBytes: number
  readonly have: readonly Part[]
  readonly busy: readonly Part[]
  readonly roundTrips: ReadonlyArray<readonly [PeerId, number]>
}

export function encodePoll (poll: Poll): Bytes {
  const roundTrips = [...poll.roundTrips].sort(([a], [b]) => a < b ? -1 : 1)
  return encode({
    memory: poll.memoryBytes,
    have: spellParts(poll.have),
    busy: spellParts(poll.busy),
    rtts: roundTrips.slice(0, ROUND_TRIPS_MAX)
  })
}

function spellParts (parts: readonly Part[]): Array<[Cid, Bytes]> {
  const models = [...new Set(parts.map(part => part.model))].sort()
  return models.map(model => {
    const slices = parts.filter(part => part.model === model).map(part => part.slice).sort(compareSlices)
    return [model, spellSlices(slices)]
  })
}

export interface Offer {
  readonly lease: string
  readonly model: Cid
  readonly dtype: string
  readonly slice: SliceId
  readonly coordinator: PeerId
  readonly addresses: readonly string[]
  readonly ttlS: number
}

export interface NoOffer { readonly retryAfterS: number }

export function readPollAnswer (data: Uint8Array): Offer | NoOffer {
  const fields = read(data, 'offer')
  const answer = fields.has('retry')
    ? { retryAfterS: fields.number('retry', 0, SECONDS_MAX) }
    : {
        lease: fields.text('lease', 64),
        model: readModel(fields.text('model', 64)),
        dtype: readDtype(fields.text('dtype', 16)),
        slice: readSlice(fields.text('slice', 32)),
        coordinator: fields.text('peer', 64),
        addresses: fields.items('addrs', ADDRESSES_MAX, readAddress),
        ttlS: fields.number('ttl', 0, SECONDS_MAX)
      }
  fields.end()
  return answer
}

export interface Renewal extends Part {
  readonly lease: string
  readonly coordinator: PeerId
  readonly serving: boolean
  readonly progress: number
}

export function encodeRenewals (leases: readonly Renewal[]): Bytes {
  const models = [...new Set(leases.map(lease => lease.model))]
  const peers = [...new Set(leases.map(lease => lease.coordinator))]
  const rows = leases.map(each => [
    each.lease, models.indexOf(each.model), peers.indexOf(each.coordinator), sliceText(each.slice), each.serving, each.progress
  ])
  return encode({ models, peers, leases: rows })
}

/** One for each renewal, in their order; `ttlS` 0 = the lease has ended. */
export interface Verdict { readonly ttlS: number, readonly reason: string }

export function readVerdicts (data: Uint8Array): Verdict[] {
  const fields = read(data, 'verdicts')
  const verdicts = fields.items('verdicts', RENEWALS_MAX, item => {
    const [ttlS, reason] = readRow(item, 2, 'a time to live and a reason')
    if (!isNumber(ttlS, 0, SECONDS_MAX) || !isPlainText(reason, 200)) throw new Misbehaved('bad_message', 'expected a time to live and a reason')
    return { ttlS, reason }
  })
  fields.end()
  return verdicts
}

export function encodeAttachment (model: Cid, dtype: string, slices: readonly SliceId[]): Bytes {
  return encode({ model, dtype, slices: slices.map(sliceText) })
}

export interface Standing { readonly slice: SliceId, readonly state: string }

export function readStanding (data: Uint8Array): Standing {
  const fields = read(data, 'standing')
  const standing = { slice: readSlice(fields.text('slice', 32)), state: fields.text('state', 16) }
  fields.end()
  return standing
}

/** A role, and the proof that a peer may take it. */
export type Grant = readonly [string, Uint8Array]

/** What a peer says of itself under the membership challenge. */
export interface About {
  readonly name: string
  readonly version: string
  readonly roles: readonly string[]
  readonly addresses: readonly string[]
  readonly grants: readonly Grant[]
}

export function encodeAbout (about: About): Bytes {
  return encode({ name: about.name, version: about.version, roles: about.roles, addrs: about.addresses, grants: about.grants })
}

/** Roles are as claimed; net/pairing.ts checks grants. */
export function readAbout (data: Uint8Array): About {
  const fields = read(data, 'about')
  const about = {
    name: fields.text('name', 128),
    version: fields.text('version', 32),
    roles: fields.items('roles', 3, item => readText(item, 16)),
    addresses: fields.items('addrs', ADDRESSES_MAX, readAddress),
    grants: fields.items('grants', 4, readGrant)
  }
  fields.end()
  return about
}

function readGrant (item: unknown): Grant {
  const [role, grant] = readRow(item, 2, 'a role and its grant')
  if (!(grant instanceof Uint8Array)) throw new Misbehaved('bad_message', 'expected the bytes of a grant')
  return [readText(role, 16), grant]
}

function read (data: Uint8Array, what: string): Fields {
  return new Fields(decode(data, MESSAGE_BYTES_MAX, what), what)
}

export function readText (value: unknown, charsMax: number): string {
  if (!isPlainText(value, charsMax)) throw new Misbehaved('bad_message', `expected plain text of at most ${charsMax} characters`)
  return value
}

export function readAddress (value: unknown): string {
  const text = readText(value, 256)
  if (!text.startsWith('/')) throw new Misbehaved('bad_message', `expected a multiaddr; got ${text.slice(0, 60)}`)
  return text
}

function readModel (text: string): Cid {
  return checked(() => { cidToBytes(text); return text })
}

function readSlice (text: string): SliceId {
  return checked(() => parseSlice(text))
}

function readDtype (text: string): string {
  if (!DTYPES.includes(text)) throw new Misbehaved('bad_message', `expected one of ${DTYPES.join(', ')}; got ${text}`)
  return text
}

function checked<T> (read: () => T): T {
  try {
    return read()
  } catch (error) {
    throw new Misbehaved('bad_message', wordsOf(error))
  }
}

