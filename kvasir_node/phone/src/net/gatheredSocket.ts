// WebSockets that send together what is written in one go. js-libp2p writes a frame in pieces (a length, a header, a
// body), and each would be a message of its own: on both sides a message costs more than its bytes.
import { concat } from '../base/bytes.js'

/** Replaces this thread's WebSocket, which js-libp2p makes its connections with; call it once, before the first. */
export function gatherSends (): void {
  if (globalThis.WebSocket !== undefined) globalThis.WebSocket = gathered(globalThis.WebSocket)
}

function gathered (Socket: typeof WebSocket): typeof WebSocket {
  return class extends Socket {
    private held: Uint8Array[] = []
    private heldBytes = 0

    override send (data: string | ArrayBufferLike | Blob | ArrayBufferView): void {
      if (!(data instanceof Uint8Array)) throw new TypeError('js-libp2p sends arrays of bytes')
      if (this.held.length === 0) queueMicrotask(() => { this.flush() })
      this.held.push(data)
      this.heldBytes += data.length
    }

    override get bufferedAmount (): number {
      return super.bufferedAmount + this.heldBytes
    }

    private flush (): void {
      const parts = this.held
      this.held = []
      this.heldBytes = 0
      if (this.readyState === Socket.OPEN) super.send(parts.length === 1 ? parts[0] as Uint8Array<ArrayBuffer> : concat(parts))
    }
  }
}
