// Whether this page may work now, by its owner's wishes and what is sensed; and if not, why, in words. Pure.

export interface Wishes {
  readonly isPaused: boolean
  readonly onBatteryToo: boolean // also while the device is not charging
  readonly bytesPerDayMax: number // both ways together
  readonly memoryBytes: number // of experts that are held; counts when the page is loaded again
  readonly diskBytes: number // of blocks that are kept; as well
}

export interface Senses {
  readonly isHidden: boolean
  readonly isCharging: boolean | undefined // undefined = this browser does not tell
  readonly bytesToday: number
}

/** "" = it may work. */
export function objection (wishes: Wishes, senses: Senses): string {
  if (wishes.isPaused) return 'paused by you'
  if (senses.isHidden) return 'this page is hidden'
  if (senses.bytesToday >= wishes.bytesPerDayMax) return 'the megabytes of this day are used up'
  if (wishes.onBatteryToo || senses.isCharging === true) return ''
  return senses.isCharging === false ? 'not charging' : 'this browser does not tell whether it is charging: say so below'
}
