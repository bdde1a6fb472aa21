// What this browser tells of power and of being seen, and the screen's wake lock.

interface Battery extends EventTarget { readonly charging: boolean }

/** Calls `changed` whenever it is another; null = this browser does not tell. */
export async function watchCharging (changed: (isCharging: boolean | null) => void): Promise<void> {
  const getBattery = (navigator as Navigator & { getBattery?: () => Promise<Battery> }).getBattery
  if (getBattery === undefined) {
    changed(null)
    return
  }
  const battery = await getBattery.call(navigator)
  battery.addEventListener('chargingchange', () => { changed(battery.charging) })
  changed(battery.charging)
}

/** Keeps the screen on while it is asked to and the page is seen: a browser takes the lock back when it hides. */
export class Awake {
  private lock: WakeLockSentinel | undefined
  private isWanted = false

  /** Only secure origins have it. */
  static get isOffered (): boolean {
    return 'wakeLock' in navigator
  }

  async want (isWanted: boolean): Promise<void> {
    this.isWanted = isWanted
    if (!isWanted) await this.lock?.release()
    await this.look()
  }

  async look (): Promise<void> {
    if (!this.isWanted || document.hidden || this.lock?.released === false) return
    try {
      this.lock = await navigator.wakeLock.request('screen')
    } catch { // low battery, or the system's wish: it is asked again when the page is seen again
      this.lock = undefined
    }
  }
}
