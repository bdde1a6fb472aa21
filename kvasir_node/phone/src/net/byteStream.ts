// One stream of a connection as our protocols want it: bytes in order, told of its end once.
// It hides js-libp2p's streams, and is what tests put a pair of ends in memory behind.
import type { Stream } from '@libp2p/interface'
import type { Uint8ArrayList } from 'uint8arraylist'
import { Misbehaved, Unreachable, wordsOf } from '../base/errors.js'

export interface ByteStream {
  /** Sends without waiting; what the peer does not read yet is kept. The bytes must not change afterwards. */
  write: (data: Uint8Array | Uint8ArrayList) => void
  /** From now on every chunk goes to `data`; `ended` hears why the stream ended, once. */
  onData: (data: (chunk: Uint8Array) => void, ended: (reason: string) => void) => void
  reset: () => void
}

export function byteStreamOf (stream: Stream): ByteStream {
  return {
    write: data => {
      try {
        stream.send(data)
      } catch (error) { // it has ended: whoever listens hears that by `ended`
        stream.abort(error instanceof Error ? error : new Error(wordsOf(error)))
      }
    },
    onData: (data, ended) => {
      let isOver = false
      // A frame's end of stream is told before the frame's own bytes, so what is told is looked at after them.
      const end = (reason: string): void => {
        queueMicrotask(() => {
          if (!isOver) ended(reason)
          isOver = true
        })
      }
      stream.addEventListener('message', event => {
        const chunks = event.data instanceof Uint8Array ? [event.data] : event.data
        for (const chunk of chunks) if (!isOver) data(chunk)
      })
      stream.addEventListener('remoteCloseWrite', () => { end('the peer closed the stream') })
      stream.addEventListener('close', event => { end(event.error?.message ?? 'the stream was closed') })
    },
    reset: () => { stream.abort(new Error('reset here')) }
  }
}

/** Reads exact numbers of bytes, for exchanges that know what comes next. */
export class ExactReader {
  private readonly chunks: Uint8Array[] = []
  private held = 0
  private endReason: string | undefined
  private wake: () => void = () => {}

  /** `bytesMax` bounds what a peer may send before it is read; more ends the stream. */
  constructor (stream: ByteStream, bytesMax: number) {
    stream.onData(chunk => {
      this.held += chunk.length
      if (this.held > bytesMax) {
        this.endReason ??= `it sent more than ${bytesMax} bytes unasked`
        stream.reset()
      } else {
        this.chunks.push(chunk)
      }
      this.wake()
    }, reason => {
      this.endReason ??= reason
      this.wake()
    })
  }

  /** Rejects with Unreachable when the stream ends before. */
  async read (count: number): Promise<Uint8Array> {
    while (this.held < count) {
      if (this.endReason !== undefined) throw new Unreachable(`the stream ended too early: ${this.endReason}`)
      await new Promise<void>(resolve => { this.wake = resolve })
    }
    const taken = new Uint8Array(count)
    for (let at = 0; at < count;) {
      const first = this.chunks[0]!
      const part = first.subarray(0, count - at)
      taken.set(part, at)
      at += part.length
      if (part.length === first.length) this.chunks.shift()
      else this.chunks[0] = first.subarray(part.length)
    }
    this.held -= count
    return taken
  }

  /** A length (u16, little-endian) and that many bytes. */
  async readSized (bytesMax: number): Promise<Uint8Array> {
    const [low = 0, high = 0] = await this.read(2)
    const length = low | high << 8
    if (length > bytesMax) throw new Misbehaved('too_large', `${length} bytes follow; at most ${bytesMax} are read`)
    return await this.read(length)
  }
}
