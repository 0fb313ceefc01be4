// The machine at work: the server's events of its experts as a map, figures and charts. The stream
// is open only while it can be seen.

import { ask, events, ServerError } from "./api.js";
import { Chart } from "./charts.js";
import { $, bytes, count, h, short } from "./dom.js";
import { Heatmap, NAMES, PLACES } from "./heatmap.js";
import { query } from "./models.js";

/** Rates are means over this time, ms; charts have a sample each half of a second. */
const WINDOW = 2000;
const STEP = 500;

const map = new Heatmap($("heatmap"), showCell);
const charts = {
  tokens: new Chart("Tokens/s", 1),
  hits: new Chart("Hits", 100),
  disk: new Chart("Disk", 0.01),
  stall: new Chart("Stall", 100),
};
/** The first event, the events of the last seconds, and the best rate of the disk. */
let model = null;
let recent = [];
let best = 0;
let lastSample = 0;
let stream = null;

$("charts").append(...Object.values(charts).map((chart) => chart.element));

/** Opens the stream while the view can be seen, and closes it otherwise. `failed` hears of errors. */
export function watch(failed) {
  const isSeen = !document.hidden && $("heatmap").offsetParent !== null;
  if (isSeen && !stream) {
    stream = new AbortController();
    follow(stream.signal, failed);
  } else if (!isSeen && stream) {
    stream.abort();
    stream = null;
  }
}

/** Opens it again, with another key. */
export function reopen(failed) {
  stream?.abort();
  stream = null;
  watch(failed);
}

/** Shows that nothing is known: the server is gone. */
export function lose() {
  stream?.abort();
  stream = null;
  if (!model) return;
  $("machine-note").textContent = "No data: there is no connection to the server.";
  document.querySelector(".machine").classList.add("lost");
  $("figures").replaceChildren();
  $("slots").tBodies[0].replaceChildren();
  $("queue").textContent = "";
  $("verdict").textContent = "";
}

/** Events come once a second: after this time without one, in ms, the connection is dead. */
const SILENCE = 15000;

/** The events, until there is none for too long. */
async function* heard(response) {
  const all = events(response);
  for (;;) {
    let timer;
    const late = new Promise((_, failed) => {
      timer = setTimeout(() => failed(new ServerError(0, "The server has fallen silent.")), SILENCE);
    });
    const { done, value } = await Promise.race([all.next(), late]).finally(() => clearTimeout(timer));
    if (done) return;
    yield value;
  }
}

async function follow(signal, failed) {
  for (let pause = 500; !signal.aborted; pause = Math.min(2 * pause, 8000)) {
    try {
      for await (const [name, data] of heard(await ask(`moeba/experts${query()}`, { signal }))) {
        pause = 500;
        take(name, JSON.parse(data));
      }
    } catch (error) {
      if (signal.aborted) return;
      $("machine-note").textContent = `No data: ${error.message}`;
      failed(error);
      if (error.status === 501 || error.status === 401) return;
    }
    await new Promise((done) => setTimeout(done, pause));
  }
}

function take(name, event) {
  if (name === "experts") {
    if (model?.model !== event.model) best = 0;
    model = event;
    recent = [];
    lastSample = -STEP;
    map.reset(event);
    describe();
  } else {
    map.apply(event.cells);
  }
  recent.push(event);
  while (recent.length > 2 && recent[1].ms < event.ms - WINDOW) recent.shift();
  if (event.ms - lastSample >= STEP) {
    lastSample = event.ms;
    showFigures(recent[0], event);
    showLegend();
    showSlots(event);
  }
}

/** The sentence above the map, and the plan of memory. */
function describe() {
  document.querySelector(".machine").classList.remove("lost");
  const { layers, k, expert_bytes: size, memory } = model;
  const n = map.n;
  $("heatmap").setAttribute("aria-label", `Map of ${n} experts in ${layers.length} layers`);
  const where = memory.budget !== null
    ? `${bytes(memory.budget)} of memory hold a part of them; the others are read from disk when they are needed.`
    : memory.devices.some((device) => device.experts > 0)
      ? "All are in memory, and the devices hold copies of a part of them."
      : "All are in memory, in place on the mapped file: nothing is read while it writes.";
  $("machine-note").textContent = n
    ? `${count(n)} experts of ${bytes(size)} in ${layers.length} layers; a token uses ${k} of each layer. ${where}`
    : "This model has no experts: every token uses all of its weights.";
  $("heatmap").hidden = !n;
  showMemory(memory);
}

const sum = (event, f) => (event.disk ? f(event.disk) : 0) + (event.link && !event.disk ? f(event.link) : 0);

function showFigures(before, now) {
  const seconds = (now.ms - before.ms) / 1000;
  const since = (f) => f(now) - f(before);
  const decode = seconds > 0 ? since((e) => e.decode.tokens) / seconds : 0;
  const prompt = seconds > 0 ? since((e) => e.prompt.tokens) / seconds : 0;
  const hits = since((e) => sum(e, (c) => c.hits));
  const all = hits + since((e) => sum(e, (c) => c.misses + c.partial));
  const share = all > 0 ? (100 * hits) / all : null;
  const read = since((e) => e.disk?.read_bytes ?? 0);
  const busy = since((e) => e.disk?.busy_ns ?? 0);
  const rate = seconds > 0 ? read / seconds / 1e9 : 0;
  // The link's own rate: too short a time says nothing.
  if (busy > 2e7) best = Math.max(best, read / busy);
  const stall = seconds > 0 ? Math.min(100, since((e) => sum(e, (c) => c.stall_ns)) / seconds / 1e7) : 0;
  const moves = Boolean(now.disk ?? now.link);
  const percent = share === null ? "–" : `${share.toFixed(0)} %`;
  const figure = (label, title, value, note) =>
    h("div", { title }, h("dt", {}, label), h("dd", {}, value, note && h("small", {}, ` ${note}`)));
  const texts = now.slots.filter((slot) => slot.is_processing).length;
  $("figures").replaceChildren(
    figure("Answers", "Tokens of answers a second", short(decode), "tok/s"),
    figure("Prompts", "Tokens of prompts a second", short(prompt), "tok/s"),
    figure("Hits", "Experts that were in memory when they were needed", moves ? percent : "all"),
    figure("Stall", "Time that computation waited for experts", `${stall.toFixed(0)} %`),
    figure("Disk", "What is read of experts", now.disk ? short(rate) : "none", now.disk && "GB/s"),
    figure("Disk, best", "The best rate while it was read, so far", best ? short(best) : "–", best ? "GB/s" : ""),
    figure("Texts", "Texts that are computed", count(texts), `of ${now.slots.length}`),
    figure("Queue", "Requests that wait", count(now.n_queued)));
  charts.tokens.add(decode, `${short(decode)}${prompt > 0 ? `, prompt ${short(prompt)}` : ""}`);
  charts.hits.add(moves ? share : 100, moves ? percent : "all");
  charts.disk.add(rate, now.disk ? `${short(rate)}${best ? ` of ${short(best)}` : ""} GB/s` : "not used", best || undefined);
  charts.stall.add(stall, `${stall.toFixed(0)} % of the time`);
  $("verdict").textContent = verdict(now);
  if (now.disk) {
    const { resident_bytes: held } = now.disk;
    $("held").textContent = `, ${bytes(held)} of them now`;
  }
}

function verdict(now) {
  const link = now.disk ?? now.link;
  if (!link) return "Nothing moves, so there is no policy.";
  const all = link.hits + link.partial + link.misses;
  const parts = [`Policy ${model.policy}.`];
  if (all) parts.push(`${((100 * link.hits) / all).toFixed(1)} % of ${count(all)} demands since the start were in memory.`);
  const prefetched = link.prefetch_used_bytes + link.prefetch_wasted_bytes;
  if (prefetched) parts.push(`${((100 * link.prefetch_used_bytes) / prefetched).toFixed(0)} % of the ${bytes(prefetched)} that were prefetched were used.`);
  if (now.verdict) parts.push(`${now.verdict}.`);
  return parts.join(" ");
}

function showLegend() {
  const item = (kind, text) => h("li", {}, h("span", { class: `swatch ${kind}` }), text);
  const items = map.counts().map((n, place) =>
    (n > 0 || [0, 1, 3].includes(place)) && item(PLACES[place], `${NAMES[place]} ${count(n)}`));
  $("legend").replaceChildren(...items.filter(Boolean), item("hit", "used: was there"), item("miss", "used: was missing"));
}

function showCell(cell) {
  $("cell").textContent = cell
    ? `Layer ${cell.layer}, expert ${cell.expert}: ${cell.place}, used ${count(cell.uses)} times, missing ${count(cell.misses)} times`
    : "Each cell is an expert, each band a layer. Point at a cell, or use the arrow keys.";
}

function showMemory(memory) {
  const inMemory = memory.budget ?? memory.experts;
  const parts = [
    ["ram", "experts", inMemory],
    ["dense", "dense weights", memory.dense],
    ["kv", "keys and values", memory.kv],
    ["pages", "earlier texts", memory.pages],
    ["buffers", "buffers", memory.buffers],
  ].filter(([, , size]) => size > 0);
  const used = parts.reduce((all, [, , size]) => all + size, 0);
  const free = Math.max(0, (memory.available ?? 0) - used);
  if (free) parts.push(["free", "free at the start", free]);
  const whole = used + free;
  const segment = ([kind, name, size]) => {
    const part = h("span", { class: kind, title: `${name}: ${bytes(size)}` });
    part.style.width = `${(100 * size) / whole}%`;
    return part;
  };
  const item = ([kind, name, size]) =>
    h("li", {}, h("span", { class: `swatch ${kind}` }), `${name} ${bytes(size)}`, kind === "ram" && h("span", { id: "held" }));
  const devices = memory.devices.map(({ name, experts, all }) =>
    h("p", { class: "dim" }, `${name}: ${bytes(experts)} of experts, ${bytes(all)} in all`));
  const share = `The file has ${bytes(memory.experts)} of experts; ${((100 * Math.min(inMemory, memory.experts)) / (memory.experts || 1)).toFixed(0)} % of that is in memory.`;
  $("memory").replaceChildren(
    h("div", { class: "bar", role: "img", "aria-label": "Memory plan" }, parts.map(segment)),
    h("ul", { class: "legend" }, parts.map(item)), h("p", { class: "dim" }, share), ...devices);
}

function showSlots(now) {
  const row = (slot) => h("tr", {},
    h("td", {}, slot.id), h("td", {}, slot.state),
    h("td", {}, slot.n_prompt_tokens ? `${count(slot.n_prompt_tokens_processed)} of ${count(slot.n_prompt_tokens)}` : "–"),
    h("td", {}, slot.is_processing ? count(slot.n_decoded) : "–"),
    h("td", {}, `${count(slot.n_past)} of ${count(slot.n_ctx)}`));
  $("slots").tBodies[0].replaceChildren(...now.slots.map(row));
  const kept = now.pages.bytes ? `, ${bytes(now.pages.bytes)} of earlier texts kept` : "";
  $("queue").textContent = `${now.n_queued} waiting${kept}`;
}
