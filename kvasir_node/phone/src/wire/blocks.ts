// `/kvasir/blocks/1.0.0`: a want-list of blocks and its answer; see kvasir_node/wire/blocks.py.
import { type Bytes, viewOf } from '../base/bytes.js'
import { Misbehaved } from '../base/errors.js'
import { type Cid, cidToBytes } from '../base/ids.js'
import { encode } from './codec.js'

export const WANT = 1
export const BLOCK_BYTES_MAX = 1 << 20
export const CALLS_MAX = 8
const LENGTH_BYTES = 4
const MISSING = 0xffffffff
const NOT_NOW = 0xfffffffe

export type Answered = Uint8Array | 'missing' | 'not now'

export function answerBytesMax (wantedCount: number): number {
  return wantedCount * (BLOCK_BYTES_MAX + LENGTH_BYTES)
}

export function encodeWant (cids: readonly Cid[]): Bytes {
  return encode(cids.map(cidToBytes))
}

/** One entry per wanted block, as views of `body`; raises Misbehaved (bad_message) when it is anything else. */
export function decodeAnswer (body: Uint8Array, wantedCount: number): Answered[] {
  const view = viewOf(body)
  const answer: Answered[] = []
  let at = 0
  for (let index = 0; index < wantedCount; index++) {
    if (body.length - at < LENGTH_BYTES) throw wrong(`ends before block ${index} of ${wantedCount}`)
    const length = view.getUint32(at, true)
    at += LENGTH_BYTES
    if (length === MISSING || length === NOT_NOW) {
      answer.push(length === MISSING ? 'missing' : 'not now')
      continue
    }
    if (length > Math.min(BLOCK_BYTES_MAX, body.length - at)) throw wrong(`says that block ${index} has ${length} bytes`)
    answer.push(body.subarray(at, at + length))
    at += length
  }
  if (at !== body.length) throw wrong(`has ${body.length - at} bytes after its last block`)
  return answer
}

function wrong (what: string): Misbehaved {
  return new Misbehaved('bad_message', `an answer to a want-list ${what}`)
}
