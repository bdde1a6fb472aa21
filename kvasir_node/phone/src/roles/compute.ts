// Who computes: experts by model and dtype, loaded one by one, asked for sums by a request's frame.
import type { ExpertSizes, TensorSpec } from '../model/expertFile.js'
import type { ExpertRequest } from '../wire/tensors.js'

/** An expert's file with what is needed to read it. */
export interface ExpertBlob {
  readonly layer: number
  readonly index: number
  readonly file: Uint8Array
  readonly parts: readonly TensorSpec[]
  readonly isInt8: boolean // is to be computed as rounded to int8
}

export interface Sums { readonly values: Float32Array, readonly computedS: number }

export interface Compute {
  /** Bytes of weights that may be held at most. */
  readonly bytesMax: number
  /** `place` is one of `places`. The file's buffer is given away. Rejects with DataError, CapacityError. */
  readonly load: (shard: string, sizes: ExpertSizes, blob: ExpertBlob, place: number) => Promise<void>
  /** Where the experts of a slice of so many bytes should lie, one number for each. */
  readonly places: (count: number, bytes: number) => number[]
  readonly drop: (shard: string, layer: number, index: number) => void
  /** Sums [R,D]. Rejects with Misbehaved for rows that are not finite, Overloaded for experts that are not held. The
   * request's buffer may be given away. An aborted `signal` saves what has not begun. */
  readonly sums: (shard: string, request: ExpertRequest, signal?: AbortSignal) => Promise<Sums>
}
