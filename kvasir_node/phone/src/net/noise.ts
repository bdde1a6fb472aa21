// js-libp2p's Noise, with our cipher, and without an Error for each message: its decoder asks for the length of the next
// one until that throws, and an Error takes down its stack.
import type { ConnectionEncrypter } from '@libp2p/interface'
import { noise, type NoiseComponents } from '@libp2p/noise'
import type { Uint8ArrayList } from 'uint8arraylist'
import { noiseCrypto } from './cipher.js'

const LENGTH_BYTES = 2
const LENGTH_MAX = 0xffff

/** As much of an EncryptedMessageStream of @libp2p/noise 17.0.3 as is used; package.json pins it. */
interface Encrypted { readonly decoder?: { lengthDecoder: (held: Uint8ArrayList) => number } }

export function quietNoise (): (components: NoiseComponents) => ConnectionEncrypter {
  return components => {
    const encrypter: ConnectionEncrypter = noise({ crypto: noiseCrypto() })(components)
    const secure = encrypter.secureOutbound.bind(encrypter)
    encrypter.secureOutbound = async (connection, options) => {
      const secured = await secure(connection, options)
      const { decoder } = secured.connection as Encrypted
      if (decoder !== undefined) decoder.lengthDecoder = lengthOrMore
      return secured
    }
    return encrypter
  }
}

/** While there is no length, one that waits for more than what has come. */
function lengthOrMore (held: Uint8ArrayList): number {
  return held.byteLength < LENGTH_BYTES ? LENGTH_MAX : held.getUint16(0)
}
