// Yamux tells a peer of room in a stream's window: js-libp2p does so after each frame that came, in a message of its
// own. Told when half of the window is used, the peer waits as little, and small calls cost one message less.
import type { Stream } from '@libp2p/interface'

const WINDOW_BYTES = 1 << 20 // of a stream, once something came

/** As much of a YamuxStream of @libp2p/yamux 8.0.3 as is used; package.json pins it. */
interface Windowed {
  recvWindow: number // as it is to be, once the peer is told
  readonly recvWindowCapacity: number
  sendWindowUpdate: () => void
}

/**
 * The window begins as the protocol has it, 256 KiB at both ends, and is opened to WINDOW_BYTES by the first word of it.
 * js-libp2p's own `initialStreamWindowSize` tells the peer nothing, so half of that may be more than the peer ever sends.
 */
export function tellWindowsSeldom (stream: Stream): void {
  const windowed = stream as Stream & Partial<Windowed>
  const tell = windowed.sendWindowUpdate
  if (tell === undefined) return
  windowed.recvWindow = Math.max(windowed.recvWindow!, WINDOW_BYTES)
  windowed.sendWindowUpdate = () => {
    if (windowed.recvWindowCapacity! < windowed.recvWindow! / 2) tell.call(windowed)
  }
}
