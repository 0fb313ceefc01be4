// The conversation: what is shown, sent, stopped, edited and repeated.

import { complete } from "./api.js";
import { $, h } from "./dom.js";
import { MessageView } from "./message.js";
import { replay, requestOf } from "./replay.js";
import { current, nextSeed } from "./settings.js";
import * as store from "./store.js";
import * as tree from "./tree.js";

let all = [];
let chat = tree.create();
let views = new Map();
/** Ends what is being written. */
let running = null;
let onFailure = () => {};

export const shown = () => chat;
export const isBusy = () => running !== null;

/** Starts with the conversations that the browser has. `failed` hears of errors. */
export async function start(failed) {
  onFailure = failed;
  all = await store.load();
  show(all[0] ?? tree.create());
}

/** Shows a conversation. */
export function show(next) {
  stop();
  chat = next;
  if (!all.includes(chat)) all.unshift(chat);
  draw();
  drawList();
}

export const fresh = () => {
  const empty = all.find((one) => !Object.keys(one.nodes).length);
  show(empty ?? tree.create());
  $("prompt").focus();
};

function drawList() {
  const item = (one) => h("li", {},
    h("button", { type: "button", class: "open", "aria-current": one === chat && "true", onclick: () => show(one) }, one.title),
    h("button", { type: "button", class: "remove", "aria-label": `Delete ${one.title}`, onclick: () => remove(one) }, "×"));
  $("conversations").replaceChildren(...all.map(item));
}

function remove(one) {
  if (Object.keys(one.nodes).length && !confirm(`Delete "${one.title}"?`)) return;
  store.remove(one.id);
  all = all.filter((other) => other !== one);
  if (one === chat) show(all[0] ?? tree.create());
  else drawList();
}

function keep() {
  chat.updated = Date.now();
  store.put(structuredClone(chat));
  drawList();
}

/** Draws the messages of the chosen path. */
function draw() {
  views = new Map();
  const nodes = tree.path(chat);
  const elements = nodes.map((node) => view(node).element);
  const hint = h("p", { class: "empty" }, "Ask something, and watch which experts the model uses. Press ? for shortcuts.");
  $("messages").replaceChildren(...(elements.length ? elements : [hint]));
  $("messages").scrollTop = $("messages").scrollHeight;
  const call = tree.openCall(nodes);
  $("prompt-label").textContent = call ? `Result of ${call.name}` : "Message";
}

function view(node) {
  const made = new MessageView(node, tree.versions(chat, node), {
    choose: (other) => choose(other),
    edit: () => edit(node),
    regenerate: () => regenerate(node),
    replay: () => repeat(node),
  });
  views.set(node.id, made);
  return made;
}

function choose(node) {
  if (running) return;
  tree.choose(chat, node);
  keep();
  draw();
}

/** Shows the version before or after of the last message that has several. */
export function step(by) {
  const node = tree.path(chat).findLast((one) => tree.versions(chat, one).length > 1);
  if (!node) return;
  const versions = tree.versions(chat, node);
  const next = versions[versions.indexOf(node) + by];
  if (next) choose(next);
}

/** Sends what was written: a message, or the result of a tool. */
export function send(text) {
  if (running || !text.trim()) return false;
  const nodes = tree.path(chat);
  const call = tree.openCall(nodes);
  const last = nodes.at(-1);
  const node = tree.add(chat, last?.id, call ? { role: "tool", text, call: call.id } : { role: "user", text });
  keep();
  draw();
  if (!tree.openCall(tree.path(chat))) answer(node);
  return true;
}

/** Writes a message again: a new version, behind which the conversation goes on. */
function edit(node) {
  if (running) return;
  const { element, body } = views.get(node.id);
  if (element.querySelector("textarea")) return;
  const area = h("textarea", { value: node.text, "aria-label": "Edit message" });
  const close = () => {
    form.remove();
    body.hidden = false;
  };
  const done = (event) => {
    event.preventDefault();
    close();
    if (area.value === node.text && node.role === "assistant") return;
    const { parent, role, call } = node;
    const made = tree.add(chat, parent, { role, call, text: area.value });
    keep();
    draw();
    if (role !== "assistant") answer(made);
  };
  const form = h("form", { onsubmit: done }, area, h("div", { class: "row" },
    h("button", { type: "submit", class: "primary" }, node.role === "assistant" ? "Keep" : "Send"),
    h("button", { type: "button", onclick: close }, "Cancel")));
  area.addEventListener("keydown", (event) => {
    if (event.key === "Escape") {
      event.stopPropagation();
      close();
    }
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit();
  });
  body.hidden = true;
  body.after(form);
  area.focus();
}

export function editLast() {
  const node = tree.path(chat).findLast((one) => one.role === "user");
  if (node) edit(node);
}

export function regenerateLast() {
  const node = tree.path(chat).findLast((one) => one.role === "assistant");
  if (node) regenerate(node);
}

/** Answers again: a new version beside the answer, with a new seed unless one is set. */
function regenerate(node) {
  if (!running) answer(chat.nodes[node.parent]);
}

/** Ends what is being written; what has come stays. */
export function stop() {
  running?.abort();
}

/** Runs `work` while the page shows that something is being written. */
async function busy(work, done) {
  running = new AbortController();
  $("send").hidden = true;
  $("stop").hidden = false;
  try {
    await work(running.signal);
  } finally {
    running = null;
    $("send").hidden = false;
    $("stop").hidden = true;
    $("status").textContent = done();
  }
}

/** Lets the model answer behind a message. */
function answer(before) {
  const settings = current();
  settings.seed = nextSeed(settings);
  const node = tree.add(chat, before?.id, { role: "assistant", text: "", reasoning: "", calls: [], settings });
  const owner = chat;
  draw();
  const shownView = views.get(node.id);
  const follow = follower(shownView, node);
  shownView.element.classList.add("writing");
  $("status").textContent = "Waiting for the model.";
  const work = async (signal) => {
    try {
      Object.assign(node, trim(await complete(requestOf(owner, node), signal, follow)));
    } catch (error) {
      Object.assign(node, trim(error.answer ?? {}), { error: error.message });
      onFailure(error);
    }
    shownView.element.classList.remove("writing");
    shownView.update(node);
    if (owner === chat) {
      keep();
      const call = tree.openCall(tree.path(chat));
      $("prompt-label").textContent = call ? `Result of ${call.name}` : "Message";
    } else {
      store.put(structuredClone(owner));
    }
  };
  return busy(work, () => (node.error ? "The answer has failed." : node.stopped ? "Stopped." : "The answer is complete."));
}

/** The parts of an answer that are kept. */
function trim({ progress, ...answer }) {
  return answer;
}

/** Shows an answer as it comes, once a frame; scrolls along if the end was in view. */
function follower(shownView, node) {
  let newest = null;
  return (part) => {
    const isWaiting = newest !== null;
    newest = part;
    if (isWaiting) return;
    requestAnimationFrame(() => {
      const list = $("messages");
      if (newest.text || newest.reasoning) $("status").textContent = "The model is writing. Esc stops it.";
      const isAtEnd = list.scrollHeight - list.scrollTop - list.clientHeight < 60;
      Object.assign(node, trim(newest));
      shownView.update(node, newest.progress);
      if (isAtEnd) list.scrollTop = list.scrollHeight;
      newest = null;
    });
  };
}

/** Repeats an answer with its seed and says whether the bytes are the same. */
function repeat(node) {
  if (running) return;
  const shownView = views.get(node.id);
  const work = async (signal) => {
    shownView.showReplay("Replaying …");
    try {
      const found = await replay(chat, node, signal, (part) => {
        shownView.showReplay(`Replaying … ${part.text.length + part.reasoning.length} characters`);
      });
      shownView.showReplay(found.text, found.same);
    } catch (error) {
      shownView.showReplay(`The replay has failed: ${error.message}`, false);
      onFailure(error);
    }
  };
  return busy(work, () => "The replay has ended.");
}

export function replayLast() {
  const node = tree.path(chat).findLast((one) => one.role === "assistant" && one.settings);
  if (node) repeat(node);
}
