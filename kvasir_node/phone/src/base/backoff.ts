// Pauses that double. Pure but for the chance that is passed in.

export class Backoff {
  private pauseS: number

  constructor (private readonly firstS: number, private readonly mostS: number, private readonly chance: () => number) {
    this.pauseS = firstS
  }

  /** The next pause, cut by chance: pages that lost one hub do not come back all at once. */
  next (): number {
    const pauseS = this.pauseS
    this.pauseS = Math.min(this.mostS, 2 * pauseS)
    return pauseS * (0.5 + 0.5 * this.chance())
  }

  reset (): void {
    this.pauseS = this.firstS
  }
}
