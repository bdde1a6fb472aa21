// Bundles the page: node build.mjs OUT_FOLDER; with --terminal also the guest for Node.js, for tests.
import { copyFileSync, mkdirSync } from 'node:fs'
import { dirname, join } from 'node:path'
import { fileURLToPath } from 'node:url'
import { build } from 'esbuild'

const here = dirname(fileURLToPath(import.meta.url))
const [out = join(here, 'dist'), ...flags] = process.argv.slice(2)
mkdirSync(out, { recursive: true })

if (flags.includes('--terminal')) {
  await build({
    entryPoints: [join(here, 'src/entries/terminal.ts')],
    bundle: true,
    format: 'esm',
    platform: 'node',
    target: 'node20',
    outfile: join(out, 'terminal.mjs'),
    banner: { js: "import { createRequire } from 'node:module'; const require = createRequire(import.meta.url);" },
    logLevel: 'warning'
  })
}
