// SHA-256 as this origin has it: the browser's own where it is secure, else in WebAssembly.
import { createSHA256 } from 'hash-wasm'
import type { Sha256 } from '../roles/download.js'

export async function openSha256 (): Promise<Sha256> {
  if (globalThis.crypto.subtle !== undefined) {
    return async data => new Uint8Array(await crypto.subtle.digest('SHA-256', data as Uint8Array<ArrayBuffer>))
  }
  const hasher = await createSHA256()
  return async data => hasher.init().update(data).digest('binary')
}
