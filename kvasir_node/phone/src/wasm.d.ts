// build.mjs puts the code of an imported kernel into the bundle.
declare module '*.wasm' {
  const code: Uint8Array<ArrayBuffer>
  export default code
}
