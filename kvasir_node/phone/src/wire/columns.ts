// Lists of slices in few bytes, as runs of varints; see kvasir_node/wire/columns.py, which also reads them.
import type { Bytes } from '../base/bytes.js'
import type { SliceId } from '../base/ids.js'

/** `slices` ascend, none twice. */
export function spellSlices (slices: readonly SliceId[]): Bytes {
  const out: number[] = []
  let layer = 0
  let first = 0
  for (let at = 0; at < slices.length;) {
    const start = slices[at]!
    const width = start.last - start.first + 1
    let length = 1
    while (at + length < slices.length && isNeighbour(slices[at + length]!, start, length * width)) length++
    if (start.layer !== layer) first = 0
    put(out, start.layer - layer)
    put(out, start.first - first)
    put(out, width - 1)
    put(out, length - 1)
    layer = start.layer
    first = start.first + (length - 1) * width
    at += length
  }
  return Uint8Array.from(out)
}

function isNeighbour (slice: SliceId, start: SliceId, offset: number): boolean {
  return slice.layer === start.layer && slice.first === start.first + offset && slice.last === start.last + offset
}

function put (out: number[], value: number): void {
  for (; value > 0x7f; value >>= 7) out.push(value & 0x7f | 0x80)
  out.push(value)
}
