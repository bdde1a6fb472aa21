// Canonical CBOR in and out, bounded; see kvasir_node/wire/codec.py. It does not know what the fields mean.
import { decode as cborDecode, encode as cborEncode } from 'cborg'
import type { Bytes } from '../base/bytes.js'
import { Misbehaved, wordsOf } from '../base/errors.js'

/** Lists, maps with text keys, text, bytes, numbers, booleans and null. Whole numbers travel as integers, which
 * readers of numbers take as well. */
export function encode (value: unknown): Bytes {
  return cborEncode(value) as Bytes
}

/** Reads one plain value; raises Misbehaved (too_large, bad_message) for all else. */
export function decode (data: Uint8Array, bytesMax: number, what: string): unknown {
  if (data.length > bytesMax) throw new Misbehaved('too_large', `${what} of ${data.length} bytes; at most ${bytesMax} are read`)
  try {
    return cborDecode(data, {
      strict: true,
      allowIndefinite: false,
      allowUndefined: false,
      allowNaN: false,
      allowInfinity: false,
      allowBigInt: false, // a count or a time beyond 2^53 is none that we can hold to
      rejectDuplicateMapKeys: true
    })
  } catch (error) {
    throw new Misbehaved('bad_message', `${what} is not CBOR that we read: ${wordsOf(error)}`)
  }
}

// eslint-disable-next-line no-control-regex
const CONTROL_CHARS = /[\u0000-\u001f\u007f-\u009f]/

/** Takes the fields of one decoded map one by one; `end` refuses what was not taken. */
export class Fields {
  private readonly left: Map<string, unknown>

  constructor (value: unknown, private readonly what: string) {
    if (typeof value !== 'object' || value === null || Array.isArray(value) || value instanceof Uint8Array) {
      throw new Misbehaved('bad_message', `${what} must be a map`)
    }
    this.left = new Map(Object.entries(value))
  }

  has (name: string): boolean {
    return this.left.has(name)
  }

  private take<T> (name: string, expected: string, fits: (value: unknown) => boolean): T {
    if (!this.left.has(name)) throw new Misbehaved('bad_message', `${this.what}.${name} is missing`)
    const value = this.left.get(name)
    this.left.delete(name)
    if (!fits(value)) throw new Misbehaved('bad_message', `${this.what}.${name} must be ${expected}`)
    return value as T
  }

  integer (name: string, low: number, high: number): number {
    return this.take(name, `a whole number from ${low} to ${high}`, value => isInteger(value, low, high))
  }

  number (name: string, low: number, high: number): number {
    return this.take(name, `a number from ${low} to ${high}`, value => isNumber(value, low, high))
  }

  text (name: string, charsMax: number): string {
    return this.take(name, `plain text of at most ${charsMax} characters`, value => isPlainText(value, charsMax))
  }

  binary (name: string, bytesMax: number): Uint8Array {
    return this.take(name, `at most ${bytesMax} bytes`, value => value instanceof Uint8Array && value.length <= bytesMax)
  }

  boolean (name: string): boolean {
    return this.take(name, 'true or false', value => typeof value === 'boolean')
  }

  items<T> (name: string, countMax: number, read: (item: unknown) => T): T[] {
    const list: unknown[] = this.take(name, `a list of at most ${countMax} items`, value => Array.isArray(value) && value.length <= countMax)
    return list.map(read)
  }

  /** A map as it came, with at most `countMax` entries. */
  map (name: string, countMax: number): Array<[string, unknown]> {
    const value: object = this.take(name, `a map of at most ${countMax} entries`, isMap)
    const entries = Object.entries(value)
    if (entries.length > countMax) throw new Misbehaved('bad_message', `${this.what}.${name} has more than ${countMax} entries`)
    return entries
  }

  end (): void {
    if (this.left.size > 0) {
      throw new Misbehaved('bad_message', `${this.what} has unknown fields: ${[...this.left.keys()].join(', ').slice(0, 80)}`)
    }
  }
}

function isMap (value: unknown): boolean {
  return typeof value === 'object' && value !== null && !Array.isArray(value) && !(value instanceof Uint8Array)
}

export function isInteger (value: unknown, low: number, high: number): value is number {
  return typeof value === 'number' && Number.isSafeInteger(value) && value >= low && value <= high
}

export function isNumber (value: unknown, low: number, high: number): value is number {
  return typeof value === 'number' && value >= low && value <= high
}

/** Text that may be shown: short enough, and without control characters. */
export function isPlainText (value: unknown, charsMax: number): value is string {
  return typeof value === 'string' && [...value].length <= charsMax && !CONTROL_CHARS.test(value)
}

/** A list of exactly `length` values; raises Misbehaved. */
export function readRow (value: unknown, length: number, what: string): unknown[] {
  if (!Array.isArray(value) || value.length !== length) throw new Misbehaved('bad_message', `expected ${what}`)
  return value
}
