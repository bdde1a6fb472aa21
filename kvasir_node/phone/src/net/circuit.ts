// Connections through a hub: kvasir_node/net/circuit.py, as the end that asks for one. Inside runs the same Noise
// session as over a WebSocket, so the hub reads nothing.
import { type ComponentLogger, type Connection, type MultiaddrConnection, type Stream, type Transport, transportSymbol } from '@libp2p/interface'
import { AbstractMultiaddrConnection } from '@libp2p/utils'
import type { Multiaddr } from '@multiformats/multiaddr'
import type { Uint8ArrayList } from 'uint8arraylist'
import { concat, utf8 } from '../base/bytes.js'
import { Unreachable } from '../base/errors.js'

const RELAY_PROTOCOL = '/kvasir/relay/1.0.0'
const CONNECT = 2
const WORDS: Readonly<Record<number, string>> = {
  1: 'the relay is full', 2: 'the relay has no place for that peer', 3: 'that peer did not take the connection'
}

interface Components {
  readonly logger: ComponentLogger
  readonly connectionManager: { getConnections: () => Connection[] }
}

/** A transport for …/p2p/HUB/p2p-circuit/p2p/PEER, where the hub is connected and has let us in already. */
export function circuits (): (components: Components) => Transport {
  return components => ({
    [Symbol.toStringTag]: 'kvasir circuits',
    [transportSymbol]: true,
    dialFilter: addresses => addresses.filter(address => hubAndPeer(address) !== undefined),
    listenFilter: () => [],
    createListener: () => { throw new Unreachable('a page listens nowhere') },
    dial: async (address, options) => {
      const [hub, peer] = hubAndPeer(address)!
      const connection = components.connectionManager.getConnections().find(each => each.remotePeer.toString() === hub)
      if (connection === undefined) throw new Unreachable(`the hub ${hub} is not connected`)
      const stream = await connection.newStream(RELAY_PROTOCOL, { signal: options.signal })
      const answered = firstByte(stream)
      stream.send(concat([Uint8Array.of(CONNECT, peer.length), utf8(peer)]))
      const answer = await answered
      if (answer !== 0) {
        stream.abort(new Error('no circuit'))
        throw new Unreachable(WORDS[answer] ?? 'the relay gave no circuit')
      }
      return await options.upgrader.upgradeOutbound(circuitOver(stream, address, components), options)
    }
  })
}

function hubAndPeer (address: Multiaddr): [string, string] | undefined {
  const match = /\/p2p\/([^/]+)\/p2p-circuit\/p2p\/([^/]+)$/.exec(address.toString())
  return match === null ? undefined : [match[1]!, match[2]!]
}

/** The answer, after which the stream is paused: what follows it belongs to the connection inside. */
async function firstByte (stream: Stream): Promise<number> {
  return await new Promise((resolve, reject) => {
    const heard = (event: { data: Uint8Array | Uint8ArrayList }): void => {
      stream.removeEventListener('message', heard)
      stream.removeEventListener('close', closed)
      if (event.data.byteLength > 1) stream.unshift(event.data.subarray(1))
      resolve(event.data instanceof Uint8Array ? event.data[0]! : event.data.get(0))
    }
    const closed = (): void => { reject(new Unreachable('the relay closed the stream')) }
    stream.addEventListener('message', heard)
    stream.addEventListener('close', closed)
  })
}

class CircuitConnection extends AbstractMultiaddrConnection {
  constructor (private readonly stream: Stream, remoteAddr: Multiaddr, components: Components) {
    super({ remoteAddr, direction: 'outbound', log: components.logger.forComponent('kvasir:circuit') })
    stream.addEventListener('message', event => { this.onData(event.data) })
    stream.addEventListener('drain', () => { this.safeDispatchEvent('drain') })
    stream.addEventListener('remoteCloseWrite', () => { this.onTransportClosed() })
    stream.addEventListener('close', event => { this.onTransportClosed(event.error) })
  }

  override sendData (data: Uint8ArrayList): { sentBytes: number, canSendMore: boolean } {
    const sentBytes = data.byteLength
    return { sentBytes, canSendMore: this.stream.send(data) }
  }

  override sendReset (error: Error): void {
    this.stream.abort(error)
  }

  override async sendClose (): Promise<void> {
    await this.stream.close()
  }

  override sendPause (): void {
    this.stream.pause()
  }

  override sendResume (): void {
    this.stream.resume()
  }
}

function circuitOver (stream: Stream, address: Multiaddr, components: Components): MultiaddrConnection {
  return new CircuitConnection(stream, address, components)
}
