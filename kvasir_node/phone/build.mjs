// Bundles the page: node build.mjs OUT_FOLDER; with --terminal also the guest for Node.js, for tests.
import { copyFileSync, mkdirSync } from 'node:fs'
import { basename, dirname, join } from 'node:path'
import { fileURLToPath } from 'node:url'
import { build } from 'esbuild'

const here = dirname(fileURLToPath(import.meta.url))
const [out = join(here, 'dist'), ...flags] = process.argv.slice(2)
mkdirSync(out, { recursive: true })

await build({
  entryPoints: ['page', 'node', 'compute'].map(name => join(here, `src/entries/${name}.ts`)),
  bundle: true,
  minify: true,
  format: 'esm',
  platform: 'browser',
  target: ['chrome108', 'firefox115', 'safari16.4'],
  outdir: out,
  loader: { '.wasm': 'binary' },
  legalComments: 'none',
  logLevel: 'warning'
})
const STATIC = ['index.html', 'page.css', 'icon.svg'].map(name => join('static', name))
for (const name of [...STATIC, 'kernel/experts.wasm', 'kernel/experts-relaxed.wasm']) {
  copyFileSync(join(here, name), join(out, basename(name)))
}

if (flags.includes('--terminal')) {
  await build({
    entryPoints: [join(here, 'src/entries/terminal.ts')],
    bundle: true,
    format: 'esm',
    platform: 'node',
    target: 'node20',
    outfile: join(out, 'terminal.mjs'),
    loader: { '.wasm': 'binary' },
    banner: { js: "import { createRequire } from 'node:module'; const require = createRequire(import.meta.url);" },
    logLevel: 'warning'
  })
}
