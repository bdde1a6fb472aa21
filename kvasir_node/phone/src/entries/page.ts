// The screen: shows what the node Worker tells, and tells it what the owner wishes and what can be sensed here.
// It computes nothing and talks to no network, so it never waits.
import { Awake, watchCharging } from '../page/power.js'
import type { FromNode, State, ToNode } from '../page/messages.js'
import { Rate } from '../page/rate.js'
import { deviceName, megabytes, verdictOf } from '../page/words.js'
import type { Wishes } from '../decide/manners.js'

const BYTES_PER_MEGABYTE = 1e6
const MEGABYTES = { cap: 'bytesPerDayMax', memory: 'memoryBytes' } as const // fields that are shown in megabytes

function element<T extends Element = HTMLElement> (id: string): T {
  return document.getElementById(id) as unknown as T
}

const node = new Worker(new URL('node.js', import.meta.url), { type: 'module' })
const tell = (message: ToNode): void => { node.postMessage(message) }
const rate = new Rate()
const awake = new Awake()
let isCharging: boolean | null = null
let wishes: Wishes | undefined

function sense (): void {
  tell({ kind: 'senses', isHidden: document.hidden, isCharging })
  void awake.look()
  element('power').textContent = isCharging === null ? 'This browser does not tell whether it is charging.' : isCharging ? 'Charging.' : 'Not charging.'
  element('battery-words').textContent = isCharging === null ? 'It is charging, or may work on battery' : 'Also while it is not charging'
}

function wish (change: Partial<Wishes>): void {
  if (wishes === undefined) return
  wishes = { ...wishes, ...change }
  tell({ kind: 'wishes', wishes })
  showWishes(wishes)
}

function setText (id: string, text: string): void {
  const target = element(id)
  if (target.textContent !== text) target.textContent = text // a screen reader hears only what is new
}

function show (state: State): void {
  const verdict = verdictOf(state)
  for (const id of ['joined', 'verdict']) element(id).dataset.level = verdict.level
  setText('joined', verdict.chip)
  setText('state', verdict.title)
  setText('words', verdict.words)
  const { guest } = state
  const isOver = ['left', 'elsewhere', 'failed', 'needs code'].includes(state.phase)
  for (const id of ['pause', 'leave']) element(id).hidden = isOver
  for (const id of ['again', 'forget']) element(id).hidden = !isOver
  if (wishes === undefined) showWishes(state.wishes)
  wishes = state.wishes
  setText('today', megabytes(state.bytesToday))
  element<HTMLMeterElement>('today-meter').value = Math.min(1, state.bytesToday / state.wishes.bytesPerDayMax)
  if (guest === null) return
  setText('rows', guest.rows.toLocaleString('en'))
  setText('model', guest.stages.find(each => each.model !== '')?.model ?? '–')
  setText('received', megabytes(guest.traffic.received))
  setText('sent', megabytes(guest.traffic.sent))
  setText('fetched', megabytes(guest.fetchedBytes))
  setText('reused', megabytes(guest.reusedBytes))
  setText('stored', megabytes(guest.storedBytes))
  setText('identity', `This device is peer …${guest.peerId.slice(-8)}; its node's owner can shut it out by that name.`)
  showSlices(guest.stages)
  rate.note(performance.now() / 1000, guest.rows)
}

function showSlices (stages: ReadonlyArray<{ slice: string, stage: string }>): void {
  const list = element('slices')
  const wanted = stages.map(({ slice, stage }) => `${slice} ${stage}`).join()
  if (list.dataset.shown === wanted) return
  list.dataset.shown = wanted
  list.replaceChildren(...stages.map(({ slice, stage }) => {
    const [layer, experts] = slice.split(':') as [string, string]
    const item = document.createElement('li')
    item.dataset.stage = stage
    item.textContent = `layer ${layer}, experts ${experts}: ${stage}`
    return item
  }))
}

function showWishes (shown: Wishes): void {
  element<HTMLInputElement>('battery').checked = shown.onBatteryToo
  for (const [id, name] of Object.entries(MEGABYTES)) element<HTMLInputElement>(id).value = String(Math.round(shown[name] / BYTES_PER_MEGABYTE))
  element('pause').textContent = shown.isPaused ? 'Go on' : 'Pause'
}

function showRate (): void {
  const now = performance.now() / 1000
  setText('speed', String(Math.round(rate.perSecond)))
  const points = rate.points(now)
  const [area, line] = element<SVGSVGElement>('speeds').children as unknown as [Element, Element]
  line.setAttribute('points', points)
  if (points !== '') area.setAttribute('points', `${points.split(',')[0]},32 ${points} 120,32`)
}

node.onmessage = ({ data }: MessageEvent<FromNode>) => {
  if (data.kind === 'state') show(data.state)
  else if (location.hash !== '') history.replaceState(null, '', location.pathname + location.search) // the code has served
}
node.onerror = event => { setText('state', 'This browser cannot run the page'); setText('words', event.message ?? '') }

element('pause').onclick = () => { wish({ isPaused: !(wishes?.isPaused ?? false) }) }
element('leave').onclick = () => { tell({ kind: 'leave' }) }
element('again').onclick = () => { location.reload() }
element('forget').onclick = () => { tell({ kind: 'forget' }) }
element('battery').onchange = () => { wish({ onBatteryToo: element<HTMLInputElement>('battery').checked }) }
for (const [id, name] of Object.entries(MEGABYTES)) {
  element(id).onchange = () => {
    const field = element<HTMLInputElement>(id)
    if (field.checkValidity() && field.value !== '') wish({ [name]: Number(field.value) * BYTES_PER_MEGABYTE })
    else if (wishes !== undefined) showWishes(wishes)
  }
}
element('awake-row').hidden = !Awake.isOffered
element('awake').onchange = () => { void awake.want(element<HTMLInputElement>('awake').checked) }
document.addEventListener('visibilitychange', sense)
window.addEventListener('hashchange', () => { location.reload() }) // another code was scanned
setInterval(showRate, 1000)

tell({ kind: 'start', link: location.hash.slice(1), name: deviceName(navigator.userAgent), cores: navigator.hardwareConcurrency })
sense()
void watchCharging(told => {
  isCharging = told
  sense()
})
