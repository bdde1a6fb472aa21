// The page: asks the node how it is, again and again, and shows it. Chat and heat map are modules of their own.

import { ApiError, ask, hasKey, keepKey, stream } from "./api.js";
import { startChat } from "./chat.js";
import { showExperts, startMap } from "./heat.js";
import { $, Curve, count, counted, duration, element, row, size, worded } from "./parts.js";

const STATUS_MS = 1000;
const HIDDEN_MS = 10000; // nobody looks
const EXPERTS_MS = 2000;
const RETRY_MS = 2000;
const NEWS_MS = 150; // events that come together are one reason to ask
const EVENTS_MAX = 200;
const WORKER_SIGNS = { proven: "+", trial: "?", new: ".", suspect: "!", banned: "x" };
const WORKER_LEVELS = { proven: "good", suspect: "busy", banned: "bad" };

const curves = { speed: new Curve($("speeds")), pressure: new Curve($("pressures")) };
let status = null;
let heardAt = null;
let news = null; // ends the wait for the next status

function show(found) {
  status = found;
  heardAt = performance.now();
  const { headline, slots, throughput, worker, hub } = found;
  const serves = found.roles.includes("coordinator");
  document.title = `${headline.state} – ${found.name}`;
  $("name").textContent = found.name;
  $("about").textContent = `${found.version} · ${found.roles.join(", ")} · up ${duration(found.uptime_s)}`;
  say(headline);
  $("warnings").hidden = found.warnings.length === 0;
  $("warnings").replaceChildren(...found.warnings.map((warning) => element("li", warning)));
  $("speed").textContent = throughput.tokens_per_s.toFixed(1);
  document.querySelector(".speed").hidden = !serves;
  curves.speed.note(throughput.tokens_per_s);
  curves.pressure.note(slots.pressure);
  showFacts(found, serves);
  $("lend").hidden = worker === null;
  if (worker) $("lend").textContent = lends(worker) ? "Pause lending" : "Resume lending";
  for (const id of ["slots", "workers"]) $(id).hidden = !serves;
  $("chat").hidden = !found.model;
  $("demand").hidden = hub === null;
  if (serves) showSlots(slots);
  if (serves) showWorkers(found.workers, found.fanout.shares);
  if (hub) showDemand(hub.demand);
  $("chat-model").textContent = found.model?.name ?? "";
  $("forget").hidden = !hasKey();
}

// Screen readers are told of a change, not of every second.
function say({ level, state, words, advice }) {
  $("verdict").dataset.level = level;
  const texts = { state: `${level === "good" ? "●" : "!"} ${state}`, words, advice };
  for (const [id, text] of Object.entries(texts)) {
    if ($(id).textContent !== text.replaceAll("`", "")) $(id).replaceChildren(...worded(text));
  }
}

const lends = (worker) => !(worker.state === "paused" || (worker.state === "draining" && worker.reason));

function showFacts({ model, fanout, worker, net, throughput }, serves) {
  const facts = [];
  if (serves) facts.push(["Fan-out", fanout.reason || (fanout.on ? "on" : "off")]);
  if (serves) facts.push(["Model", model ? `${model.name}, ${model.layers} layers of ${model.experts_per_layer} experts, ${model.slices_held}/${model.slices} slices here` : "none"]);
  if (worker) {
    const held = worker.slices.length ? `, ${worker.slices.join(" ")}` : "";
    facts.push(["Lending", `${worker.state}${worker.reason ? `: ${worker.reason}` : ""}${held}, ${counted(worker.rows, "row")}`]);
  }
  const relayed = net.relayed ? `, ${net.relayed} by relay` : "";
  const reach = net.reachability === "unknown" ? "" : `, ${net.reachability}`;
  facts.push(["Network", `${counted(net.peers, "peer")}${relayed}${reach}, in ${size(net.bytes_in)}, out ${size(net.bytes_out)}`]);
  if (serves) facts.push(["So far", `${counted(throughput.tokens_total, "token")} in ${counted(throughput.requests_total, "request")}`]);
  if (serves) facts.push(["Pairs", `${count(fanout.local_pairs)} here, ${count(fanout.remote_pairs)} by workers, ${counted(fanout.fallbacks, "fallback")}, ${counted(fanout.mismatches, "mismatch")}`.replace("mismatchs", "mismatches")]);
  $("facts").replaceChildren(...facts.flatMap(([name, value]) => [element("dt", name), element("dd", value)]));
}

function showSlots(slots) {
  const meters = [["busy", slots.busy, slots.total], ["queued", slots.queued, slots.queue_max]];
  for (const [id, value, most] of meters) {
    $(id).max = Math.max(most, 1);
    $(id).value = value;
  }
  const wait = slots.queued ? `, oldest ${slots.oldest_wait_s.toFixed(1)} s` : "";
  $("busy-told").textContent = `${slots.busy}/${slots.total} busy, ${slots.state}`;
  $("queued-told").textContent = `${slots.queued}/${slots.queue_max}${wait}`;
}

function showRequests(requests) {
  $("requests").hidden = requests.length === 0;
  $("requests").tBodies[0].replaceChildren(...requests.map((each) =>
    row([String(each.request), each.state, [counted(each.answer_tokens, "token"), "n"], [`${each.age_s.toFixed(1)} s`, "n"]])));
}

function showWorkers(workers, shares) {
  const order = Object.keys(WORKER_SIGNS);
  const sorted = [...workers].sort((a, b) => order.indexOf(a.state) - order.indexOf(b.state) || a.name.localeCompare(b.name));
  $("no-workers").textContent = workers.length ? "" : "None yet.";
  document.querySelector("#workers table").hidden = workers.length === 0;
  $("worker-rows").replaceChildren(...sorted.map((worker) => {
    const share = shares[worker.peer_id];
    const made = row([
      [`${WORKER_SIGNS[worker.state] ?? ""} ${worker.state}`, "state"],
      ["", "wide"],
      [share === undefined ? "–" : `${Math.round(100 * share)} %`, "n"],
      [worker.rtt_ms === null ? "–" : worker.rtt_ms.toFixed(1), "n"],
      [count(worker.rows), "n"],
      [count(worker.failures), "n"],
    ], WORKER_LEVELS[worker.state]);
    const more = [worker.path, counted(worker.slices.length, "slice"), worker.reason].filter(Boolean).join(", ");
    made.cells[1].append(worker.name, document.createElement("br"), element("small", more));
    return made;
  }));
}

function showDemand(demand) {
  $("no-demand").textContent = demand.length ? "" : "Nothing is wanted now.";
  document.querySelector("#demand table").hidden = demand.length === 0;
  const lacking = (each) => Math.max(each.want - each.proven - each.leased, 0);
  const sorted = [...demand].sort((a, b) => lacking(b) - lacking(a) || a.slice.localeCompare(b.slice));
  $("demand-rows").replaceChildren(...sorted.map((each) => row([
    each.model, each.slice, [String(each.want), "n"], [String(each.proven), "n"], [String(each.leased), "n"],
    [lacking(each) ? `! ${counted(lacking(each), "copy").replace("copys", "copies")}` : "none", "state"],
  ], lacking(each) ? "busy" : "good")));
}

function showEvent(event) {
  const item = element("li", "", event.level === "warning" ? "warning" : "");
  item.append(element("time", new Date(event.at * 1000).toTimeString().slice(0, 8)), element("span", event.words));
  $("event-rows").prepend(item);
  while ($("event-rows").childElementCount > EVENTS_MAX) $("event-rows").lastElementChild.remove();
}

const pause = (ms) => new Promise((resolve) => { setTimeout(resolve, ms); });

// Until the time is over, or something happened.
const nextLook = () => new Promise((resolve) => {
  news = resolve;
  setTimeout(resolve, document.hidden ? HIDDEN_MS : STATUS_MS);
});

function failed(error) {
  if (error instanceof ApiError && error.status === 401) askForKey(hasKey());
  else {
    const silent = heardAt === null ? "" : ` for ${duration((performance.now() - heardAt) / 1000)}; what is shown is old`;
    say({ level: "bad", state: "NO ANSWER", words: `from the node${silent}`, advice: `is it running? ${error.message}` });
  }
}

let asking = null; // settled when a key was given

function askForKey(refused) {
  if (asking !== null) return asking;
  if (refused) $("key-words").textContent = "That key was refused; it is the one of api.key in the node's settings.";
  keepKey("");
  $("key-dialog").showModal();
  asking = new Promise((resolve) => {
    $("key-dialog").addEventListener("close", () => {
      keepKey($("key").value);
      $("key").value = "";
      asking = null;
      resolve();
    }, { once: true });
  });
  return asking;
}

async function followStatus() {
  for (;;) {
    await asking;
    try {
      show(await ask("kvasir/v1/status"));
      if (status.roles.includes("coordinator")) showRequests((await ask("kvasir/v1/requests")).running);
    } catch (error) {
      failed(error);
      await pause(RETRY_MS);
    }
    await nextLook();
  }
}

async function followExperts() {
  for (;;) {
    await asking;
    try {
      if (status?.model && !document.hidden) showExperts((await ask("kvasir/v1/experts")).layers);
    } catch {
      // followStatus tells the person
    }
    await pause(EXPERTS_MS);
  }
}

async function followEvents() {
  let last = "0"; // from the oldest that is kept
  let told = 0;
  for (;;) {
    await asking;
    try {
      const headers = { "Last-Event-ID": last };
      for await (const { id, data } of stream("kvasir/v1/events", { headers })) {
        last = id || last;
        showEvent(JSON.parse(data));
        clearTimeout(told);
        told = setTimeout(() => news?.(), NEWS_MS);
      }
    } catch {
      // without events the status is asked for all the same
    }
    await pause(RETRY_MS);
  }
}

function start() {
  startMap();
  startChat(() => status.model.name);
  $("lend").addEventListener("click", async () => {
    const verb = lends(status.worker) ? "pause" : "resume";
    try {
      await ask(`kvasir/v1/${verb}`, { method: "POST" });
    } catch (error) {
      failed(error);
    }
    news?.();
  });
  $("forget").addEventListener("click", () => {
    keepKey("");
    location.reload();
  });
  document.addEventListener("visibilitychange", () => news?.());
  followStatus();
  followExperts();
  followEvents();
}

start();
