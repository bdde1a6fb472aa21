// js-libp2p against one address of ours: ping, identify, then BYTES random bytes echoed on /test/echo/1.
// node --input-type=module - MULTIADDR BYTES <interop.mjs, where the packages of kvasir_node/phone are; prints one JSON
// line, or ends with the error.
import { randomBytes } from 'node:crypto'
import { identify } from '@libp2p/identify'
import { noise } from '@libp2p/noise'
import { ping } from '@libp2p/ping'
import { tcp } from '@libp2p/tcp'
import { webSockets } from '@libp2p/websockets'
import { yamux } from '@libp2p/yamux'
import { multiaddr } from '@multiformats/multiaddr'
import { createLibp2p } from 'libp2p'

// js-libp2p wants Promise.withResolvers, which Node.js has from version 22 on.
Promise.withResolvers ??= function () {
  let resolve, reject
  const promise = new Promise((a, b) => { resolve = a; reject = b })
  return { promise, resolve, reject }
}

const [address, bytes] = process.argv.slice(2)
const node = await createLibp2p({
  transports: [tcp(), webSockets()],
  connectionEncrypters: [noise()],
  streamMuxers: [yamux()],
  connectionGater: { denyDialMultiaddr: () => false }, // private addresses are refused otherwise
  services: { identify: identify({ runOnConnection: false }), ping: ping() }
})

async function send (stream, data) {
  for (let at = 0; at < data.length; at += 65536) {
    if (!stream.send(data.subarray(at, at + 65536))) await stream.onDrain()
  }
}

async function receive (stream, count) {
  const parts = []
  let received = 0
  for await (const chunk of stream) {
    parts.push(chunk.subarray())
    received += chunk.byteLength
    if (received >= count) break
  }
  return Buffer.concat(parts)
}

// js-libp2p fails to read an answer that ends before it has read the protocol choice in front of it, which a busy
// machine cannot exclude.
async function identified (connection) {
  for (let attempt = 1; ; attempt++) {
    try {
      return await node.services.identify.identify(connection)
    } catch (error) {
      if (attempt === 5) throw error
      await new Promise(resolve => setTimeout(resolve, 200))
    }
  }
}

const connection = await node.dial(multiaddr(address))
const roundTrip = await node.services.ping.ping(connection.remotePeer)
const told = await identified(connection)
const stream = await connection.newStream('/test/echo/1')
const data = randomBytes(Number(bytes))
const [echoed] = await Promise.all([receive(stream, data.length), send(stream, data)])
console.log(JSON.stringify({
  muxer: connection.multiplexer,
  peer: connection.remotePeer.toString(),
  pinged: roundTrip >= 0,
  listens: told.listenAddrs.map(String),
  protocols: told.protocols,
  same: Buffer.compare(echoed, data) === 0
}))
await node.stop()
process.exit(0)
