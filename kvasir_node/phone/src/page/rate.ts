// Rows per second out of a counter that grows, and what a small chart shows of the last two minutes. Pure.

const WINDOW_S = 5 // of the figure
const HISTORY_S = 120
const WIDTH = 120
const HEIGHT = 32

export class Rate {
  private readonly samples: Array<readonly [number, number]> = [] // (time s, counter)
  private readonly history: Array<readonly [number, number]> = [] // (time s, rate)

  note (now: number, counter: number): void {
    const last = this.samples.at(-1)
    if (last !== undefined && counter < last[1]) this.samples.length = 0 // it began anew
    this.samples.push([now, counter])
    while (this.samples.length > 2 && this.samples[1]![0] <= now - WINDOW_S) this.samples.shift()
    this.history.push([now, this.perSecond])
    while (this.history[0]![0] < now - HISTORY_S) this.history.shift()
  }

  get perSecond (): number {
    const [first, last] = [this.samples[0], this.samples.at(-1)]
    return first === undefined || last === undefined || last[0] <= first[0] ? 0 : (last[1] - first[1]) / (last[0] - first[0])
  }

  /** Points of a line in a box of 120 × 32, the newest at the right edge. */
  points (now: number): string {
    const most = Math.max(1, ...this.history.map(([, rate]) => rate))
    return this.history.map(([at, rate]) => `${(WIDTH - (now - at)).toFixed(1)},${(HEIGHT - 1 - rate / most * (HEIGHT - 2)).toFixed(1)}`).join(' ')
  }
}
