// js-libp2p wants Promise.withResolvers, which Node.js has from version 22 on and browsers since 2024.
Promise.withResolvers ??= function withResolvers<T> () {
  let resolve!: (value: T | PromiseLike<T>) => void
  let reject!: (reason?: unknown) => void
  const promise = new Promise<T>((a, b) => { resolve = a; reject = b })
  return { promise, resolve, reject }
}
