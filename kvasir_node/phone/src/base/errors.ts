// What can go wrong, by who is to blame; the same classes as kvasir_node/base/errors.py has, as far as a worker needs them.

/** Everything that is expected to go wrong; whatever else is thrown is a bug of ours. */
export class KvasirError extends Error {
  override name = 'KvasirError'
}

/** A remote's fault, or the way to it; `retryable` = the same may go well later. */
export class PeerError extends KvasirError {
  override name = 'PeerError'
  readonly retryable: boolean = true
}

export class Unreachable extends PeerError {
  override name = 'Unreachable'
}

export class CallTimeout extends PeerError {
  override name = 'CallTimeout'
}

export class Overloaded extends PeerError {
  override name = 'Overloaded'
}

/** The peer sent what no honest peer sends. `reason` is one of RejectReason of base/errors.py. */
export class Misbehaved extends PeerError {
  override name = 'Misbehaved'
  override readonly retryable = false
  constructor (readonly reason: string, message: string) {
    super(message)
  }
}

/** A node does not let this device in, whatever it proves. */
export class Refused extends Misbehaved {
  override name = 'Refused'
  constructor (message: string) {
    super('not_a_member', message)
  }
}

export class UsageError extends KvasirError {
  override name = 'UsageError'
}

export class NotFoundError extends UsageError {
  override name = 'NotFoundError'
}

/** Bad weights or manifests: bytes that are what their Cid promises, and not what we can use. */
export class DataError extends KvasirError {
  override name = 'DataError'
}

export class CapacityError extends KvasirError {
  override name = 'CapacityError'
}

export function wordsOf (error: unknown): string {
  return error instanceof Error ? error.message : String(error)
}
