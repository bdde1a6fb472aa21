// What happens, in words, for whoever listens: the page's console, or a test's output.

export type Log = (text: string) => void
