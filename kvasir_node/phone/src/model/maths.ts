// How a family's experts compute, as the manifest says; kvasir_node/model/maths.py has the meaning of each field.
import { DataError } from '../base/errors.js'

export const GATES = ['glu', 'clamped', 'gptoss', 'none'] as const
export const ACTIVATIONS = ['silu', 'gelu', 'gelu_tanh', 'relu', 'relu2'] as const
const FACTOR_MAX = 1e6
const NAMES = ['activation', 'alpha', 'bias', 'gate', 'interleaved', 'limit', 'scale_columns', 'scale_rows', 'transposed']

export interface ExpertMaths {
  readonly gate: number // index of GATES
  readonly activation: number // index of ACTIVATIONS
  readonly limit: number
  readonly alpha: number
  readonly bias: boolean
  readonly transposed: boolean
  readonly interleaved: boolean
}

/** Raises DataError for anything but maths that this page computes. */
export function readMaths (entries: ReadonlyArray<readonly [string, unknown]>): ExpertMaths {
  const value = Object.fromEntries(entries)
  if (Object.keys(value).sort().join() !== NAMES.join()) throw wrong('its fields are not those of this version')
  const gate = GATES.indexOf(value.gate as never)
  const activation = ACTIVATIONS.indexOf(value.activation as never)
  if (gate < 0 || activation < 0) throw wrong(`gate ${String(value.gate).slice(0, 40)}, activation ${String(value.activation).slice(0, 40)}`)
  if (value.scale_rows !== 0 || value.scale_columns !== 0) throw wrong('their weights have scales (fp8)')
  const needsLimit = GATES[gate] === 'clamped' || GATES[gate] === 'gptoss'
  const flags = [value.bias, value.transposed, value.interleaved]
  if (flags.some(flag => typeof flag !== 'boolean')) throw wrong('a flag is neither true nor false')
  return {
    gate,
    activation,
    limit: needsLimit ? factor(value.limit) : 0,
    alpha: GATES[gate] === 'gptoss' ? factor(value.alpha) : 0,
    bias: value.bias as boolean,
    transposed: value.transposed as boolean,
    interleaved: value.interleaved as boolean
  }
}

export function hasGate (maths: ExpertMaths): boolean {
  return GATES[maths.gate] !== 'none'
}

function factor (value: unknown): number {
  if (typeof value !== 'number' || !(value > 0 && value <= FACTOR_MAX)) throw wrong(`a limit or alpha of ${String(value).slice(0, 40)}`)
  return value
}

function wrong (what: string): DataError {
  return new DataError(`this page cannot compute the model's experts: ${what}`)
}
