// The list of conversations: search, names, removal.

import { $, h } from "./dom.js";
import { contentOf, titled } from "./tree.js";

/** Characters that are shown before and behind what was found. */
const BEFORE = 10;
const BEHIND = 60;

let actions;
/** What was drawn last: all conversations, the one that is shown, and whether one is being written. */
let chats = [];
let current;
let isWriting = () => false;
/** The conversation that gets another name. */
let renamed;
let shown;

/** `does`: `open(chat, message)`, `rename(chat, title)` and `remove(chat)`. */
export function build(does) {
  actions = does;
  $("search").addEventListener("input", () => draw(chats, current, isWriting));
}

export function draw(all, one, writes) {
  [chats, current, isWriting] = [all, one, writes];
  if (renamed) return;
  const wanted = $("search").value.trim().toLowerCase();
  const hits = wanted ? all.map((chat) => hit(chat, wanted)).filter(Boolean) : all.map((chat) => ({ chat }));
  $("found").textContent = wanted && !hits.length ? "No chat has this text." : "";
  const key = JSON.stringify([one.id, wanted, hits.map(({ chat, around }) => [chat.id, chat.title, writes(chat), around])]);
  if (key === shown) return;
  shown = key;
  $("conversations").replaceChildren(...hits.map(item));
}

/** Where a conversation has a text: in its title, or in a message with what is around it. */
function hit(chat, wanted) {
  for (const node of Object.values(chat.nodes)) {
    const text = contentOf(node);
    const at = text.toLowerCase().indexOf(wanted);
    if (at < 0) continue;
    const end = at + wanted.length;
    const before = (at > BEFORE ? "…" : "") + text.slice(Math.max(0, at - BEFORE), at);
    return { chat, node, around: [before, text.slice(at, end), text.slice(end, end + BEHIND)] };
  }
  return chat.title.toLowerCase().includes(wanted) && { chat };
}

function item({ chat, node, around }) {
  const isCurrent = chat === current;
  const button = (name, sign, run) =>
    h("button", { type: "button", class: "act", "aria-label": `${name} ${chat.title}`, title: name, onclick: run }, sign);
  return h("li", { class: isCurrent && "current", "data-id": chat.id },
    h("button", {
      type: "button", class: isWriting(chat) ? "open writing" : "open", "aria-current": isCurrent && "true",
      title: chat.title, onclick: () => actions.open(chat, node),
    }, h("span", { class: "title" }, chat.title),
      around && h("span", { class: "around" }, around[0], h("mark", {}, around[1]), around[2])),
    button("Rename", "✎", () => rename(chat)),
    button("Delete", "×", () => actions.remove(chat)));
}

/** Puts a field in the place of a title: Enter keeps what is in it, Esc does not. */
function rename(chat) {
  renamed = chat;
  const field = h("input", { value: chat.title, maxLength: 60, "aria-label": `New name of ${chat.title}` });
  const done = (keeps) => {
    if (renamed !== chat) return;
    renamed = shown = undefined;
    const title = titled(field.value);
    if (keeps && title && title !== chat.title) actions.rename(chat, title);
    draw(chats, current, isWriting);
    document.querySelector(`#conversations [data-id="${chat.id}"] .open`)?.focus();
  };
  field.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" && event.key !== "Escape") return;
    event.stopPropagation();
    done(event.key === "Enter");
  });
  field.addEventListener("blur", () => done(true));
  document.querySelector(`#conversations [data-id="${chat.id}"]`).replaceChildren(field);
  field.select();
}
