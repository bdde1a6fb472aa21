// This page's js-libp2p node, as our protocols want it: connect, open streams, hear of lost peers.
// It does not know membership or roles. Nobody can dial a page, so it only dials.
import { generateKeyPairFromSeed } from '@libp2p/crypto/keys'
import { peerIdFromString } from '@libp2p/peer-id'
import { webSockets } from '@libp2p/websockets'
import { yamux } from '@libp2p/yamux'
import { type Multiaddr, multiaddr } from '@multiformats/multiaddr'
import { type Libp2p, type Libp2pOptions, createLibp2p } from 'libp2p'
import type { PeerId } from '../base/ids.js'
import { KvasirError, Unreachable, wordsOf } from '../base/errors.js'
import { type ByteStream, byteStreamOf } from './byteStream.js'
import { circuits } from './circuit.js'
import { quietNoise } from './noise.js'
import { tellWindowsSeldom } from './windows.js'

const PING_MS = 5000 // how often a connection's round trip is measured ...
const SILENCE_MS = 20_000 // ... and who does not answer for so long is gone; a busy machine may well take seconds
const DIAL_S = 10
const WINDOW_BYTES_MAX = 8 << 20 // what a stream's window grows up to
const READ_BUFFER_BYTES_MAX = 16 << 20

export const muxer = yamux({ streamOptions: { maxStreamWindowSize: WINDOW_BYTES_MAX, maxReadBufferLength: READ_BUFFER_BYTES_MAX } })

/** Bytes of our streams, both ways, since the start. */
export interface Traffic { received: number, sent: number }

export interface NetworkOptions {
  readonly seed: Uint8Array // 32 bytes: the ed25519 key that the peer id comes from
  readonly transports?: Libp2pOptions['transports'] // beside WebSockets
  readonly dialAddress?: typeof dialAddress // where there are other transports
}

export class Network {
  readonly traffic: Traffic = { received: 0, sent: 0 }

  private constructor (private readonly node: Libp2p, private readonly dialAddress: (address: string, peer: PeerId) => Multiaddr[]) {}

  static async open (options: NetworkOptions): Promise<Network> {
    const node = await createLibp2p({
      privateKey: await generateKeyPairFromSeed('Ed25519', options.seed),
      transports: [webSockets(), circuits(), ...options.transports ?? []],
      connectionEncrypters: [quietNoise()],
      streamMuxers: [muxer],
      connectionGater: { denyDialMultiaddr: () => false }, // private addresses are refused otherwise
      connectionMonitor: { pingInterval: PING_MS, pingTimeout: { minTimeout: SILENCE_MS } }
    })
    return new Network(node, options.dialAddress ?? dialAddress)
  }

  get peerId (): PeerId {
    return this.node.peerId.toString()
  }

  isConnected (peer: PeerId): boolean {
    return this.node.getConnections(peerIdFromString(peer)).length > 0
  }

  /** undefined while it was not measured. */
  roundTripS (peer: PeerId): number | undefined {
    const rtts = this.node.getConnections(peerIdFromString(peer)).flatMap(each => each.rtt ?? [])
    return rtts.length > 0 ? Math.min(...rtts) / 1000 : undefined
  }

  /** Connects to a peer by any of its addresses, each without the peer's id or with it. Rejects with Unreachable. */
  async connect (peer: PeerId, addresses: readonly string[]): Promise<void> {
    if (this.isConnected(peer)) return
    const dialled = addresses.flatMap(address => this.dialAddress(address, peer))
    if (dialled.length === 0) throw new Unreachable(`${peer} has no address that a page can dial`)
    try {
      await this.node.dial(dialled, { signal: AbortSignal.timeout(DIAL_S * 1000) })
    } catch (error) {
      throw new Unreachable(`no connection to ${peer}: ${wordsOf(error).slice(0, 300)}`)
    }
  }

  /** Opens a stream to a connected peer. Rejects with Unreachable. */
  async openStream (peer: PeerId, protocol: string): Promise<ByteStream> {
    const connection = this.node.getConnections(peerIdFromString(peer))[0]
    if (connection === undefined) throw new Unreachable(`${peer} is not connected`)
    try {
      const stream = await connection.newStream(protocol, { signal: AbortSignal.timeout(DIAL_S * 1000), runOnLimitedConnection: true })
      tellWindowsSeldom(stream)
      return counted(byteStreamOf(stream), this.traffic)
    } catch (error) {
      throw error instanceof KvasirError ? error : new Unreachable(`${peer} opens no ${protocol}: ${wordsOf(error).slice(0, 200)}`)
    }
  }

  onPeerLost (lost: (peer: PeerId) => void): void {
    this.node.addEventListener('peer:disconnect', event => { lost(event.detail.toString()) })
  }

  async disconnect (peer: PeerId): Promise<void> {
    await this.node.hangUp(peerIdFromString(peer)).catch(() => {}) // it is gone either way
  }

  async stop (): Promise<void> {
    await this.node.stop()
  }
}

/** What a page dials for an address: any listening port takes WebSockets. Nothing for what it cannot dial. */
export function dialAddress (address: string, peer: PeerId): Multiaddr[] {
  const direct = /^(\/(?:ip4|ip6|dns|dns4|dns6)\/[^/]+\/tcp\/[0-9]+)(\/ws|\/tls\/ws|\/wss)?(?:\/p2p\/([^/]+))?(\/p2p-circuit)?(?:\/p2p\/([^/]+))?$/.exec(address)
  if (direct === null) return []
  const [, base, ws, first, circuit, last] = direct
  const end = circuit === undefined ? first : last
  if ((end !== undefined && end !== peer) || (circuit !== undefined && first === undefined)) return []
  const socket = `${base}${ws ?? '/ws'}`
  return [multiaddr(circuit === undefined ? `${socket}/p2p/${peer}` : `${socket}/p2p/${first}/p2p-circuit/p2p/${peer}`)]
}

function counted (stream: ByteStream, traffic: Traffic): ByteStream {
  return {
    ...stream,
    write: data => {
      traffic.sent += data.byteLength
      stream.write(data)
    },
    onData: (data, ended) => {
      stream.onData(chunk => {
        traffic.received += chunk.length
        data(chunk)
      }, ended)
    }
  }
}
