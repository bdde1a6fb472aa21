// Slices whose blocks are on this disk, as far as we know: a poll tells them, and a reload serves them again. The store
// keeps what it has room for, so a note may be out of date; then the slice is fetched once more.
import { type Cid, sliceText } from '../base/ids.js'
import type { Part } from '../wire/messages.js'

const SLICES_MAX = 256

/** Where the notes are kept. */
export interface Notes {
  readonly read: () => Promise<Part[]>
  readonly write: (parts: readonly Part[]) => Promise<void>
}

export class SlicesOnDisk {
  private constructor (private readonly notes: Notes, private readonly parts: Map<string, Part>) {}

  static async open (notes: Notes): Promise<SlicesOnDisk> {
    return new SlicesOnDisk(notes, new Map((await notes.read()).map(part => [keyOf(part), part])))
  }

  list (): Part[] {
    return [...this.parts.values()]
  }

  async note (part: Part): Promise<void> {
    const { model, slice } = part
    this.parts.delete(keyOf(part))
    this.parts.set(keyOf(part), { model, slice }) // newest last
    if (this.parts.size > SLICES_MAX) this.parts.delete(this.parts.keys().next().value!)
    await this.notes.write(this.list())
  }
}

function keyOf (part: Part): string {
  return `${part.model satisfies Cid}/${sliceText(part.slice)}`
}

/** Notes that end with the process. */
export function memoryNotes (): Notes {
  return { read: async () => [], write: async () => {} }
}
