// What answers the messages of a compute pool: in a Worker, or in the pool's own thread.
import { Kernel } from '../model/shard.js'
import type { Port } from './computePool.js'
import { type FromCompute, type ToCompute, sentError } from './computeMessages.js'
import { Shards } from './shards.js'

export class ComputeEndpoint {
  private shards: Shards | undefined

  /** undefined = nothing is to be answered. Throws only for what has no answer. */
  handle (message: ToCompute): FromCompute | undefined {
    try {
      return this.answer(message)
    } catch (error) {
      if (!('id' in message)) throw error
      return { id: message.id, error: sentError(error) }
    }
  }

  private answer (message: ToCompute): FromCompute | undefined {
    switch (message.kind) {
      case 'open':
        this.shards = new Shards(Kernel.open(message.module, message.bytesMax), message.bytesMax)
        return undefined
      case 'load':
        this.shards!.loadNow(message.shard, message.sizes, message.blob)
        return { id: message.id }
      case 'drop':
        this.shards!.drop(message.shard, message.layer, message.index)
        return undefined
      case 'sums': return { id: message.id, sums: this.shards!.sumsNow(message.shard, message.request) }
    }
  }
}

/** A port that computes here and now. */
export function portHere (): Port {
  const endpoint = new ComputeEndpoint()
  const port: Port = {
    onmessage: null,
    onerror: null,
    postMessage: message => {
      const answer = endpoint.handle(message)
      if (answer !== undefined) port.onmessage?.({ data: answer })
    }
  }
  return port
}
