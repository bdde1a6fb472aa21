// The kernel that this browser can run: relaxed SIMD where it is known, else SIMD.

/** Rejects where there is no SIMD either. */
export async function openKernelModule (): Promise<WebAssembly.Module> {
  for (const name of ['experts-relaxed.wasm', 'experts.wasm']) {
    const code = await (await fetch(new URL(name, import.meta.url))).arrayBuffer()
    if (WebAssembly.validate(code)) return await WebAssembly.compile(code)
  }
  throw new Error('this browser has no WebAssembly SIMD, which this page computes with; update it')
}
