// What a guest's thread and its compute Workers say to each other.
import { Misbehaved, CapacityError, DataError, KvasirError, Overloaded } from '../base/errors.js'
import type { ExpertSizes } from '../model/expertFile.js'
import type { ExpertRequest } from '../wire/tensors.js'
import type { ExpertBlob, Sums } from './compute.js'

export type ToCompute =
  | { readonly kind: 'open', readonly module: WebAssembly.Module, readonly bytesMax: number }
  | { readonly kind: 'load', readonly id: number, readonly shard: string, readonly sizes: ExpertSizes, readonly blob: ExpertBlob }
  | { readonly kind: 'drop', readonly shard: string, readonly layer: number, readonly index: number }
  | { readonly kind: 'sums', readonly id: number, readonly shard: string, readonly request: ExpertRequest }

/** An error as it travels: its class by name. */
export interface SentError { readonly name: string, readonly message: string, readonly reason: string }

export type FromCompute =
  | { readonly id: number, readonly sums?: Sums }
  | { readonly id: number, readonly error: SentError }

const CLASSES = { CapacityError, DataError, Overloaded } as const

export function sentError (error: unknown): SentError {
  const known = error instanceof Error ? error : new Error(String(error))
  return { name: known.name, message: known.message, reason: error instanceof Misbehaved ? error.reason : '' }
}

export function receivedError (sent: SentError): Error {
  if (sent.name === 'Misbehaved') return new Misbehaved(sent.reason, sent.message)
  const made = CLASSES[sent.name as keyof typeof CLASSES]
  return made === undefined ? new KvasirError(`a compute Worker failed: ${sent.message}`) : new made(sent.message)
}
