// The chat: one conversation with the served model, streamed. It does not know the status.

import { ApiError, stream } from "./api.js";
import { $, count, element } from "./parts.js";

const messages = [];
let running = null; // AbortController of the answer under way

function turn(role, text) {
  const item = element("li", "", role);
  const said = element("p", text, "text");
  const told = element("p", "", "told");
  item.append(element("p", role === "user" ? "You" : "Model", "who"), said, told);
  $("turns").append(item);
  item.scrollIntoView({ block: "nearest" });
  return { said, told };
}

function busy(is) {
  $("send").disabled = is;
  $("stop").disabled = !is;
  $("turns").setAttribute("aria-busy", String(is));
}

async function send(model) {
  const prompt = $("prompt").value;
  const most = $("max-tokens").valueAsNumber;
  messages.push({ role: "user", content: prompt });
  $("prompt").value = "";
  turn("user", prompt);
  const { said, told } = turn("assistant", "");
  const began = performance.now();
  running = new AbortController();
  busy(true);
  let answer = "";
  try {
    const body = { model, messages, max_tokens: most, stream: true, stream_options: { include_usage: true } };
    const options = { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body), signal: running.signal };
    for await (const { data } of stream("v1/chat/completions", options)) {
      if (data === "[DONE]") break;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new ApiError(500, chunk.error.message);
      answer += chunk.choices[0]?.delta?.content ?? "";
      said.textContent = answer;
      if (chunk.usage) told.textContent = facts(chunk, (performance.now() - began) / 1000);
      $("turns").scrollTop = $("turns").scrollHeight;
    }
  } catch (error) {
    told.textContent = running.signal.aborted ? "Stopped." : `No answer: ${error.message}`;
    told.classList.toggle("failed", !running.signal.aborted);
  }
  if (answer) messages.push({ role: "assistant", content: answer });
  else messages.pop();
  running = null;
  busy(false);
  $("prompt").focus();
}

function facts(chunk, seconds) {
  const { local_pairs: here, remote_pairs: remote } = chunk.kvasir ?? {};
  const tokens = chunk.usage.completion_tokens;
  const workers = remote ? `, ${Math.round((100 * remote) / (here + remote))} % of pairs by workers` : "";
  return `${count(tokens)} tokens in ${seconds.toFixed(1)} s${workers}`;
}

// `model` tells the name to ask by.
export function startChat(model) {
  $("ask").addEventListener("submit", (event) => {
    event.preventDefault();
    if (running === null && $("prompt").value.trim()) send(model());
  });
  $("prompt").addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    $("ask").requestSubmit();
  });
  $("stop").addEventListener("click", () => running?.abort());
  $("clear").addEventListener("click", () => {
    running?.abort();
    messages.length = 0;
    $("turns").replaceChildren();
    $("prompt").focus();
  });
}
