// The guest in Node.js, without a page: what the interop tests run. Not part of the wheel.
//
//     node terminal.mjs '{"seed": hex, "link": text, "kernel": path, "memory_bytes": n, "tcp": true or false}'
//
// A line of JSON on stdout for each change; on stdin a line "pause", "resume" or "leave".
import '../base/polyfill.js'
import { createHash } from 'node:crypto'
import { readFileSync } from 'node:fs'
import { createInterface } from 'node:readline'
import { tcp } from '@libp2p/tcp'
import { type Multiaddr, multiaddr } from '@multiformats/multiaddr'
import { wordsOf } from '../base/errors.js'
import { Kernel } from '../model/shard.js'
import { gatherSends } from '../net/gatheredSocket.js'
import { Network, dialAddress } from '../net/network.js'
import { readLink } from '../net/pairing.js'
import { memoryDisk } from '../store/blockStore.js'
import { Guest, becomeGuest } from '../roles/guest.js'
import { Shards } from '../roles/shards.js'
import { memoryNotes } from '../roles/slicesOnDisk.js'

interface Config {
  readonly seed: string
  readonly link: string
  readonly kernel: string
  readonly memory_bytes: number
  readonly tcp: boolean // dials TCP, which a page cannot, instead of WebSockets
}

const REPORT_MS = 100
const KERNEL_ROOM_BYTES = 64 << 20
const config = JSON.parse(process.argv[2] ?? '') as Config
const say = (document: object): void => { process.stdout.write(`${JSON.stringify(document)}\n`) }
const bytes = (hex: string): Uint8Array => Uint8Array.from(Buffer.from(hex, 'hex'))

/** The address without its WebSocket. */
function tcpAddress (address: string, peer: string): Multiaddr[] {
  const [, base] = /^(\/ip4\/[^/]+\/tcp\/[0-9]+)/.exec(address) ?? []
  return base === undefined ? [] : [multiaddr(`${base}/p2p/${peer}`)]
}

gatherSends()
const network = await Network.open({ seed: bytes(config.seed), transports: [tcp()], dialAddress: config.tcp ? tcpAddress : dialAddress })
const pass = await becomeGuest(network, readLink(config.link), config.tcp ? 'over tcp' : 'over ws')
const kernel = Kernel.open(new WebAssembly.Module(readFileSync(config.kernel)), config.memory_bytes + KERNEL_ROOM_BYTES)
let isReporting = false
const report = (): void => {
  if (isReporting) return
  isReporting = true
  setTimeout(() => {
    isReporting = false
    say(guest.snapshot())
  }, REPORT_MS)
}
const guest = await Guest.open(network, pass, {
  name: config.tcp ? 'over tcp' : 'over ws',
  compute: new Shards(kernel, config.memory_bytes),
  disk: memoryDisk(),
  diskBytesMax: 1 << 30,
  notes: memoryNotes(),
  sha256: async data => createHash('sha256').update(data).digest(),
  log: text => { process.stderr.write(`${text}\n`) },
  changed: report,
  refused: words => { say({ refused: words }) }
})
guest.run()
createInterface({ input: process.stdin }).on('line', line => {
  if (line === 'pause') guest.worker.pause()
  else if (line === 'resume') guest.worker.resume()
  else if (line === 'leave') guest.leave().then(() => process.exit(0), (error: unknown) => { say({ error: wordsOf(error) }); process.exit(1) })
})
setInterval(report, 500)
