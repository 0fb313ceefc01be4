// A conversation is a tree: an edit or a new answer is a sibling, and nothing is lost.

const ROOT = "root";
const newId = () => Array.from(crypto.getRandomValues(new Uint32Array(3)), (n) => n.toString(36)).join("");

const NEW = "New chat";
/** The longest title, in characters. */
const MOST = 60;

/** A text as a title. */
export const titled = (text = "") => text.trim().replace(/\s+/g, " ").slice(0, MOST);

export const create = () => ({ id: newId(), title: NEW, updated: Date.now(), nodes: {}, chosen: {} });

/** Adds a message behind `parent` (`null`: at the start), and chooses it. */
export function add(chat, parent, message) {
  const node = { id: newId(), parent: parent ?? ROOT, made: Date.now(), ...message };
  chat.nodes[node.id] = node;
  choose(chat, node);
  chat.updated = Date.now();
  if (node.role === "user" && chat.title === NEW) chat.title = titled(node.text) || titled(node.files?.[0]?.name) || NEW;
  return node;
}

export function choose(chat, node) {
  chat.chosen[node.parent] = node.id;
}

/** All versions of a message, in the order in which they were made. */
export const versions = (chat, node) =>
  Object.values(chat.nodes).filter((other) => other.parent === node.parent).sort((a, b) => a.made - b.made);

/**
 * Takes in what another tab has written: messages are added, and those that grow there grow here.
 * What is chosen here stays chosen. `isOwn` says whether this tab writes a message.
 */
export function merge(chat, other, isOwn) {
  for (const node of Object.values(other.nodes)) {
    if (!isOwn(node.id)) chat.nodes[node.id] = Object.assign(chat.nodes[node.id] ?? {}, { error: undefined }, node);
  }
  chat.chosen = { ...other.chosen, ...chat.chosen };
  chat.title = other.title;
  chat.own = other.own;
  chat.model = other.model;
  chat.updated = Math.max(chat.updated, other.updated);
}

/** The messages that are shown, first to last. */
export function path(chat) {
  const nodes = [];
  for (let at = ROOT; chat.chosen[at] && chat.nodes[chat.chosen[at]]; at = chat.chosen[at]) {
    nodes.push(chat.nodes[chat.chosen[at]]);
  }
  return nodes;
}

/** The messages up to and with a node. */
export function upTo(chat, node) {
  const nodes = [];
  for (let at = node; at; at = chat.nodes[at.parent]) nodes.unshift(at);
  return nodes;
}

/** The messages that an answer follows on: from its `first` one, where older ones were left out. */
export function before(chat, answer) {
  const nodes = upTo(chat, chat.nodes[answer.parent]);
  return nodes.slice(Math.max(0, nodes.findIndex((node) => node.id === answer.first)));
}

/**
 * The first message of a later beginning, so that about `share` of the text is left before an
 * answer; `undefined` if only the last question would be.
 */
export function later(chat, answer, share) {
  const nodes = before(chat, answer);
  const sizes = nodes.map((node) => JSON.stringify(wire(node)).length);
  const all = sizes.reduce((a, b) => a + b, 0);
  const last = nodes.findLast(({ role }) => role === "user");
  let left = all;
  return nodes.find((node, i) => {
    const isEnough = left <= share * all || node === last;
    left -= sizes[i];
    return i > 0 && node.role === "user" && isEnough;
  })?.id;
}

/** Chooses the versions on whose path a message is. */
export function reveal(chat, node) {
  for (const one of upTo(chat, node)) choose(chat, one);
}

/** A file as a part of a text: its name, and a fence that it does not close. */
function fenced({ name, text }) {
  const longest = Math.max(2, ...(text.match(/`+/g) ?? []).map((run) => run.length));
  const fence = "`".repeat(longest + 1);
  const kind = /\.(\w+)$/.exec(name)?.[1] ?? "";
  return `${name}:\n${fence}${kind}\n${text.replace(/\n$/, "")}\n${fence}`;
}

/** What a message says, its files before its text. */
export const contentOf = ({ text, files = [] }) => [...files.map(fenced), text].filter(Boolean).join("\n\n");

/** A message as the server reads it. */
export function wire(node) {
  const content = contentOf(node);
  if (node.role === "tool") return { role: "tool", tool_call_id: node.call, content };
  const message = { role: node.role, content };
  if (node.role !== "assistant") return message;
  if (node.reasoning) message.reasoning_content = node.reasoning;
  if (node.calls?.length) {
    message.tool_calls = node.calls.map(({ id, name, arguments: text }) => ({
      id, type: "function", function: { name, arguments: text },
    }));
  }
  return message;
}

/** The first call of the last answer that has no result yet. */
export function openCall(nodes) {
  const at = nodes.findLastIndex((node) => node.role === "assistant");
  const answered = new Set(nodes.slice(at + 1).map((node) => node.call));
  return nodes[at]?.calls?.find((call) => !answered.has(call.id));
}

/** A conversation from a file, with nothing in it but what this page knows. */
export function restore(data) {
  const chat = create();
  if (typeof data?.nodes !== "object" || !data.nodes) throw new Error("the file has no conversation");
  const text = (value) => (typeof value === "string" ? value : "");
  for (const [id, node] of Object.entries(data.nodes)) {
    if (!["user", "assistant", "tool"].includes(node?.role)) continue;
    const calls = Array.isArray(node.calls) ? node.calls : [];
    const settings = typeof node.settings === "object" ? node.settings : undefined;
    const files = Array.isArray(node.files) ? node.files : [];
    const call = (c) => ({ id: text(c?.id), name: text(c?.name), arguments: text(c?.arguments) });
    chat.nodes[id] = {
      id, parent: text(node.parent), role: node.role, text: text(node.text), reasoning: text(node.reasoning),
      files: files.map((file) => ({ name: text(file?.name), text: text(file?.text) })),
      calls: calls.map(call), call: text(node.call), settings: settings ?? undefined,
      model: text(node.model) || undefined, hash: text(node.hash), fingerprint: text(node.fingerprint), made: chat.updated + Object.keys(chat.nodes).length,
      stopped: node.stopped === true || node.writing === true,
      begun: node.begun ? { text: text(node.begun.text), reasoning: text(node.begun.reasoning) } : undefined,
    };
  }
  for (const [at, id] of Object.entries(data.chosen ?? {})) if (chat.nodes[id]?.parent === at) chat.chosen[at] = id;
  chat.title = titled(text(data.title)) || chat.title;
  const own = data.own && Object.entries(data.own).filter(([, value]) => typeof value === "string");
  if (own) chat.own = Object.fromEntries(own);
  if (text(data.model)) chat.model = data.model;
  return chat;
}
