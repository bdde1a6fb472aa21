// A compute Worker: holds experts and computes them, one message after the other.
import { Kernel } from '../model/shard.js'
import { type FromCompute, type ToCompute, sentError } from '../roles/computeMessages.js'
import { Shards } from '../roles/shards.js'

const scope = self as unknown as DedicatedWorkerGlobalScope
let shards: Shards | undefined

function handle (message: ToCompute): void {
  if (message.kind === 'open') {
    shards = new Shards(Kernel.open(message.module, message.bytesMax), message.bytesMax)
  } else if (message.kind === 'load') {
    shards!.loadNow(message.shard, message.sizes, message.blob)
    say({ id: message.id })
  } else if (message.kind === 'drop') {
    shards!.drop(message.shard, message.layer, message.index)
  } else {
    const sums = shards!.sumsNow(message.shard, message.request)
    say({ id: message.id, sums }, [sums.values.buffer as ArrayBuffer])
  }
}

function say (answer: FromCompute, transfer: Transferable[] = []): void {
  scope.postMessage(answer, transfer)
}

scope.onmessage = ({ data }: MessageEvent<ToCompute>) => {
  try {
    handle(data)
  } catch (error) {
    if (!('id' in data)) throw error
    say({ id: data.id, error: sentError(error) })
  }
}
