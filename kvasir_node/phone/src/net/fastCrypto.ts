// Noise's cipher in WebAssembly: the library's own for browsers is plain JavaScript and several times slower.
import { ChaCha20Poly1305, newInstance } from '@chainsafe/as-chacha20poly1305'
import { type ICryptoInterface, pureJsCrypto } from '@libp2p/noise'

export function fastCrypto (): ICryptoInterface {
  const cipher = new ChaCha20Poly1305(newInstance())
  return {
    ...pureJsCrypto,
    chaCha20Poly1305Encrypt: (plaintext, nonce, data, key) => cipher.seal(key, nonce, plaintext.subarray(), data),
    chaCha20Poly1305Decrypt: (ciphertext, nonce, data, key, into) => {
      const plaintext = cipher.open(key, nonce, ciphertext.subarray(), data, into)
      if (plaintext === null) throw new Error('a message of the connection was changed on its way')
      return plaintext
    }
  }
}
