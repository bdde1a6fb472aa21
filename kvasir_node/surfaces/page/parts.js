// Small pieces that several panes are made of: elements, numbers for people, curves. It does not know the API.

export const $ = (id) => document.getElementById(id);

// An element with text; text is never markup, wherever it came from.
export function element(name, text = "", classes = "") {
  const made = document.createElement(name);
  made.textContent = text;
  if (classes) made.className = classes;
  return made;
}

// Text with `code` between backticks.
export function worded(text) {
  return text.split("`").map((part, index) => (index % 2 ? element("code", part) : part));
}

// A table's row; a cell is text, or [text, classes].
export function row(cells, level = "") {
  const made = document.createElement("tr");
  if (level) made.dataset.level = level;
  for (const cell of cells) made.append(Array.isArray(cell) ? element("td", ...cell) : element("td", cell));
  return made;
}

export const count = (number) => number.toLocaleString("en");

export const counted = (number, noun) => `${count(number)} ${noun}${number === 1 ? "" : "s"}`;

export function size(bytes) {
  for (const unit of ["B", "KiB", "MiB", "GiB"]) {
    if (bytes < 1024) return `${bytes.toFixed(unit === "B" ? 0 : 1)} ${unit}`;
    bytes /= 1024;
  }
  return `${bytes.toFixed(1)} TiB`;
}

export function duration(seconds) {
  const whole = Math.floor(seconds);
  const two = (number) => String(number).padStart(2, "0");
  if (whole < 60) return `${whole}s`;
  if (whole < 3600) return `${Math.floor(whole / 60)}m${two(whole % 60)}s`;
  if (whole < 86400) return `${Math.floor(whole / 3600)}h${two(Math.floor(whole / 60) % 60)}m`;
  return `${Math.floor(whole / 86400)}d${two(Math.floor(whole / 3600) % 24)}h`;
}

const SAMPLES_MAX = 120;
const SVG = "http://www.w3.org/2000/svg";
const HEIGHT = 32;

// The last two minutes of one number, a value a second.
export class Curve {
  #values = [];
  #at = -Infinity;

  constructor(svg) {
    this.area = document.createElementNS(SVG, "polygon");
    this.line = document.createElementNS(SVG, "polyline");
    this.area.setAttribute("class", "area");
    this.line.setAttribute("class", "line");
    svg.replaceChildren(this.area, this.line);
  }

  note(value) {
    if (performance.now() < this.#at + 950) return;
    this.#at = performance.now();
    this.#values = [...this.#values, value].slice(-SAMPLES_MAX);
    const most = Math.max(...this.#values, 1e-9);
    const left = SAMPLES_MAX - this.#values.length;
    const points = this.#values.map((each, index) => `${left + index},${(HEIGHT - 1 - (each / most) * (HEIGHT - 2)).toFixed(1)}`);
    this.line.setAttribute("points", points.join(" "));
    this.area.setAttribute("points", `${left},${HEIGHT} ${points.join(" ")} ${SAMPLES_MAX - 1},${HEIGHT}`);
  }
}
