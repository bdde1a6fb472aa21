// The node's API as this page uses it: one key for everything, JSON, and streams of server-sent events.
// It does not know what is shown. The key is kept in sessionStorage and sent in a header, never in an address.

const KEY = "kvasir-key";
const SILENT_MS = 30000; // of a stream: three heartbeats

export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export function keepKey(key) {
  if (key) sessionStorage.setItem(KEY, key);
  else sessionStorage.removeItem(KEY);
}

export function hasKey() {
  return sessionStorage.getItem(KEY) !== null;
}

function headers(more) {
  const key = sessionStorage.getItem(KEY);
  return key ? { ...more, Authorization: `Bearer ${key}` } : more;
}

// A document; an error answer is thrown as ApiError, no answer as TypeError.
export async function ask(path, options = {}) {
  const response = await fetch(path, { ...options, headers: headers(options.headers), cache: "no-store" });
  if (!response.ok) throw await errorOf(response);
  return response.json();
}

async function errorOf(response) {
  let message = `HTTP ${response.status}`;
  try {
    message = (await response.json()).error.message;
  } catch {
    // whoever answered is no node; the status says all there is
  }
  return new ApiError(response.status, message);
}

// Events {id, data} of a stream as they come. Ends when the stream does, throws when it falls silent.
export async function* stream(path, options = {}) {
  const silence = new AbortController();
  const signals = [silence.signal, ...(options.signal ? [options.signal] : [])];
  let timer = setTimeout(() => silence.abort(), SILENT_MS);
  try {
    const signal = AbortSignal.any(signals);
    const response = await fetch(path, { ...options, signal, headers: headers(options.headers), cache: "no-store" });
    if (!response.ok) throw await errorOf(response);
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    const lines = new EventLines();
    for (let part = await reader.read(); !part.done; part = await reader.read()) {
      clearTimeout(timer);
      timer = setTimeout(() => silence.abort(), SILENT_MS);
      yield* lines.take(part.value);
    }
  } finally {
    clearTimeout(timer);
    silence.abort(); // whoever stops reading closes the stream
  }
}

class EventLines {
  #waiting = "";
  #id = "";
  #data = [];

  *take(text) {
    const lines = (this.#waiting + text).split("\n");
    this.#waiting = lines.pop();
    for (const line of lines) {
      if (line === "" && this.#data.length) {
        yield { id: this.#id, data: this.#data.join("\n") };
        this.#data = [];
      } else if (line.startsWith("data:")) this.#data.push(line.slice(5).trimStart());
      else if (line.startsWith("id:")) this.#id = line.slice(3).trim();
    }
  }
}
