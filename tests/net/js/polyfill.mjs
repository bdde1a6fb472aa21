// js-libp2p wants Promise.withResolvers, which Node.js has from version 22 on.
Promise.withResolvers ??= function () {
  let resolve, reject
  const promise = new Promise((a, b) => { resolve = a; reject = b })
  return { promise, resolve, reject }
}
