// How many bytes went both ways today, over all visits. A day is the device's own.
import type { Database } from '../store/database.js'

const KEY = 'day'

interface Day { readonly day: string, readonly bytes: number }

export class DailyTraffic {
  private counted = 0 // of the network's total, so far

  private constructor (private readonly database: Database, private today: Day) {}

  static async open (database: Database): Promise<DailyTraffic> {
    return new DailyTraffic(database, await database.get<Day>(KEY) ?? { day: dayNow(), bytes: 0 })
  }

  get bytes (): number {
    return this.today.day === dayNow() ? this.today.bytes : 0
  }

  /** `total` = what the network has carried since the page was loaded. */
  async note (total: number): Promise<void> {
    if (total === this.counted) return
    this.today = { day: dayNow(), bytes: this.bytes + total - this.counted }
    this.counted = total
    await this.database.set(KEY, this.today)
  }
}

function dayNow (): string {
  const now = new Date()
  return `${now.getFullYear()}-${now.getMonth() + 1}-${now.getDate()}`
}
