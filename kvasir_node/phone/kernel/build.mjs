// Builds the kernels: node kernel/build.mjs [OUT_FOLDER [CLANG]]. That of the experts twice: plain SIMD, and relaxed SIMD
// (clang 16 and later). What lies beside the sources was built by clang 16.0.6; tests/phone hold a fresh build to it, bit
// for bit.
import { spawnSync } from 'node:child_process'
import { mkdirSync } from 'node:fs'
import { dirname, join } from 'node:path'
import { fileURLToPath } from 'node:url'

const here = dirname(fileURLToPath(import.meta.url))
const [out = here, clang = 'clang-16'] = process.argv.slice(2)
mkdirSync(out, { recursive: true })
const FLAGS = [
  '--target=wasm32', '-O3', '-msimd128', '-mbulk-memory', '-ffp-contract=off', '-nostdlib', '-ffreestanding',
  '-Wl,--no-entry', '-Wl,--strip-all', '-Wl,-z,stack-size=65536'
]
const EXPERTS = ['experts.c', '-Wl,--import-memory', '-Wl,--export=__heap_base', '-Wl,--export=expert_outputs']
const CIPHER_NAMES = ['key', 'nonce', 'text_room', 'seal', 'unseal']
const KERNELS = {
  'experts.wasm': EXPERTS,
  'experts-relaxed.wasm': [...EXPERTS, '-mrelaxed-simd', '-DRELAXED'],
  'cipher.wasm': ['cipher.c', ...CIPHER_NAMES.map(name => `-Wl,--export=${name}`)]
}
for (const [name, [source, ...flags]] of Object.entries(KERNELS)) {
  const done = spawnSync(clang, [...FLAGS, ...flags, '-o', join(out, name), join(here, source)], { stdio: 'inherit' })
  if (done.status !== 0) process.exit(done.status ?? 1)
}
