// How a page becomes a guest: docs/phone_protocol.md, sections 1 to 3. It does not know where the pass is kept.
import { sha256 } from '@noble/hashes/sha2.js'
import { publicKeyFromRaw } from '@libp2p/crypto/keys'
import { type Bytes, concat, equal, u16, utf8 } from '../base/bytes.js'
import { KvasirError, Misbehaved, UsageError, wordsOf } from '../base/errors.js'
import type { PeerId } from '../base/ids.js'
import { Fields, decode, encode } from '../wire/codec.js'
import { type Grant, readAddress } from '../wire/messages.js'
import { type ByteStream, ExactReader } from './byteStream.js'

export const PAIR_PROTOCOL = '/kvasir/pair/1.0.0'
const LINK_PREFIX = 'kvasirp1'
const LETTERS = 'abcdefghijklmnopqrstuvwxyz234567'
const CHECK_BYTES = 4
const LINK_CHARS_MAX = 4096
const ANSWER_BYTES_MAX = 4096
const CODE_BYTES = 16

/** What the address of the page holds behind #. */
export interface PairingLink { readonly code: Uint8Array, readonly peer: PeerId, readonly addresses: readonly string[] }

/** Membership as a worker, for one peer id alone. */
export interface Pass {
  readonly swarm: Uint8Array
  readonly key: Uint8Array
  readonly hub: Uint8Array
  readonly coordinator: Uint8Array
  readonly addresses: readonly string[]
}

/** The node's reason not to give a pass, and what to do about it. */
export class PairingRefused extends KvasirError {
  override name = 'PairingRefused'
}

const REFUSALS: Readonly<Record<string, string>> = {
  wrong: 'This code is not known (any more). Scan a new one.',
  expired: 'This code is too old. Scan a new one.',
  used: 'Another device has used this code. Scan a new one; if that was not you, tell whoever runs the node.',
  too_many: 'Too many wrong codes came from here. Wait a minute, then scan a new one.',
  unwanted: 'The node refuses this device. Ask whoever runs it.'
}

/** Reads a link. Raises UsageError for one that is none, or damaged. */
export function readLink (text: string): PairingLink {
  const damaged = new UsageError('The link is damaged (cut off, or mistyped). Scan the code again.')
  if (!text.startsWith(LINK_PREFIX) || text.length > LINK_CHARS_MAX) throw damaged
  const raw = fromBase32(text.slice(LINK_PREFIX.length))
  const body = raw.subarray(0, -CHECK_BYTES)
  if (raw.length <= CHECK_BYTES || !equal(sha256(body).subarray(0, CHECK_BYTES), raw.subarray(-CHECK_BYTES))) throw damaged
  try {
    const fields = new Fields(decode(body, LINK_CHARS_MAX, 'the link'), 'the link')
    const link = { code: fields.binary('c', CODE_BYTES), peer: fields.text('p', 64), addresses: fields.items('a', 4, readAddress) }
    fields.end()
    return link
  } catch (error) {
    throw new UsageError(`The link is of another version than this page: ${wordsOf(error)}`)
  }
}

function fromBase32 (text: string): Bytes {
  const bytes: number[] = []
  let bits = 0
  let value = 0
  for (const letter of text) {
    value = (value << 5 | LETTERS.indexOf(letter)) & 0xfff
    bits += 5
    if (bits >= 8) bytes.push(value >> (bits -= 8) & 0xff)
  }
  return Uint8Array.from(bytes)
}

/** Asks for a pass. Rejects with PairingRefused, or PeerError. */
export async function pair (stream: ByteStream, code: Uint8Array, name: string): Promise<Pass> {
  const reader = new ExactReader(stream, 2 + ANSWER_BYTES_MAX)
  const ask = encode({ code, name })
  stream.write(concat([u16(ask.length), ask]))
  return readPass(await reader.readSized(ANSWER_BYTES_MAX))
}

export function readPass (data: Uint8Array): Pass {
  const fields = new Fields(decode(data, ANSWER_BYTES_MAX, 'the answer'), 'the answer')
  if (fields.has('refused')) {
    const refused = fields.text('refused', 32)
    fields.end()
    throw new PairingRefused(REFUSALS[refused] ?? `The node gives no pass: ${refused}.`)
  }
  const pass = {
    swarm: fields.binary('swarm', 10),
    key: fields.binary('key', 32),
    hub: fields.binary('hub', 32),
    coordinator: fields.binary('coordinator', 32),
    addresses: fields.items('addrs', 8, readAddress)
  }
  fields.end()
  if (pass.key.length !== 32) throw new Misbehaved('bad_message', 'the key of a pass has 32 bytes')
  return pass
}

/** Whether a member may take a role: only who has the swarm's whole secret can make the grant. */
export async function mayTake (pass: Pass, peer: PeerId, role: 'hub' | 'coordinator', grants: readonly Grant[]): Promise<boolean> {
  const message = concat([utf8('kvasir-node/grant/1\0'), pass.swarm, utf8(`${role}\0${peer}`)])
  const key = publicKeyFromRaw(pass[role])
  for (const [granted, signature] of grants) {
    if (granted === role && signature.length === 64 && await key.verify(message, signature)) return true
  }
  return false
}
