// A compute Worker: holds experts and computes them, one message after the other.
import { ComputeEndpoint } from '../roles/computeEndpoint.js'
import type { ToCompute } from '../roles/computeMessages.js'

const scope = self as unknown as DedicatedWorkerGlobalScope
const endpoint = new ComputeEndpoint()

scope.onmessage = ({ data }: MessageEvent<ToCompute>) => {
  const answer = endpoint.handle(data)
  if (answer === undefined) return
  const sums = 'sums' in answer ? answer.sums : undefined
  scope.postMessage(answer, sums === undefined ? [] : [sums.values.buffer as ArrayBuffer])
}
