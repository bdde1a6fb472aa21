// Builds the kernel: node kernel/build.mjs [OUT_FOLDER [CLANG]]. Two files: plain SIMD, and relaxed SIMD (clang 16 and
// later). What lies beside the source was built by clang 16.0.6; tests/phone hold a fresh build to it, bit for bit.
import { spawnSync } from 'node:child_process'
import { mkdirSync } from 'node:fs'
import { dirname, join } from 'node:path'
import { fileURLToPath } from 'node:url'

const here = dirname(fileURLToPath(import.meta.url))
const [out = here, clang = 'clang-16'] = process.argv.slice(2)
mkdirSync(out, { recursive: true })
const FLAGS = [
  '--target=wasm32', '-O3', '-msimd128', '-mbulk-memory', '-ffp-contract=off', '-nostdlib', '-ffreestanding',
  '-Wl,--no-entry', '-Wl,--import-memory', '-Wl,--export=__heap_base', '-Wl,--export=expert_outputs',
  '-Wl,--strip-all', '-Wl,-z,stack-size=65536'
]
const VARIANTS = { 'experts.wasm': [], 'experts-relaxed.wasm': ['-mrelaxed-simd', '-DRELAXED'] }
for (const [name, flags] of Object.entries(VARIANTS)) {
  const done = spawnSync(clang, [...FLAGS, ...flags, '-o', join(out, name), join(here, 'experts.c')], { stdio: 'inherit' })
  if (done.status !== 0) process.exit(done.status ?? 1)
}
