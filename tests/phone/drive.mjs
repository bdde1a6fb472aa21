// A headless Chromium for the tests: a line of JSON [what, ...arguments] on stdin, a line of JSON on stdout.
//     node drive.mjs PHONE_FOLDER PROFILE_FOLDER [HOST_RESOLVER_RULES]
import { createRequire } from 'node:module'
import { createInterface } from 'node:readline'

const [phone, profile, rules] = process.argv.slice(2)
const { chromium } = createRequire(`${phone}/package.json`)('playwright-core')
const FLAGS = [
  '--no-sandbox', '--disable-gpu', '--disable-quic', '--no-first-run', '--disable-background-networking',
  '--disable-component-update', '--disable-sync', ...rules === undefined ? [] : [`--host-resolver-rules=${rules}`]
]
const context = await chromium.launchPersistentContext(profile, {
  executablePath: '/usr/bin/chromium', headless: true, viewport: { width: 390, height: 844 }, args: FLAGS
})
const problems = [] // what the page's console calls an error
let page

// Playwright has Chromium copy every WebSocket message of a Worker, in base64, into its pipe, which no option ends. No
// phone does that, and on two cores a call of 16 kB each way took half as long again. So its own sessions are told.
async function unwatch () {
  const sessions = context._connection.toImpl(page).delegate._networkManager._sessions
  for (const [session, { isMain }] of sessions) if (isMain !== true) await session.send('Network.disable')
}

const acts = {
  open: async url => {
    await page?.close()
    page = await context.newPage()
    page.on('console', message => { if (message.type() === 'error') problems.push(message.text()) })
    page.on('pageerror', error => { problems.push(String(error)) })
    await page.addInitScript(() => {
      window.blockedMs = 0 // the main thread's longest task
      new PerformanceObserver(list => {
        for (const entry of list.getEntries()) window.blockedMs = Math.max(window.blockedMs, entry.duration)
      }).observe({ type: 'longtask' })
    })
    page.on('worker', unwatch)
    await page.goto(url)
  },
  look: async () => await page.evaluate(() => {
    const text = id => document.getElementById(id).textContent
    const shown = ['joined', 'state', 'words', 'rows', 'received', 'sent', 'fetched', 'reused', 'stored', 'today', 'model', 'identity']
    return {
      ...Object.fromEntries(shown.map(id => [id, text(id)])),
      stages: [...document.querySelectorAll('#slices li')].map(item => item.dataset.stage),
      url: location.href,
      blockedMs: window.blockedMs,
      isSecure: window.isSecureContext
    }
  }),
  click: async id => { await page.click(`#${id}`) },
  check: async id => { await page.check(`#${id}`) },
  fill: async (id, value) => { await page.fill(`#${id}`, value); await page.dispatchEvent(`#${id}`, 'change') },
  reload: async () => { await page.reload() },
  // Chromium without a screen never hides a page: the page is told so as a browser would tell it.
  hide: async isHidden => await page.evaluate(isHidden => {
    Object.defineProperty(document, 'hidden', { configurable: true, get: () => isHidden })
    document.dispatchEvent(new Event('visibilitychange'))
  }, isHidden),
  shoot: async path => { await page.screenshot({ path, fullPage: true }) },
  evaluate: async script => await page.evaluate(script),
  problems: async () => problems,
  version: async () => context.browser()?.version() ?? 'unknown',
  close: async () => { await context.close() }
}

for await (const line of createInterface({ input: process.stdin })) {
  const [what, ...given] = JSON.parse(line)
  try {
    console.log(JSON.stringify({ result: await acts[what](...given) ?? null }))
  } catch (error) {
    console.log(JSON.stringify({ error: String(error) }))
  }
  if (what === 'close') break
}
process.exit(0)
