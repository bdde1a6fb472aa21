// A worker's link to one coordinator: attach, answer its calls, detach; kvasir_node/roles/link.py is the same elsewhere.
// Whatever the coordinator sends ends at most this link.
import { CallTimeout, KvasirError, Misbehaved } from '../base/errors.js'
import { type Cid, type PeerId, type SliceId, sliceText } from '../base/ids.js'
import type { Log } from '../base/log.js'
import type { Assignment } from '../decide/placement.js'
import type { Manifest } from '../model/manifest.js'
import { CallStream } from '../net/callStream.js'
import type { ByteStream } from '../net/byteStream.js'
import { ExpertsMethod, encodeAttachment, readStanding } from '../wire/messages.js'
import { encodeAnswer, readRequest } from '../wire/tensors.js'
import type { Compute } from './compute.js'

const ATTACH_S = 5
const IN_FLIGHT_MAX = 8
const BODY_BYTES_MAX = 32 << 20
const FINISH_CALLS_S = 10

export interface LinkTools {
  readonly compute: Compute
  readonly log: Log
  readonly computed: (rows: number, computedS: number) => void
  readonly standingTold: (lease: string, proven: boolean) => void
}

export class Link {
  readonly ended: Promise<string>
  private readonly calls: CallStream
  private readonly assignments = new Map<string, Assignment>()
  private isOver = false

  constructor (stream: ByteStream, readonly coordinator: PeerId, readonly model: Cid, readonly dtype: string, private readonly manifest: Manifest, private readonly tools: LinkTools) {
    this.calls = new CallStream(stream, {
      handler: async (method, body, signal) => await this.answer(method, body, signal),
      inFlightMax: IN_FLIGHT_MAX,
      bodyBytesMax: BODY_BYTES_MAX,
      onNotice: (method, body) => { this.noticed(method, body) }
    })
    this.ended = this.calls.ended
    void this.ended.then(() => { this.isOver = true })
  }

  get hasEnded (): boolean {
    return this.isOver
  }

  /** Those whose slice the coordinator has been offered, or may have been. */
  leases (): string[] {
    return [...this.assignments.keys()]
  }

  /** Offers a loaded slice. After a timeout the coordinator may have heard, so the slice is still ours to `detach`. */
  async attach (assignment: Assignment): Promise<void> {
    this.assignments.set(assignment.lease, assignment)
    try {
      await this.tell(ExpertsMethod.ATTACH, assignment.slice)
    } catch (error) {
      if (!(error instanceof CallTimeout)) this.assignments.delete(assignment.lease)
      throw error
    }
  }

  /** Nothing more is to be sent for a slice; false when it was not attached, or the coordinator is gone. */
  async detach (assignment: Assignment): Promise<boolean> {
    if (!this.assignments.delete(assignment.lease)) return false
    try {
      await this.tell(ExpertsMethod.DETACH, assignment.slice)
      return true
    } catch (error) {
      if (!(error instanceof KvasirError)) throw error
      this.tools.log(`the coordinator was not told that ${sliceText(assignment.slice)} is left: ${error.message}`)
      return false
    }
  }

  /** Returns when no call is being answered, or after a while. */
  async finishCalls (): Promise<void> {
    const until = performance.now() + FINISH_CALLS_S * 1000
    while (this.calls.servingCount > 0 && performance.now() < until) await new Promise(resolve => setTimeout(resolve, 20))
  }

  close (): void {
    this.calls.reset('left')
  }

  private async tell (method: number, slice: SliceId): Promise<void> {
    await this.calls.call(method, encodeAttachment(this.model, this.dtype, [slice]), ATTACH_S)
  }

  private async answer (method: number, body: Uint8Array, signal: AbortSignal): Promise<Uint8Array> {
    if (method !== ExpertsMethod.COMPUTE) throw new Misbehaved('unknown_method', `a coordinator may not call method ${method} here`)
    const request = readRequest(body, this.manifest.hiddenSize)
    const { rowCount, encoding } = request
    const held = this.manifest.expertsPerLayer // of one layer at most, whatever is held of it
    if (request.pairRow.length > rowCount * held) throw new Misbehaved('too_many', `${request.pairRow.length} pairs for ${rowCount} rows repeat some`)
    const sums = await this.tools.compute.sums(this.model, request, signal)
    this.tools.computed(rowCount, sums.computedS)
    return encodeAnswer(sums.values, rowCount, encoding, sums.computedS)
  }

  private noticed (method: number, body: Uint8Array): void {
    if (method !== ExpertsMethod.STANDING) throw new Misbehaved('unknown_method', `notice ${method} is not one of a coordinator's`)
    const told = readStanding(body)
    for (const [lease, { slice }] of this.assignments) {
      if (sliceText(slice) === sliceText(told.slice)) this.tools.standingTold(lease, told.state === 'proven')
    }
  }
}
