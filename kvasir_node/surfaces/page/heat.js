// The heat map of experts: shade is use, the mark is where rows are computed. It does not know the API.
// `layers` are as in kvasir.experts/1: use 0..100, where h | m | w | . for each expert.

import { $, count, element } from "./parts.js";

const PLACES = { h: "here", m: "here from the file", w: "by a worker", ".": "missing" };
const GAP = 1;
const CELL_MAX = 22;
const ROW_MAX = 18;
const CELL_MIN = 8; // has room for a mark; what does not fit is scrolled
const HOTTEST = 5;

let layers = [];

export function showExperts(found) {
  layers = found;
  $("experts").hidden = layers.length === 0;
  if (!layers.length) return;
  const counts = Object.fromEntries(Object.keys(PLACES).map((place) => [place, 0]));
  for (const layer of layers) for (const place of layer.where) counts[place] += 1;
  const told = Object.keys(PLACES).filter((place) => counts[place]).map((place) => `${count(counts[place])} ${PLACES[place]}`);
  $("places").textContent = `${layers.length} layers of ${layers[0].use.length} experts: ${told.join(", ")}.`;
  $("hottest").textContent = hottest();
  draw();
}

function hottest() {
  const all = layers.flatMap((layer) => layer.use.map((use, index) => ({ layer: layer.layer, index, use })));
  const most = all.filter((each) => each.use > 0).sort((a, b) => b.use - a.use).slice(0, HOTTEST);
  if (!most.length) return "None was used lately.";
  return `Hottest (layer/expert): ${most.map((each) => `${each.layer}/${each.index}`).join(", ")}.`;
}

function geometry() {
  const room = $("map").parentElement.clientWidth;
  const across = Math.min(Math.max(room / layers[0].use.length, CELL_MIN), CELL_MAX);
  return { across, down: Math.min(across, ROW_MAX) };
}

function draw() {
  const canvas = $("map");
  if (!layers.length || !canvas.parentElement.clientWidth) return;
  const { across, down } = geometry();
  const [width, height] = [layers[0].use.length * across, layers.length * down];
  const scale = window.devicePixelRatio || 1;
  canvas.width = Math.round(width * scale);
  canvas.height = Math.round(height * scale);
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  const brush = canvas.getContext("2d");
  brush.scale(scale, scale);
  const colours = palette();
  layers.forEach((layer, at) => {
    layer.use.forEach((use, index) => cell(brush, colours, index * across, at * down, across - GAP, down - GAP, use, layer.where[index]));
  });
}

function palette() {
  const style = getComputedStyle(document.documentElement);
  const colour = (name) => style.getPropertyValue(name).trim();
  return { heat: colour("--heat"), text: colour("--text"), bad: colour("--bad"), ground: colour("--pane") };
}

// Here: plain. From the file: a line below. By a worker: a spot in the middle. Missing: a cross.
function cell(brush, colours, x, y, width, height, use, where) {
  brush.fillStyle = `rgba(${colours.heat}, ${use <= 0 ? 0.08 : 0.2 + (0.8 * use) / 100})`;
  brush.fillRect(x, y, width, height);
  if (where === "h") return;
  const reach = Math.min(width, height) / 2 - 1.5;
  const [midX, midY] = [x + width / 2, y + height / 2];
  brush.lineWidth = reach > 4 ? 2 : 1.5;
  brush.strokeStyle = where === "." ? colours.bad : colours.text;
  brush.fillStyle = colours.text;
  brush.beginPath();
  if (where === "w") {
    brush.arc(midX, midY, Math.max(reach / 2, 1.5), 0, 2 * Math.PI);
    brush.fill();
    brush.lineWidth = 1;
    brush.strokeStyle = colours.ground;
    brush.stroke();
  } else if (where === "m") {
    brush.fillRect(x + 1, y + height - 3, width - 2, 2);
  } else {
    brush.moveTo(midX - reach, midY - reach);
    brush.lineTo(midX + reach, midY + reach);
    brush.moveTo(midX + reach, midY - reach);
    brush.lineTo(midX - reach, midY + reach);
    brush.stroke();
  }
}

function legend() {
  const parts = [[0, "h", "unused"], [30, "h", "used"], [100, "h", "hot"], [50, "m", PLACES.m], [50, "w", PLACES.w], [0, ".", PLACES["."]]];
  const scale = window.devicePixelRatio || 1;
  const colours = palette();
  $("legend").replaceChildren(...parts.map(([use, where, words]) => {
    const sample = document.createElement("canvas");
    sample.width = sample.height = 16 * scale;
    const brush = sample.getContext("2d");
    brush.scale(scale, scale);
    cell(brush, colours, 0, 0, 16, 16, use, where);
    const told = element("span");
    told.append(sample, words);
    return told;
  }));
}

function point(event) {
  if (!layers.length) return;
  const { across, down } = geometry();
  const layer = layers[Math.floor(event.offsetY / down)];
  const index = Math.floor(event.offsetX / across);
  if (!layer || index >= layer.use.length) return;
  const copies = layer.copies[index];
  const held = copies ? `, ${copies} proven ${copies === 1 ? "worker has" : "workers have"} it` : "";
  $("pointed").textContent = `layer ${layer.layer}, expert ${index}: use ${layer.use[index]} of 100, ${PLACES[layer.where[index]]}${held}`;
}

export function startMap() {
  $("map").addEventListener("pointermove", point);
  $("map").addEventListener("pointerleave", () => { $("pointed").textContent = ""; });
  new ResizeObserver(draw).observe($("map").parentElement);
  const redraw = () => { legend(); draw(); };
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  legend();
}
