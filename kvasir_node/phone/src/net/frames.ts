// The frames of a call stream: layout, assembly from chunks, and how errors travel; see kvasir_node/net/rpc_frames.py.
import { type Bytes, concat, utf8, viewOf } from '../base/bytes.js'
import {
  CallTimeout, CapacityError, DataError, KvasirError, Misbehaved, NotFoundError, Overloaded, PeerError, Unreachable, UsageError, wordsOf
} from '../base/errors.js'

export const HEADER_BYTES = 14
export const Kind = { CALL: 1, RESULT: 2, ERROR: 3, CANCEL: 4, NOTICE: 5, GRANT: 6 } as const
export type Kind = typeof Kind[keyof typeof Kind]
const ERROR_TEXT_BYTES_MAX = 500
const GRANT_BYTES = 8

export interface Frame { readonly kind: Kind, readonly method: number, readonly id: number, readonly body: Bytes }

/** What may be under way at once: calls, and bytes of their bodies together. */
export interface Grant { readonly calls: number, readonly bytes: number }

export function packHeader (kind: Kind, method: number, id: number, bodyBytes: number): Bytes {
  const header = new Uint8Array(HEADER_BYTES)
  const view = viewOf(header)
  view.setUint32(0, bodyBytes, true)
  view.setUint8(4, kind)
  view.setUint8(5, method)
  view.setBigUint64(6, BigInt(id), true)
  return header
}

const ERRORS: ReadonlyArray<readonly [number, new (text: string) => KvasirError]> = [ // the first that fits
  [3, NotFoundError], [2, UsageError], [4, Overloaded], [5, CapacityError], [6, DataError], [8, CallTimeout], [9, Unreachable]
]
const INTERNAL = 1
const REFUSED = 7

export function encodeError (error: unknown): Bytes {
  const known = ERRORS.find(([, type]) => error instanceof type)
  const isRefusal = error instanceof Misbehaved
  const text = error instanceof KvasirError ? wordsOf(error) : 'the handler failed'
  const words = utf8(isRefusal ? `${error.reason}\n${text}` : text)
  return concat([Uint8Array.of(isRefusal ? REFUSED : known?.[0] ?? INTERNAL), cutUtf8(words, ERROR_TEXT_BYTES_MAX)])
}

function cutUtf8 (text: Bytes, bytesMax: number): Uint8Array {
  let end = Math.min(text.length, bytesMax)
  while (end < text.length && end > 0 && (text[end]! & 0xc0) === 0x80) end--
  return text.subarray(0, end)
}

/** The error that an ERROR frame's body describes. Raises Misbehaved when it is not one. */
export function decodeError (body: Uint8Array): KvasirError {
  const code = body[0] ?? 0
  let text: string
  try {
    text = new TextDecoder('utf-8', { fatal: true }).decode(body.subarray(1))
  } catch {
    throw new Misbehaved('bad_frame', 'the body of an error is not text')
  }
  if (code === REFUSED) {
    const [reason = '', ...words] = text.split('\n')
    return new Misbehaved(reason, words.join('\n'))
  }
  const made = ERRORS.find(([known]) => known === code)?.[1]
  if (made !== undefined) return new made(text)
  if (code !== INTERNAL) throw new Misbehaved('bad_frame', `an error of code ${code}`)
  return new PeerError(`the peer failed: ${text}`)
}

export function encodeGrant (grant: Grant): Bytes {
  const body = new Uint8Array(GRANT_BYTES)
  viewOf(body).setUint32(0, grant.calls, true)
  viewOf(body).setUint32(4, Math.min(grant.bytes, 2 ** 32 - 1), true)
  return body
}

export function decodeGrant (body: Uint8Array): Grant {
  if (body.length !== GRANT_BYTES) throw new Misbehaved('bad_frame', `a GRANT of ${body.length} bytes; expected ${GRANT_BYTES}`)
  return { calls: viewOf(body).getUint32(0, true), bytes: viewOf(body).getUint32(4, true) }
}

/** Puts frames together from chunks of any size; each body is copied once, into a buffer of its own. */
export class FrameAssembler {
  private readonly header = new Uint8Array(HEADER_BYTES)
  private headerFilled = 0
  private frame: Frame | undefined
  private bodyFilled = 0

  constructor (private readonly bodyBytesMax: number) {}

  /** All frames that the chunk completes. Raises Misbehaved for a header that no honest peer sends. */
  * feed (chunk: Uint8Array): Generator<Frame> {
    let at = 0
    while (at < chunk.length || this.frame?.body.length === this.bodyFilled) {
      if (this.frame === undefined) {
        const count = Math.min(HEADER_BYTES - this.headerFilled, chunk.length - at)
        this.header.set(chunk.subarray(at, at + count), this.headerFilled)
        this.headerFilled += count
        at += count
        if (this.headerFilled < HEADER_BYTES) return
        this.beginFrame()
      }
      const frame = this.frame!
      const count = Math.min(frame.body.length - this.bodyFilled, chunk.length - at)
      frame.body.set(chunk.subarray(at, at + count), this.bodyFilled)
      this.bodyFilled += count
      at += count
      if (this.bodyFilled < frame.body.length) return
      this.frame = undefined
      yield frame
    }
  }

  private beginFrame (): void {
    const view = viewOf(this.header)
    const [length, kind, method, id] = [view.getUint32(0, true), view.getUint8(4), view.getUint8(5), Number(view.getBigUint64(6, true))]
    if (!isKind(kind)) throw new Misbehaved('bad_frame', `unknown kind of frame: ${kind}; expected 1 to ${Kind.GRANT}`)
    const most = this.bytesMax(kind)
    if (length > most) throw new Misbehaved('too_large', `a frame of kind ${kind} with ${length} bytes; at most ${most} are taken`)
    this.frame = { kind, method, id, body: new Uint8Array(length) }
    this.headerFilled = this.bodyFilled = 0
  }

  private bytesMax (kind: Kind): number {
    if (kind === Kind.ERROR) return 1 + ERROR_TEXT_BYTES_MAX
    if (kind === Kind.CANCEL) return 0
    return kind === Kind.GRANT ? GRANT_BYTES : this.bodyBytesMax
  }
}

function isKind (code: number): code is Kind {
  return code >= Kind.CALL && code <= Kind.GRANT
}
