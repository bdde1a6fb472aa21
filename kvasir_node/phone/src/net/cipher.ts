// Noise's ChaCha20-Poly1305 in WebAssembly, by kernel/cipher.c: much quicker than js-libp2p's own (docs/log.md), in
// JavaScript. That one serves where there is no WebAssembly with SIMD. It does not know which connection a message is of:
// all of a thread's share one memory, as each call begins and ends here.
import { type ICryptoInterface, pureJsCrypto } from '@libp2p/noise'
import type { Uint8ArrayList } from 'uint8arraylist'
import code from '../../kernel/cipher.wasm'

const KEY_BYTES = 32
const NONCE_BYTES = 12
const TAG_BYTES = 16
const EXTRA_BYTES_MAX = 64 // as cipher.c has room for; Noise has a hash here, or nothing
const TEXT_BYTES_MAX = 65_536

interface CipherExports {
  readonly memory: WebAssembly.Memory
  readonly key: WebAssembly.Global
  readonly nonce: WebAssembly.Global
  readonly text_room: () => number
  readonly seal: (extraBytes: number, textBytes: number) => void
  readonly unseal: (extraBytes: number, textBytes: number) => number
}

class Cipher {
  private readonly exports: CipherExports
  private readonly memory: Uint8Array<ArrayBuffer>
  private readonly keyAt: number
  private readonly nonceAt: number
  private readonly textAt: number

  constructor (module: WebAssembly.Module) {
    this.exports = new WebAssembly.Instance(module).exports as unknown as CipherExports
    this.memory = new Uint8Array(this.exports.memory.buffer as ArrayBuffer) // it never grows
    this.keyAt = this.exports.key.value as number
    this.nonceAt = this.exports.nonce.value as number
    this.textAt = this.exports.text_room()
  }

  seal (text: Uint8Array | Uint8ArrayList, nonce: Uint8Array, extra: Uint8Array, key: Uint8Array): Uint8Array {
    const textBytes = text.byteLength
    this.put(text, textBytes, nonce, extra, key)
    this.exports.seal(extra.length, textBytes)
    return this.memory.slice(this.textAt, this.textAt + textBytes + TAG_BYTES)
  }

  /** Throws for another message than was sealed, and then writes nothing into `target`. */
  unseal (sealed: Uint8Array | Uint8ArrayList, nonce: Uint8Array, extra: Uint8Array, key: Uint8Array, target?: Uint8Array): Uint8Array {
    const textBytes = sealed.byteLength - TAG_BYTES
    this.put(sealed, textBytes, nonce, extra, key)
    if (this.exports.unseal(extra.length, textBytes) === 0) throw new Error('invalid tag')
    const text = target ?? new Uint8Array(textBytes)
    text.set(this.memory.subarray(this.textAt, this.textAt + textBytes))
    return text
  }

  private put (data: Uint8Array | Uint8ArrayList, textBytes: number, nonce: Uint8Array, extra: Uint8Array, key: Uint8Array): void {
    if (key.length !== KEY_BYTES || nonce.length !== NONCE_BYTES) throw new RangeError(`no key and nonce of Noise: ${key.length} and ${nonce.length} bytes`)
    if (textBytes < 0 || textBytes > TEXT_BYTES_MAX || extra.length > EXTRA_BYTES_MAX) throw new RangeError(`no message of Noise: ${textBytes} and ${extra.length} bytes`)
    this.memory.set(key, this.keyAt)
    this.memory.set(nonce, this.nonceAt)
    this.memory.set(extra, this.textAt - Math.ceil(extra.length / TAG_BYTES) * TAG_BYTES)
    let at = this.textAt
    for (const part of data instanceof Uint8Array ? [data] : data) {
      this.memory.set(part, at)
      at += part.length
    }
  }
}

/** What Noise is to compute with. `wasm` is another code in tests. */
export function noiseCrypto (wasm: BufferSource = code): ICryptoInterface {
  let cipher: Cipher
  try {
    cipher = new Cipher(new WebAssembly.Module(wasm))
  } catch { // no WebAssembly, or no SIMD
    return pureJsCrypto
  }
  return {
    ...pureJsCrypto,
    chaCha20Poly1305Encrypt: cipher.seal.bind(cipher),
    chaCha20Poly1305Decrypt: cipher.unseal.bind(cipher)
  }
}
