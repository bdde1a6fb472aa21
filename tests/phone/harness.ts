// Lets Python call parts of the page: a line of JSON [name, ...arguments] on stdin, a line with the result, or with the
// error, on stdout. Bytes travel as hex.
import '../../kvasir_node/phone/src/base/polyfill.js'
import { createHash } from 'node:crypto'
import { readFileSync } from 'node:fs'
import { createInterface } from 'node:readline'
import { generateKeyPairFromSeed } from '@libp2p/crypto/keys'
import { type ICryptoInterface, noise, pureJsCrypto } from '@libp2p/noise'
import { multiaddrConnectionPair } from '@libp2p/utils'
import { yamux } from '@libp2p/yamux'
import { Uint8ArrayList } from 'uint8arraylist'
import { objection } from '../../kvasir_node/phone/src/decide/manners.js'
import { type Command, type Event, Placement } from '../../kvasir_node/phone/src/decide/placement.js'
import { Misbehaved } from '../../kvasir_node/phone/src/base/errors.js'
import { cidFromBytes, cidToBytes, parseSlice } from '../../kvasir_node/phone/src/base/ids.js'
import { Arena } from '../../kvasir_node/phone/src/model/arena.js'
import { decodeLayerNode, decodeManifest } from '../../kvasir_node/phone/src/model/manifest.js'
import { expertFileBytes } from '../../kvasir_node/phone/src/model/expertFile.js'
import { Kernel } from '../../kvasir_node/phone/src/model/shard.js'
import { CallStream } from '../../kvasir_node/phone/src/net/callStream.js'
import type { ByteStream } from '../../kvasir_node/phone/src/net/byteStream.js'
import { noiseCrypto } from '../../kvasir_node/phone/src/net/cipher.js'
import { quietNoise } from '../../kvasir_node/phone/src/net/noise.js'
import { encodeError, decodeError } from '../../kvasir_node/phone/src/net/frames.js'
import { hello } from '../../kvasir_node/phone/src/net/hello.js'
import { dialAddress, muxer } from '../../kvasir_node/phone/src/net/network.js'
import { tellWindowsSeldom } from '../../kvasir_node/phone/src/net/windows.js'
import { mayTake, pair, readLink, readPass } from '../../kvasir_node/phone/src/net/pairing.js'
import { megabytes, verdictOf } from '../../kvasir_node/phone/src/page/words.js'
import { Rate } from '../../kvasir_node/phone/src/page/rate.js'
import { fetchBlocks, readBlock } from '../../kvasir_node/phone/src/roles/download.js'
import { Shards } from '../../kvasir_node/phone/src/roles/shards.js'
import { BlockStore, memoryDisk } from '../../kvasir_node/phone/src/store/blockStore.js'
import { decodeAnswer, encodeWant } from '../../kvasir_node/phone/src/wire/blocks.js'
import { spellSlices } from '../../kvasir_node/phone/src/wire/columns.js'
import * as messages from '../../kvasir_node/phone/src/wire/messages.js'
import { encodeAnswer, readRequest } from '../../kvasir_node/phone/src/wire/tensors.js'

const hex = (bytes: Uint8Array): string => Buffer.from(bytes).toString('hex')
const bytes = (text: string): Uint8Array<ArrayBuffer> => new Uint8Array(Buffer.from(text, 'hex'))
const plain = (value: unknown): unknown => JSON.parse(JSON.stringify(value, (_, each) => each instanceof Uint8Array ? hex(each) : each instanceof Map ? [...each] : each))
const turn = async (): Promise<void> => { await new Promise(resolve => setTimeout(resolve, 0)) }

/** A stream whose far end is a script: what was written is kept, what is to come is pushed. */
class Scripted implements ByteStream {
  written: Uint8Array[] = []
  isReset = false
  data: (chunk: Uint8Array) => void = () => {}
  ended: (reason: string) => void = () => {}

  constructor (private readonly answer: (total: number) => Uint8Array | undefined = () => undefined) {}

  write (data: Uint8Array | { subarray: () => Uint8Array }): void {
    this.written.push(data instanceof Uint8Array ? data : data.subarray())
    const answer = this.answer(this.written.reduce((sum, part) => sum + part.length, 0))
    if (answer !== undefined) setTimeout(() => { this.data(answer) }, 0)
  }

  onData (data: (chunk: Uint8Array) => void, ended: (reason: string) => void): void {
    this.data = data
    this.ended = ended
  }

  reset (): void {
    this.isReset = true
  }
}

/** The bytes as Noise hands them over: whole, or as the pieces that came in. */
const pieces = (data: Uint8Array, cuts: number[]): Uint8Array | Uint8ArrayList =>
  cuts.length === 0 ? data : new Uint8ArrayList(...[0, ...cuts].map((from, place) => data.subarray(from, cuts[place])))

const ciphers: Record<string, ICryptoInterface> = { wasm: noiseCrypto(), js: pureJsCrypto }

let placement: Placement
let kernel: Kernel
let shards: Shards
let manifest: ReturnType<typeof decodeManifest>

const operations: Record<string, (...given: any[]) => unknown> = {
  cid: (raw: string) => { const cid = cidFromBytes(bytes(raw)); return [cid, hex(cidToBytes(cid))] },
  columns: (slices: string[]) => hex(spellSlices(slices.map(parseSlice))),
  poll: (memoryBytes: number, have: any[], busy: any[], roundTrips: any[]) => {
    const parts = (given: any[]): messages.Part[] => given.map(([model, slice]) => ({ model, slice: parseSlice(slice) }))
    return hex(messages.encodePoll({ memoryBytes, have: parts(have), busy: parts(busy), roundTrips }))
  },
  renewals: (leases: any[]) => hex(messages.encodeRenewals(leases.map(each => ({ ...each, slice: parseSlice(each.slice) })))),
  attachment: (model: string, dtype: string, slices: string[]) => hex(messages.encodeAttachment(model, dtype, slices.map(parseSlice))),
  about: (name: string, version: string) => hex(messages.encodeAbout({ name, version, roles: ['worker'], addresses: [], grants: [] })),
  readPollAnswer: (data: string) => messages.readPollAnswer(bytes(data)),
  readVerdicts: (data: string) => messages.readVerdicts(bytes(data)),
  readStanding: (data: string) => messages.readStanding(bytes(data)),
  readAbout: (data: string) => messages.readAbout(bytes(data)),
  want: (cids: string[]) => hex(encodeWant(cids)),
  readAnswer: (data: string, count: number) => decodeAnswer(bytes(data), count),
  error: (data: string) => hex(encodeError(decodeError(bytes(data)))),
  readLink: (link: string) => readLink(link),
  readPass: (data: string) => readPass(bytes(data)),
  mayTake: async (pass: string, peer: string, role: 'hub' | 'coordinator', grants: any[]) =>
    await mayTake(readPass(bytes(pass)), peer, role, grants.map(([granted, grant]) => [granted, bytes(grant)])),
  pair: async (code: string, name: string, answer: string) => {
    const stream = new Scripted(() => bytes(answer))
    const pass = await pair(stream, bytes(code), name)
    return [hex(Buffer.concat(stream.written)), pass]
  },
  hello: async (own: string, peer: string, secret: string, about: string, nonce: string, answers: string[]) => {
    const real = crypto.getRandomValues
    crypto.getRandomValues = (into: any) => { into.set(bytes(nonce)); return into }
    try {
      const left = [...answers]
      const stream = new Scripted(() => { const next = left.shift(); return next === undefined ? undefined : bytes(next) })
      const told = await hello(stream, { own, peer, secret: bytes(secret), about: bytes(about) })
      return [stream.written.map(hex), hex(told)]
    } finally {
      crypto.getRandomValues = real
    }
  },
  seal: (cipher: string, key: string, nonce: string, extra: string, text: string, cuts: number[] = []) =>
    hex(ciphers[cipher]!.chaCha20Poly1305Encrypt(pieces(bytes(text), cuts), bytes(nonce), bytes(extra), bytes(key)).subarray()),
  unseal: (cipher: string, key: string, nonce: string, extra: string, sealed: string, cuts: number[] = []) =>
    hex(ciphers[cipher]!.chaCha20Poly1305Decrypt(pieces(bytes(sealed), cuts), bytes(nonce), bytes(extra), bytes(key)).subarray()),
  /** As Noise does it: what was sealed is overwritten. The bytes behind it, and those after a refusal, are as they were. */
  unsealInPlace: (cipher: string, key: string, nonce: string, extra: string, sealed: string) => {
    const message = bytes(sealed)
    try {
      ciphers[cipher]!.chaCha20Poly1305Decrypt(message, bytes(nonce), bytes(extra), bytes(key), message.subarray(0, message.length - 16))
    } catch {
      return [false, hex(message)]
    }
    return [true, hex(message)]
  },
  whichCipher: (wasm: string, isWithout: boolean) => {
    const known = globalThis.WebAssembly
    if (isWithout) Reflect.deleteProperty(globalThis, 'WebAssembly')
    try {
      return (wasm === '' ? noiseCrypto() : noiseCrypto(bytes(wasm))) === pureJsCrypto ? 'js' : 'wasm'
    } finally {
      globalThis.WebAssembly = known
    }
  },
  /**
   * Our end of a Noise session and js-libp2p's own: what each receives of messages of these sizes, and how many errors
   * were made meanwhile. The wire comes in pieces of so many bytes; the byte at `changedAt` of what the peer sends is changed.
   */
  noise: async (sizes: number[], pieceBytes: number, changedAt: number | null) => {
    const [near, far] = multiaddrConnectionPair()
    const ends = await Promise.all([1, 2].map(async seed => ({
      privateKey: await generateKeyPairFromSeed('Ed25519', new Uint8Array(32).fill(seed)),
      logger: { forComponent: () => near.log },
      upgrader: { getStreamMuxers: () => new Map() }
    })))
    const [ours, peers] = await Promise.all([
      quietNoise()(ends[0] as any).secureOutbound(near as any),
      noise({ crypto: pureJsCrypto })(ends[1] as any).secureInbound(far as any)
    ])
    const send = far.send.bind(far)
    let sent = 0
    far.send = data => {
      const message = data.slice()
      if (changedAt !== null && changedAt >= sent && changedAt < sent + message.length) message[changedAt - sent]! ^= 1
      sent += message.length
      for (let at = 0; at < message.length; at += pieceBytes) send(message.subarray(at, at + pieceBytes))
      return true
    }
    const received: [string, string] = ['', '']
    let ended: string | null = null
    ;[ours, peers].forEach(({ connection }, place) => { connection.addEventListener('message', ({ data }) => { received[place] += hex(data.subarray()) }) })
    ours.connection.addEventListener('close', ({ error }) => { ended = error?.message ?? '' })
    const known = globalThis.RangeError
    let errors = 0
    globalThis.RangeError = new Proxy(known, { apply: (made, self, given) => { errors++; return Reflect.apply(made, self, given) } })
    try {
      for (const size of sizes) for (const { connection } of [ours, peers]) connection.send(new Uint8Array(size).fill(size))
      for (let turns = 0; turns < 50; turns++) await turn()
    } finally {
      globalThis.RangeError = known
    }
    return { received, ended, errors }
  },
  dialAddress: (address: string, peer: string) => dialAddress(address, peer).map(String),
  manifest: (data: string) => {
    manifest = decodeManifest(bytes(data))
    return { name: manifest.name, layers: [...manifest.layerNodes], bytes: [...manifest.layerParts.values()].map(expertFileBytes) }
  },
  layerNode: (data: string, layer: number) => decodeLayerNode(bytes(data), manifest, layer),
  kernel: (path: string, bytesMax: number) => {
    kernel = Kernel.open(new WebAssembly.Module(readFileSync(path)), bytesMax)
    shards = new Shards(kernel, bytesMax)
    return kernel.memory.buffer.byteLength
  },
  load: (layer: number, index: number, file: string, isInt8 = false) => {
    shards.loadNow('model', manifest, { layer, index, file: bytes(file), parts: manifest.layerParts.get(layer)!, isInt8 })
    return kernel.memory.buffer.byteLength
  },
  drop: (layer: number, index: number) => { shards.drop('model', layer, index); return null },
  compute: async (frame: string) => {
    const request = readRequest(bytes(frame), manifest.hiddenSize)
    const sums = await shards.sums('model', request)
    return hex(encodeAnswer(sums.values, request.rowCount, request.encoding, 0))
  },
  arena: (acts: Array<['take', number] | ['give', number]>, bytesMax: number) => {
    const memory = new WebAssembly.Memory({ initial: 1, maximum: 1024 })
    const arena = new Arena(memory, 16, bytesMax)
    const taken: Array<[number, number]> = []
    return acts.map(([act, value]) => {
      if (act === 'take') return taken.push([arena.take(value), value]) && taken.at(-1)![0]
      const [at, size] = taken[value]!
      arena.give(at, size)
      return memory.buffer.byteLength
    })
  },
  objection: (wishes: any, senses: any) => objection(wishes, { ...senses, isCharging: senses.isCharging ?? undefined }),
  verdict: (state: any) => verdictOf(state),
  megabytes: (count: number) => megabytes(count),
  rate: (samples: Array<[number, number]>) => { const rate = new Rate(); for (const [now, count] of samples) rate.note(now, count); return rate.perSecond },
  placement: (limits: any) => { placement = new Placement(limits, () => 0.5); return null },
  handle: (event: Event, now: number) => [placement.handle(event, now).map((command: Command) => command), placement.nextAt() ?? null],
  /** Feeds chunks to a call stream that answers each call with its body, after `later` turns; tells what it wrote. */
  calls: async (chunks: string[], inFlightMax: number, bodyBytesMax: number, isServing: boolean, calls: string[]) => {
    const stream = new Scripted()
    const results: string[] = []
    const notices: string[] = []
    const handler = async (method: number, body: Uint8Array): Promise<Uint8Array> => {
      await turn()
      if (method === 9) throw new Misbehaved('bad_frame', 'no')
      return body
    }
    const options = { inFlightMax, bodyBytesMax, onNotice: (method: number, body: Uint8Array) => { notices.push(`${method}:${hex(body)}`) } }
    const calling = new CallStream(stream, isServing ? { ...options, handler } : options)
    let ended: string | null = null
    void calling.ended.then(reason => { ended = reason })
    for (const body of calls) calling.call(1, bytes(body), 60).then(result => results.push(hex(result)), (error: Error) => results.push(error.name))
    for (const chunk of chunks) { stream.data(bytes(chunk)); await turn(); await turn() }
    return { written: stream.written.map(hex), results, notices, ended, isReset: stream.isReset }
  },
  /** How many of so many bytes come from a peer that sends what yamux's own windows let it, in pieces of 64 KiB. */
  windows: async (count: number, waitMs: number) => {
    const [near, far] = multiaddrConnectionPair()
    const [here, peer] = [muxer().createStreamMuxer(near), yamux({ enableKeepAlive: false })().createStreamMuxer(far)]
    peer.addEventListener('stream', ({ detail }) => { for (let at = 0; at < count; at += 1 << 16) detail.send(new Uint8Array(1 << 16)) })
    const stream = await here.createStream()
    tellWindowsSeldom(stream)
    let received = 0
    stream.addEventListener('message', ({ data }) => { received += data.byteLength })
    const until = performance.now() + waitMs
    while (received < count && performance.now() < until) await turn()
    return received
  },
  /** One download from scripted providers: each answers a WANT by its table of block -> bytes, "missing" or "bad". */
  download: async (wanted: Record<string, string>, providers: Record<string, Record<string, string>>) => {
    const tally = { fetched: 0, reused: 0, wasted: 0 }
    const store = await BlockStore.open(memoryDisk(), 1 << 20)
    const tools = {
      store,
      tally,
      log: () => {},
      sha256: async (data: Uint8Array) => createHash('sha256').update(data).digest(),
      open: async (peer: string) => providerStream(providers[peer]!)
    }
    await fetchBlocks(tools, Object.keys(providers), Object.keys(wanted), new AbortController().signal)
    for (const [cid, block] of Object.entries(wanted)) if (hex(await readBlock(tools, cid)) !== block) throw new Error('another block')
    return tally
  },
  store: async (acts: any[], bytesMax: number) => {
    let now = 0
    const store = await BlockStore.open(memoryDisk(), bytesMax, () => ++now)
    const results: unknown[] = []
    for (const [act, ...given] of acts) {
      if (act === 'put') results.push(await store.put(given[0], new Uint8Array(given[1])).then(() => 'kept', (error: Error) => error.name))
      else if (act === 'get') results.push((await store.get(given[0]))?.length ?? null)
      else if (act === 'pin') store.pin(given[0], given[1])
      else if (act === 'unpin') store.unpin(given[0])
      else results.push(store.usedBytes)
    }
    return results
  }
}

function providerStream (blocks: Record<string, string>): ByteStream {
  let tell: (chunk: Uint8Array) => void = () => {}
  const frame = (kind: number, id: number, body: Uint8Array): Uint8Array => {
    const header = Buffer.alloc(14)
    header.writeUInt32LE(body.length, 0)
    header.writeUInt8(kind, 4)
    header.writeBigUInt64LE(BigInt(id), 6)
    return Buffer.concat([header, body])
  }
  const length = (value: number): Buffer => { const out = Buffer.alloc(4); out.writeUInt32LE(value); return out }
  return {
    onData: data => {
      tell = data
      setTimeout(() => { data(frame(6, 0, Buffer.concat([length(8), length(1 << 20)]))) }, 0)
    },
    reset: () => {},
    write: given => {
      const data = given instanceof Uint8Array ? given : given.subarray()
      if (data[4] !== 1) return
      const id = Number(Buffer.from(data).readBigUInt64LE(6))
      const cids: string[] = []
      for (let at = 15; at + 38 <= data.length; at += 38) cids.push(cidFromBytes(data.subarray(at + 2, at + 38)))
      const parts = cids.flatMap(cid => {
        const block = blocks[cid]
        return block === undefined ? [length(0xffffffff)] : [length(block.length / 2), Buffer.from(block, 'hex')]
      })
      setTimeout(() => { tell(frame(2, id, Buffer.concat(parts))) }, 0)
    }
  }
}

const lines = createInterface({ input: process.stdin })
lines.on('close', () => { process.exit(0) }) // calls that nobody answers would keep it alive
lines.on('line', line => {
  void (async () => {
    const [name, ...given] = JSON.parse(line) as [string, ...unknown[]]
    try {
      return { result: plain(await operations[name]!(...given)) ?? null }
    } catch (error) {
      const known = error as Error & { reason?: string }
      return { error: known.name, reason: known.reason ?? '', message: known.message }
    }
  })().then(answer => { process.stdout.write(`${JSON.stringify(answer)}\n`) })
})
