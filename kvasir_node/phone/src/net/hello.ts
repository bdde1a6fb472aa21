// Membership, as the dialler proves it: kvasir_node/net/hello.py has the exchange and the reasons.
import { hmac } from '@noble/hashes/hmac.js'
import { sha256 } from '@noble/hashes/sha2.js'
import { concat, equal, u16, u32, utf8 } from '../base/bytes.js'
import { Misbehaved, Refused } from '../base/errors.js'
import type { PeerId } from '../base/ids.js'
import { type ByteStream, ExactReader } from './byteStream.js'

export const HELLO_PROTOCOL = '/kvasir/hello/2.0.0'
const NONCE_BYTES = 32
const MAC_BYTES = 32
const HINT_BYTES = 16
const ABOUT_BYTES_MAX = 4096
const UNWANTED = 255

/** Who proves what to whom on one connection; the ids are those that Noise authenticated. */
export interface Introduction {
  readonly own: PeerId
  readonly peer: PeerId
  readonly secret: Uint8Array
  readonly about: Uint8Array
}

/** Both sides prove that they hold the secret; returns what the listener says of itself. Rejects with Refused, PeerError. */
export async function hello (stream: ByteStream, intro: Introduction): Promise<Uint8Array> {
  const reader = new ExactReader(stream, 2 * ABOUT_BYTES_MAX)
  const nonce = crypto.getRandomValues(new Uint8Array(NONCE_BYTES))
  const ids = [utf8(intro.own), utf8(intro.peer)]
  const hint = macOf(intro.secret, 'hint', [nonce, ...ids], new Uint8Array()).subarray(0, HINT_BYTES)
  stream.write(concat([nonce, Uint8Array.of(1), hint]))
  const [number] = await reader.read(1)
  if (number === UNWANTED) throw new Refused('it refuses this device: ask its owner')
  if (number !== 1) throw new Refused('it does not know this device (any more): pair again')
  const transcript = [nonce, await reader.read(NONCE_BYTES), ...ids]
  const about = await reader.readSized(ABOUT_BYTES_MAX)
  if (!equal(await reader.read(MAC_BYTES), macOf(intro.secret, 'listener', transcript, about))) {
    throw new Misbehaved('not_a_member', 'it does not hold the swarm\'s secret')
  }
  stream.write(concat([u16(intro.about.length), intro.about, macOf(intro.secret, 'dialler', transcript, intro.about)]))
  if ((await reader.read(1))[0] !== 1) throw new Misbehaved('bad_message', 'our proof was not accepted')
  return about
}

/** Every field with its length before it, so that no two transcripts give the same bytes. */
function macOf (secret: Uint8Array, direction: string, transcript: readonly Uint8Array[], about: Uint8Array): Uint8Array {
  const fields = [utf8('kvasir-node hello 2'), utf8(direction), ...transcript, about]
  return hmac(sha256, secret, concat(fields.flatMap(field => [u32(field.length), field])))
}
