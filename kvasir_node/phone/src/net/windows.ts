// Yamux tells a peer of room in a stream's window: js-libp2p does so after each frame that came, in a message of its
// own. Told when half of the window is used, the peer waits as little, and small calls cost one message less.
import type { Stream } from '@libp2p/interface'

/** As much of a YamuxStream of @libp2p/yamux 8.0.3 as is used; package.json pins it. */
interface Windowed {
  readonly recvWindow: number
  readonly recvWindowCapacity: number
  sendWindowUpdate: () => void
}

export function tellWindowsSeldom (stream: Stream): void {
  const windowed = stream as Stream & Partial<Windowed>
  const tell = windowed.sendWindowUpdate
  if (tell === undefined) return
  windowed.sendWindowUpdate = () => {
    if (windowed.recvWindowCapacity! < windowed.recvWindow! / 2) tell.call(windowed)
  }
}
