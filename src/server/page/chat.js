// The conversation: what is shown, sent, stopped, edited and repeated.

import { complete } from "./api.js";
import { $, h } from "./dom.js";
import * as list from "./list.js";
import { MessageView } from "./message.js";
import * as models from "./models.js";
import { replay, requestOf } from "./replay.js";
import * as settings from "./settings.js";
import * as store from "./store.js";
import * as tree from "./tree.js";

let all = [];
let chat = tree.create();
let views = new Map();
/** What this tab writes, by conversation: `{ abort, node, status }`. */
const running = new Map();
/** The status of conversations. */
const said = new Map();
/** When another tab was last heard to write a message, by its id. */
const heard = new Map();
let onFailure = () => {};

/** A tab that writes is heard this often, in ms; one that is not heard for so long has ended. */
const BEAT = 1000;
const SILENCE = 5000;
const WAIT = "Wait for the answer, or stop it with Esc.";
/** Browsers open six connections to a server; one is the machine's. */
const MOST = 4;

export const shown = () => chat;
export const isBusy = () => running.has(chat.id);

/** Says something below a conversation. */
export function say(text, owner = chat) {
  said.set(owner.id, text);
  if (owner === chat && $("status").textContent !== text) $("status").textContent = text;
}

/**
 * Starts with the conversations that the browser has. `failed` hears of errors, `trouble` why
 * nothing is kept.
 */
export async function start(failed, trouble) {
  onFailure = failed;
  list.build({ open, rename, remove });
  show(chat);
  const kept = await store.load({ heard: hear, removed: drop, trouble });
  // Something may have been sent meanwhile.
  all = [...all.filter((one) => Object.keys(one.nodes).length), ...kept];
  if (all.includes(chat)) drawList();
  else show(all[0] ?? chat);
  setInterval(beat, BEAT);
}

/** Shows a conversation. What is being written in another one goes on. */
export function show(next) {
  chat = next;
  if (!all.includes(chat)) all.unshift(chat);
  views = new Map();
  $("messages").replaceChildren();
  draw();
  toEnd();
  drawList();
  drawControls();
  settings.show(chat.own);
  models.show(chat.model);
}

export const fresh = () => {
  const empty = all.find((one) => !Object.keys(one.nodes).length);
  show(empty ?? tree.create());
  $("prompt").focus();
};

/** Takes in a conversation from a file. */
export function take(one) {
  show(one);
  store.put(one, []);
}

const drawList = () => list.draw(all, chat, (one) => running.has(one.id));

/** Shows a conversation that was searched for, and the message that was found. */
function open(one, node) {
  if (node && !tree.path(one).includes(node)) tree.reveal(one, node);
  show(one);
  if (!node) return;
  isFollowing = false;
  views.get(node.id)?.element.scrollIntoView({ block: "center" });
}

function rename(one, title) {
  one.title = title;
  store.change(one.id, { title });
}

/** Keeps settings that are this conversation's own, or that it has none. */
export function keepSettings(own) {
  chat.own = own;
  store.change(chat.id, { own });
}

/** Keeps the model that this conversation speaks to. */
export function keepModel(model) {
  chat.model = model;
  store.change(chat.id, { model });
}

/** The buttons and the status of what is shown. */
function drawControls() {
  $("send").hidden = isBusy();
  $("stop").hidden = !isBusy();
  $("status").textContent = said.get(chat.id) ?? "";
}

function remove(one) {
  if (Object.keys(one.nodes).length && !confirm(`Delete "${one.title}"?`)) return;
  store.remove(one.id);
  drop(one.id);
}

/** Lets go of a conversation that was deleted, here or in another tab. */
function drop(id) {
  const one = all.find((other) => other.id === id);
  if (!one) return;
  all = all.filter((other) => other !== one);
  running.get(id)?.abort.abort();
  if (one === chat) show(all[0] ?? tree.create());
  else drawList();
}

/** Another tab has written something. */
function hear(other) {
  const own = all.find((one) => one.id === other.id);
  const isOwn = (id) => running.get(other.id)?.node?.id === id;
  for (const node of Object.values(other.nodes)) if (node.writing && !isOwn(node.id)) heard.set(node.id, Date.now());
  if (own) tree.merge(own, other, isOwn);
  else all.unshift(other);
  if (own === chat) {
    draw();
    settings.show(chat.own, document.activeElement);
    models.show(chat.model);
  }
  drawList();
}

/** Whether another tab writes a message at present. */
const isElsewhere = (node) => Boolean(node?.writing) && Date.now() - (heard.get(node.id) ?? 0) < SILENCE;

let lastBeat = 0;

/** Keeps what is being written; looks whether other tabs still write. */
function beat() {
  lastBeat = Date.now();
  for (const [id, { node }] of running) {
    const owner = all.find((one) => one.id === id);
    if (owner && node) store.put(owner, [node], []);
  }
  for (const [id, at] of heard) {
    if (Date.now() - at < SILENCE) continue;
    heard.delete(id);
    if (views.has(id)) draw();
  }
}
window.addEventListener("pagehide", beat);

function keep(nodes, parents) {
  chat.updated = Date.now();
  store.put(chat, nodes, parents);
  drawList();
}

/** What an empty conversation says. */
const welcome = [h("div", { class: "empty" },
  h("p", { class: "purpose" }, "Runs mixture-of-experts models that are larger than memory: a token needs only a few " +
    "experts, so the others wait on disk and move to RAM and VRAM when they are needed."),
  h("p", {}, "Ask something, and watch which experts the model uses.", h("span", { class: "for-keys" }, " Press ? for shortcuts.")))];

/** Draws the messages of the chosen path; those that are there stay, with what is edited in them. */
function draw() {
  const list = $("messages");
  const nodes = tree.path(chat);
  const elements = nodes.map((node) => view(node, node === nodes.at(-1)).element);
  if (!elements.length) {
    elements.push(...welcome);
  }
  let same = 0;
  while (same < elements.length && list.children[same] === elements[same]) same++;
  while (list.children.length > same) list.lastChild.remove();
  list.append(...elements.slice(same));
  const call = tree.openCall(nodes);
  $("prompt-label").textContent = call ? `Result of ${call.name}` : "Message";
}

/** Whether the end stays in view when messages grow: until the reader moves up. */
let isFollowing = true;
let lastTop = 0;
$("messages").addEventListener("scroll", ({ target: { scrollTop, scrollHeight, clientHeight } }) => {
  if (scrollHeight - scrollTop - clientHeight < 60) isFollowing = true;
  else if (scrollTop < lastTop) isFollowing = false;
  lastTop = scrollTop;
});
const sizes = new ResizeObserver(() => { if (isFollowing) toEnd(); });

function toEnd() {
  isFollowing = true;
  $("messages").scrollTop = $("messages").scrollHeight;
}

function view(node, isLast) {
  const own = running.get(chat.id)?.node === node;
  if (!views.has(node.id)) {
    views.set(node.id, new MessageView(node, {
      choose, edit: () => edit(node), regenerate: () => regenerate(node), replay: () => repeat(node),
      answer: () => respond(node), proceed: () => proceed(node),
    }));
  }
  const made = views.get(node.id);
  sizes.observe(made.element);
  made.showHead(tree.versions(chat, node), own || isElsewhere(node), isLast && !tree.openCall(tree.path(chat)));
  if (!own) made.update(node);
  return made;
}

function choose(node) {
  if (isBusy()) return say(WAIT);
  tree.choose(chat, node);
  keep([], [node.parent]);
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

/** Whether something can be sent; says why not. */
function isReady() {
  const isFull = running.size >= MOST;
  const wrong = isBusy() ? WAIT : isFull ? `${MOST} chats are being written: wait, or stop one.` : settings.check();
  if (wrong) say(wrong);
  return !wrong;
}

/** Sends what was written, and files: a message, or the result of a tool. */
export function send(text, files) {
  if (!(text.trim() || files.length) || !isReady()) return false;
  const nodes = tree.path(chat);
  const call = tree.openCall(nodes);
  const last = nodes.at(-1);
  const node = tree.add(chat, last?.id, call ? { role: "tool", text, files, call: call.id } : { role: "user", text, files });
  keep([node]);
  draw();
  toEnd();
  if (!tree.openCall(tree.path(chat))) answer(node);
  return true;
}

/** Writes a message again: a new version, behind which the conversation goes on. */
function edit(node) {
  const { element, body } = views.get(node.id);
  if (element.querySelector("textarea")) return;
  const area = h("textarea", { value: node.text, "aria-label": "Edit message" });
  const close = () => {
    form.remove();
    body.hidden = false;
  };
  const done = (event) => {
    event.preventDefault();
    if (node.role !== "assistant" && !isReady()) return;
    close();
    if (area.value === node.text && node.role === "assistant") return;
    const { parent, role, call, files } = node;
    const made = tree.add(chat, parent, { role, call, files, text: area.value });
    keep([made]);
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
  if (isReady()) answer(chat.nodes[node.parent]);
}

/** Answers a message that has no answer. */
function respond(node) {
  if (isReady()) answer(node);
}

/** Writes on behind an answer that was cut: a new version that begins with it. */
function proceed(node) {
  if (isReady()) answer(chat.nodes[node.parent], node);
}

/** Ends what is being written in the chat that is shown; what has come stays. */
export function stop() {
  running.get(chat.id)?.abort.abort();
}

/** Runs `work` while the page shows that something is being written in this chat. */
async function busy(node, work, done) {
  const owner = chat;
  const abort = new AbortController();
  running.set(owner.id, { abort, node });
  drawControls();
  drawList();
  try {
    await work(abort.signal);
  } finally {
    running.delete(owner.id);
    say(done(), owner);
    if (owner === chat) {
      drawControls();
      draw();
    }
    drawList();
  }
}

/** Lets the model answer behind a message, or write on behind what `begun` has. */
function answer(before, begun) {
  const now = settings.current();
  now.seed = settings.nextSeed(now);
  const start = begun && { begun: { text: begun.text, reasoning: begun.reasoning ?? "" } };
  const last = tree.upTo(chat, before).findLast((one) => one.role === "assistant");
  const node = tree.add(chat, before?.id, {
    role: "assistant", text: "", reasoning: "", calls: [], settings: now, writing: true, ...start, ...start?.begun,
    first: last?.first, model: models.current(),
  });
  if (last?.isFull) node.first = tree.later(chat, node, 0.5) ?? node.first;
  const owner = chat;
  owner.model ??= node.model;
  keep([node]);
  const work = async (signal) => {
    draw();
    const follow = follower(owner, node);
    try {
      await turn(before, owner, signal);
      say("Waiting for the model.", owner);
      Object.assign(node, follow.whole(await fitting(owner, node, signal, follow)));
    } catch (error) {
      Object.assign(node, follow.whole(error.answer ?? {}), { error: error.message });
      settings.blame(error);
      onFailure(error);
    }
    node.writing = false;
    node.isFull = node.finish === "length" && node.usage?.total_tokens >= settings.context();
    if (all.includes(owner)) store.put(owner, [node], []);
  };
  return busy(node, work, () => {
    const n = tree.upTo(owner, before).length - tree.before(owner, node).length;
    return outcome(node) + (n && !node.error ? ` The context is full: the ${n} oldest messages were left out.` : "");
  });
}

/** Asks for an answer. The oldest messages leave a chat that the context has no room for. */
async function fitting(owner, node, signal, follow) {
  for (;;) {
    const load = models.watch(node.model, signal, (text) => say(text, owner));
    try {
      return await complete(requestOf(owner, node), signal, (part) => {
        load.end();
        return follow(part);
      });
    } catch (error) {
      const first = error.fitting && tree.later(owner, node, error.fitting / 2);
      if (!first) throw error;
      node.first = first;
    } finally {
      load.end();
    }
  }
}

/** Waits until another tab has written what is answered. */
async function turn(before, owner, signal) {
  const last = before && owner.nodes[before.parent];
  while (isElsewhere(last) && !signal.aborted) {
    say("Waiting for the answer that another tab writes.", owner);
    await new Promise((done) => setTimeout(done, BEAT / 4));
  }
}

/** What is said of an answer that has ended. */
function outcome({ error, stopped, finish, calls, isFull }) {
  if (error) return `The answer has failed: ${error}`;
  if (stopped) return "Stopped.";
  if (isFull) return "The answer was cut: the model's context is full. The oldest messages leave when the chat goes on.";
  if (finish === "length") return "The answer was cut: it has as many tokens as are allowed.";
  return calls?.length ? "The model waits for the result of its call." : "The answer is complete.";
}

/** The parts of an answer that are kept. */
function trim({ progress, ...answer }) {
  return answer;
}

/** Shows an answer as it comes, once a frame; scrolls along if the end was in view. */
function follower(owner, node) {
  let newest = null;
  const { text, reasoning } = node.begun ?? { text: "", reasoning: "" };
  const whole = (part) =>
    trim({ ...part, text: text + (part.text ?? ""), reasoning: reasoning + (part.reasoning ?? "") });
  const frame = () => {
    const part = newest;
    newest = null;
    // The answer may have ended, or another chat be shown, since the frame was asked for.
    if (owner !== chat || !node.writing) return;
    if (part.text || part.reasoning) say("The model is writing. Esc stops it.");
    views.get(node.id)?.update(node, part.progress);
  };
  const follow = (part) => {
    Object.assign(node, whole(part));
    if (!newest) requestAnimationFrame(frame);
    newest = part;
    // Timers of tabs in the background are slow.
    if (Date.now() - lastBeat > BEAT) beat();
  };
  return Object.assign(follow, { whole });
}

/** Repeats an answer with its seed and says whether the bytes are the same. */
function repeat(node) {
  if (isBusy()) return say(WAIT);
  const shownView = views.get(node.id);
  let end = "The replay has ended.";
  const work = async (signal) => {
    shownView.showReplay("Replaying …");
    try {
      const found = await replay(chat, node, signal, (part) => {
        shownView.showReplay(`Replaying … ${part.text.length + part.reasoning.length} characters`);
      });
      shownView.showReplay(found.text, found.same);
    } catch (error) {
      end = `The replay has failed: ${error.message}`;
      shownView.showReplay(end, false);
      onFailure(error);
    }
  };
  say("Replaying. Esc stops it.");
  return busy(null, work, () => end);
}

export function replayLast() {
  const node = tree.path(chat).findLast((one) => one.role === "assistant" && one.settings);
  if (node) repeat(node);
}
