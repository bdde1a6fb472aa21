// What the page and its node Worker say to each other.
import type { Wishes } from '../decide/manners.js'
import type { GuestSnapshot } from '../roles/guest.js'

export type ToNode =
  | { readonly kind: 'start', readonly link: string, readonly name: string, readonly cores: number }
  | { readonly kind: 'senses', readonly isHidden: boolean, readonly isCharging: boolean | null } // null = not told
  | { readonly kind: 'wishes', readonly wishes: Wishes }
  | { readonly kind: 'leave' }
  | { readonly kind: 'forget' } // the key, the pass and every block

/** Where the page stands with its swarm. */
export type Phase = 'starting' | 'needs code' | 'joining' | 'joined' | 'left' | 'elsewhere' | 'failed'

export interface State {
  readonly phase: Phase
  readonly words: string // why, where the phase alone does not say it
  readonly objection: string // why it does not work now; "" = it may
  readonly bytesToday: number
  readonly wishes: Wishes
  readonly guest: GuestSnapshot | null
}

export type FromNode =
  | { readonly kind: 'state', readonly state: State }
  | { readonly kind: 'linked' } // the code was used: the address bar may forget it
