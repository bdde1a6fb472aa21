// Names of things: content and slices. Pure values; see kvasir_node/base/ids.py for the rules.
import { DataError, UsageError } from './errors.js'

/** Text of a CIDv1 in base32 of sha2-256, codec raw or dag-cbor. */
export type Cid = string
/** A libp2p peer id in base58 text. */
export type PeerId = string

export const RAW_CODEC = 0x55
export const DAG_CBOR_CODEC = 0x71
const CID_BYTES = 36
const CID_CHARS = 59
const LETTERS = 'abcdefghijklmnopqrstuvwxyz234567'

/** The text of a binary Cid. Raises DataError when it is not one of ours. */
export function cidFromBytes (raw: Uint8Array): Cid {
  checkCid(raw)
  let text = 'b'
  let bits = 0
  let value = 0
  for (const byte of raw) {
    value = (value << 8 | byte) & 0xfff
    for (bits += 8; bits >= 5; bits -= 5) text += LETTERS[value >> (bits - 5) & 31]
  }
  return bits > 0 ? text + LETTERS[value << (5 - bits) & 31] : text
}

/** The 36 bytes of a Cid's text. Raises DataError for another spelling than `cidFromBytes` gives. */
export function cidToBytes (cid: Cid): Uint8Array<ArrayBuffer> {
  const raw = new Uint8Array(CID_BYTES)
  let at = 0
  let bits = 0
  let value = 0
  for (const letter of cid.slice(1)) {
    value = (value << 5 | LETTERS.indexOf(letter)) & 0xfff
    bits += 5
    if (bits >= 8) {
      bits -= 8
      if (at < CID_BYTES) raw[at++] = value >> bits & 0xff
    }
  }
  if (cid.length !== CID_CHARS || cidFromBytes(raw) !== cid) throw new DataError(`not a CIDv1 in base32: ${cid.slice(0, 80)}`)
  return raw
}

export function codecOf (cid: Cid): number {
  return cidToBytes(cid)[1]!
}

/** The 32 bytes of sha2-256 that a Cid promises. */
export function digestOf (cid: Cid): Uint8Array {
  return cidToBytes(cid).subarray(4)
}

function checkCid (raw: Uint8Array): void {
  const isOurs = raw.length === CID_BYTES && raw[0] === 1 && raw[2] === 0x12 && raw[3] === 0x20
  if (!isOurs || (raw[1] !== RAW_CODEC && raw[1] !== DAG_CBOR_CODEC)) {
    throw new DataError('a Cid must be version 1, raw or dag-cbor, sha2-256')
  }
}

/** A run of experts of one layer, `first` to `last` inclusive. */
export interface SliceId { readonly layer: number, readonly first: number, readonly last: number }

const SLICE = /^(0|[1-9][0-9]{0,5}):(0|[1-9][0-9]{0,5})-(0|[1-9][0-9]{0,5})$/

/** Reads "layer:first-last". Raises UsageError for anything else. */
export function parseSlice (text: string): SliceId {
  const match = SLICE.exec(text)
  if (match === null || Number(match[2]) > Number(match[3])) {
    throw new UsageError(`a slice is written layer:first-last, such as 3:0-7; got ${text.slice(0, 40)}`)
  }
  return { layer: Number(match[1]), first: Number(match[2]), last: Number(match[3]) }
}

export function sliceText (slice: SliceId): string {
  return `${slice.layer}:${slice.first}-${slice.last}`
}

export function expertsOf (slice: SliceId): number[] {
  return Array.from({ length: slice.last - slice.first + 1 }, (_, place) => slice.first + place)
}

export function compareSlices (a: SliceId, b: SliceId): number {
  return a.layer - b.layer || a.first - b.first || a.last - b.last
}
