// The guest in Node.js, without a page: what the interop tests run. Not part of the wheel.
//
//     node terminal.mjs '{"seed": hex, "pass": {...} or "link": text, "kernel": path, "memory_bytes": n}'
//
// A line of JSON on stdout for each change; on stdin a line "pause", "resume" or "leave".
import '../base/polyfill.js'
import { createHash } from 'node:crypto'
import { readFileSync } from 'node:fs'
import { createInterface } from 'node:readline'
import { tcp } from '@libp2p/tcp'
import { wordsOf } from '../base/errors.js'
import { Kernel } from '../model/shard.js'
import { Network } from '../net/network.js'
import { type Pass, readLink } from '../net/pairing.js'
import { memoryDisk } from '../store/blockStore.js'
import { Guest, becomeGuest } from '../roles/guest.js'
import { Shards } from '../roles/shards.js'
import { memoryNotes } from '../roles/slicesOnDisk.js'

interface Config {
  readonly seed: string
  readonly link?: string
  readonly pass?: Record<'swarm' | 'key' | 'hub' | 'coordinator', string> & { readonly addresses: string[] }
  readonly kernel: string
  readonly memory_bytes: number
}

const REPORT_MS = 100
const KERNEL_ROOM_BYTES = 64 << 20
const config = JSON.parse(process.argv[2] ?? '') as Config
const say = (document: object): void => { process.stdout.write(`${JSON.stringify(document)}\n`) }
const bytes = (hex: string): Uint8Array => Uint8Array.from(Buffer.from(hex, 'hex'))

function passOf (given: NonNullable<Config['pass']>): Pass {
  return { swarm: bytes(given.swarm), key: bytes(given.key), hub: bytes(given.hub), coordinator: bytes(given.coordinator), addresses: given.addresses }
}

const network = await Network.open({ seed: bytes(config.seed), transports: [tcp()] })
const pass = config.pass !== undefined ? passOf(config.pass) : await becomeGuest(network, readLink(config.link ?? ''), 'a terminal')
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
  name: 'a terminal',
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
