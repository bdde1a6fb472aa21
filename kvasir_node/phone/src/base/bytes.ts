// Small helpers for bytes. They know no message.

export type Bytes = Uint8Array<ArrayBuffer>

export function concat (parts: readonly Uint8Array[]): Bytes {
  const joined = new Uint8Array(parts.reduce((sum, part) => sum + part.length, 0))
  let at = 0
  for (const part of parts) {
    joined.set(part, at)
    at += part.length
  }
  return joined
}

/** Whether they are the same; takes as long for those that differ early as for those that differ late. */
export function equal (a: Uint8Array, b: Uint8Array): boolean {
  let difference = a.length ^ b.length
  for (let at = 0; at < a.length; at++) difference |= a[at]! ^ (b[at] ?? 0)
  return difference === 0
}

export function u16 (value: number): Bytes {
  return Uint8Array.of(value & 0xff, value >> 8)
}

export function u32 (value: number): Bytes {
  const bytes = new Uint8Array(4)
  viewOf(bytes).setUint32(0, value, true)
  return bytes
}

export function viewOf (bytes: Uint8Array): DataView {
  return new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength)
}

/** The same bytes, in memory of their own if they do not begin at a multiple of `alignment`. */
export function aligned (bytes: Uint8Array, alignment: number): Uint8Array {
  return bytes.byteOffset % alignment === 0 ? bytes : bytes.slice()
}

const UTF8 = new TextEncoder()

export function utf8 (text: string): Bytes {
  return UTF8.encode(text)
}
