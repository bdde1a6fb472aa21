// Calls over a stream: long-lived, the same from both ends, many at once; see kvasir_node/net/rpc.py.
// It does not know methods, messages or who may call.
import { Uint8ArrayList } from 'uint8arraylist'
import { CallTimeout, type KvasirError, Misbehaved, Unreachable, UsageError, wordsOf } from '../base/errors.js'
import { Credits, Served } from './credits.js'
import { type Frame, FrameAssembler, Kind, decodeError, decodeGrant, encodeError, encodeGrant, packHeader } from './frames.js'
import type { ByteStream } from './byteStream.js'

const BODIES_GRANTED = 2 // of the largest size: what the bodies of a peer's calls may hold together
const CANCELLED_IDS_MAX = 1024 // calls of ours whose result may still be under way

/** One call of the peer; rejects with a KvasirError to answer with an error. `signal`: the caller wants no answer. */
export type CallHandler = (method: number, body: Uint8Array, signal: AbortSignal) => Promise<Uint8Array>

export interface CallStreamOptions {
  readonly handler?: CallHandler
  readonly inFlightMax: number
  readonly bodyBytesMax: number
  readonly onNotice?: (method: number, body: Uint8Array) => void
}

interface Pending {
  readonly method: number
  readonly body: Uint8Array
  readonly deliver: (result: Uint8Array | KvasirError) => void
}

export class CallStream {
  /** Settles, never rejects, with the reason once the stream has ended. */
  readonly ended: Promise<string>
  private endReason: string | undefined
  private tellEnded!: (reason: string) => void
  private readonly credits: Credits
  private readonly served: Served
  private readonly assembler: FrameAssembler
  private readonly pending = new Map<number, Pending>()
  private readonly cancelled = new Set<number>()
  private readonly serving = new Map<number, AbortController>()
  private nextId = 1

  constructor (private readonly stream: ByteStream, private readonly options: CallStreamOptions) {
    this.ended = new Promise(resolve => { this.tellEnded = resolve })
    this.credits = new Credits(options.inFlightMax)
    this.served = new Served({ calls: options.inFlightMax, bytes: BODIES_GRANTED * options.bodyBytesMax })
    this.assembler = new FrameAssembler(options.bodyBytesMax)
    stream.onData(chunk => { this.arrived(chunk) }, reason => { this.end(reason) })
    if (options.handler !== undefined) this.sendFrame(Kind.GRANT, 0, 0, encodeGrant(this.served.grant))
  }

  /** Calls of the peer that are being computed. */
  get servingCount (): number {
    return this.serving.size
  }

  /**
   * The result's body. Waiting for credit counts as waiting. Rejects with CallTimeout, Overloaded, Unreachable,
   * Misbehaved, or the error that the peer answered with; an aborted `signal` cancels the call at the peer, too.
   */
  async call (method: number, body: Uint8Array, timeoutS: number, signal?: AbortSignal): Promise<Uint8Array> {
    signal?.throwIfAborted()
    if (this.endReason !== undefined) throw new Unreachable(`no call: the stream has ended: ${this.endReason}`)
    if (body.length > this.options.bodyBytesMax) throw new UsageError(`a body of ${body.length} bytes; at most ${this.options.bodyBytesMax} may be sent`)
    const id = this.nextId++
    this.credits.wait(id, body.length)
    return await new Promise((resolve, reject) => {
      const giveUp = (error: unknown): void => { this.cancel(id); reject(error) }
      const timer = setTimeout(() => { giveUp(new CallTimeout(`no answer to method ${method} within ${timeoutS} s`)) }, timeoutS * 1000)
      const aborted = (): void => { clearTimeout(timer); giveUp(signal?.reason) }
      signal?.addEventListener('abort', aborted, { once: true })
      const deliver = (result: Uint8Array | KvasirError): void => {
        clearTimeout(timer)
        signal?.removeEventListener('abort', aborted)
        if (result instanceof Uint8Array) resolve(result)
        else reject(result)
      }
      this.pending.set(id, { method, body, deliver })
      this.sendWaiting()
    })
  }

  /** Ends the stream at once. */
  reset (reason = 'closed here'): void {
    this.stream.reset()
    this.end(reason)
  }

  private cancel (id: number): void {
    if (!this.pending.delete(id)) return
    if (this.credits.giveBack(id)) {
      this.cancelled.add(id)
      if (this.cancelled.size > CANCELLED_IDS_MAX) this.cancelled.delete(this.cancelled.values().next().value!)
      this.sendFrame(Kind.CANCEL, 0, id)
    }
    this.sendWaiting()
  }

  private sendWaiting (): void {
    for (const id of this.credits.nextCalls()) {
      const call = this.pending.get(id)!
      this.sendFrame(Kind.CALL, call.method, id, call.body)
    }
  }

  private sendFrame (kind: Kind, method: number, id: number, body: Uint8Array = new Uint8Array()): void {
    if (this.endReason !== undefined) return
    this.stream.write(new Uint8ArrayList(packHeader(kind, method, id, body.length), body))
  }

  private arrived (chunk: Uint8Array): void {
    try {
      for (const frame of this.assembler.feed(chunk)) this.frameArrived(frame)
    } catch (error) {
      this.reset(wordsOf(error))
    }
  }

  private frameArrived (frame: Frame): void {
    if (frame.kind === Kind.CALL) this.callArrived(frame)
    else if (frame.kind === Kind.CANCEL) this.serving.get(frame.id)?.abort()
    else if (frame.kind === Kind.NOTICE) this.options.onNotice?.(frame.method, frame.body)
    else if (frame.kind === Kind.GRANT) this.grantArrived(frame)
    else this.resultArrived(frame)
  }

  private grantArrived (frame: Frame): void {
    for (const id of this.credits.granted(decodeGrant(frame.body))) {
      const call = this.pending.get(id)
      this.pending.delete(id)
      call?.deliver(new UsageError(`a call's body of ${call.body.length} bytes; the peer takes less`))
    }
    this.sendWaiting()
  }

  private resultArrived (frame: Frame): void {
    const result = frame.kind === Kind.RESULT ? frame.body : decodeError(frame.body)
    const call = this.pending.get(frame.id)
    if (call === undefined) {
      if (!this.cancelled.delete(frame.id)) throw new Misbehaved('bad_frame', `an answer to call ${frame.id}, which waits for none`)
      return
    }
    this.pending.delete(frame.id)
    this.credits.giveBack(frame.id)
    call.deliver(result)
    this.sendWaiting()
  }

  private callArrived (frame: Frame): void {
    const { handler } = this.options
    if (handler === undefined) {
      this.sendFrame(Kind.ERROR, 0, frame.id, encodeError(new Misbehaved('unknown_method', 'this end takes no calls')))
      return
    }
    this.served.arrived(frame.id, frame.body.length)
    const controller = new AbortController()
    this.serving.set(frame.id, controller)
    // A cancelled call is over for its caller at once, and its credit is free; what computes it may take longer.
    const over = (): boolean => this.serving.delete(frame.id) && (this.served.over(frame.id), true)
    controller.signal.addEventListener('abort', over, { once: true })
    handler(frame.method, frame.body, controller.signal).then(
      body => { if (over()) this.sendFrame(Kind.RESULT, frame.method, frame.id, body) },
      (error: unknown) => { if (over()) this.sendFrame(Kind.ERROR, 0, frame.id, encodeError(error)) }
    )
  }

  private end (reason: string): void {
    if (this.endReason !== undefined) return
    this.endReason = reason
    for (const call of this.pending.values()) call.deliver(new Unreachable(`the call was cut off: ${reason}`))
    this.pending.clear()
    for (const controller of this.serving.values()) controller.abort()
    this.tellEnded(reason)
  }
}
