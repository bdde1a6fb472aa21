// What the screen says about a state. Pure: it knows no document.
import type { State } from './messages.js'

export type Level = 'unknown' | 'good' | 'busy' | 'bad'

export interface Verdict { readonly chip: string, readonly title: string, readonly words: string, readonly level: Level }

const PHASES: Readonly<Record<State['phase'], readonly [string, string, Level]>> = {
  starting: ['Starting', 'Starting …', 'unknown'],
  'needs code': ['Not joined', 'A code is needed', 'bad'],
  joining: ['Joining', 'Looking for the node …', 'busy'],
  joined: ['Joined', 'Joined', 'good'],
  left: ['Left', 'Not helping', 'unknown'],
  elsewhere: ['Elsewhere', 'Helping in another tab', 'unknown'],
  failed: ['Failed', 'Something went wrong', 'bad']
}

/** For a person who looks for a second. */
export function verdictOf (state: State): Verdict {
  const [chip, title, level] = PHASES[state.phase]
  const { guest } = state
  if (state.phase !== 'joined' || guest === null) return { chip, title, level, words: state.words === '' ? guest?.problem ?? '' : state.words }
  const stages = guest.stages.map(each => each.stage)
  const count = (stage: string): number => stages.filter(each => each === stage).length
  if (state.objection !== '') return { chip, title: stages.length > 0 ? 'Handing work back' : 'Resting', level: 'busy', words: `Because: ${state.objection}.` }
  const serving = count('serving')
  if (serving > 0) return { chip, title: 'Computing', level: 'good', words: `${serving} ${serving === 1 ? 'slice' : 'slices'} of ${guest.stages[0]!.model}` }
  if (count('fetching') + count('loading') > 0) return { chip, title: 'Fetching experts', level: 'busy', words: '' }
  if (count('trial') > 0) return { chip, title: 'On trial', level: 'busy', words: 'Its first answers are compared with right ones; nothing depends on them.' }
  return { chip, title: 'Ready', level: 'good', words: guest.problem === '' ? 'Nothing is wanted right now. That is as it should be: a calm node works alone.' : guest.problem }
}

export function megabytes (bytes: number): string {
  const size = bytes / 1e6
  return `${size < 10 ? size.toFixed(1) : Math.round(size).toLocaleString('en')} MB`
}

/** Something like "Android, Chrome": what the node's owner sees of this device. */
export function deviceName (userAgent: string): string {
  const find = (names: readonly string[]): string | undefined => names.find(name => userAgent.includes(name))
  const system = find(['Android', 'iPhone', 'iPad', 'Windows', 'Mac OS', 'Linux']) ?? 'a device'
  const browser = find(['Firefox', 'Edg', 'Chrome', 'Safari']) ?? 'a browser'
  return `${system}, ${browser === 'Edg' ? 'Edge' : browser}`
}
