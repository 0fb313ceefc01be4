// Markdown to elements. Text from a model is hostile: it becomes text nodes and a fixed set of
// elements, links go to http, https and mailto only, nothing is loaded, and every search is bounded.

import { copyButton, h } from "./dom.js";

const MAX_DEPTH = 8;
/** Marks are looked for this far. */
const REACH = 4000;

const FENCE = /^ {0,3}(`{3,}|~{3,})([^`]*)$/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)]) +/;
const RULE = /^ {0,3}([-*_])( *\1){2,} *$/;
const HEADING = /^ {0,3}(#{1,6}) +(.*)$/;
const DIVIDER = /^ *(?:\| *)?:?-+:? *(?:\| *:?-+:? *)*(?:\| *)?$/;

/** Cuts a text into blocks: `{ kind, lines, … }`. */
export function blocks(text) {
  const lines = text.replace(/\r\n?/g, "\n").split("\n");
  const out = [];
  for (let i = 0; i < lines.length; ) {
    const from = i;
    const block = next(lines, i);
    i = block ? block.end : i + 1;
    if (block) out.push({ ...block, raw: lines.slice(from, i).join("\n") });
  }
  return out;
}

function next(lines, i) {
  const line = lines[i];
  if (!line.trim()) return null;
  const fence = FENCE.exec(line);
  if (fence) {
    const [, mark, info] = fence;
    let end = i + 1;
    while (end < lines.length && !closes(lines[end], mark)) end++;
    return { kind: "code", info: info.trim(), lines: lines.slice(i + 1, end), end: Math.min(end + 1, lines.length) };
  }
  const heading = HEADING.exec(line);
  if (heading) return { kind: "heading", level: heading[1].length, text: heading[2], end: i + 1 };
  if (RULE.test(line)) return { kind: "rule", end: i + 1 };
  if (/^ {0,3}>/.test(line)) {
    let end = i;
    while (end < lines.length && /^ {0,3}>/.test(lines[end])) end++;
    return { kind: "quote", text: lines.slice(i, end).map((l) => l.replace(/^ {0,3}> ?/, "")).join("\n"), end };
  }
  if (ITEM.test(line)) return list(lines, i);
  if (line.includes("|") && i + 1 < lines.length && lines[i + 1].length < REACH && DIVIDER.test(lines[i + 1])) {
    let end = i + 2;
    while (end < lines.length && lines[end].includes("|")) end++;
    return { kind: "table", lines: lines.slice(i, end), end };
  }
  let end = i + 1;
  while (end < lines.length && lines[end].trim() && !starts(lines[end])) end++;
  return { kind: "paragraph", text: lines.slice(i, end).join("\n"), end };
}

const closes = (line, mark) => line.trim().startsWith(mark) && !line.trim().replaceAll(mark[0], "");
const starts = (line) => [FENCE, ITEM, RULE, HEADING].some((form) => form.test(line)) || /^ {0,3}>/.test(line);

function list(lines, i) {
  const [, indent, mark] = ITEM.exec(lines[i]);
  const ordered = /\d/.test(mark);
  const items = [];
  let end = i;
  while (end < lines.length) {
    const item = ITEM.exec(lines[end]);
    const isItem = item && item[1].length <= indent.length + 1;
    if (isItem && /\d/.test(item[2]) === ordered) items.push([lines[end].slice(item[0].length)]);
    else if (!isItem && /^( {2,}|\t)/.test(lines[end])) items.at(-1).push(lines[end].replace(/^(\t| {1,4})/, ""));
    else if (!lines[end].trim() && /^( {2,}|\t)|^ *([-*+]|\d+[.)]) /.test(lines[end + 1] ?? "")) items.at(-1).push("");
    else if (item || !lines[end].trim() || starts(lines[end])) break;
    else items.at(-1).push(lines[end]);
    end++;
  }
  return { kind: "list", ordered, start: parseInt(mark, 10) || 1, items: items.map((item) => item.join("\n")), end };
}

/** The element of a block. */
function element(block, depth) {
  const deeper = (text) => (depth < MAX_DEPTH ? blocks(text).map((b) => element(b, depth + 1)) : [text]);
  switch (block.kind) {
    case "code": return code(block);
    case "heading": return h(`h${Math.min(block.level + 1, 6)}`, {}, inline(block.text));
    case "rule": return h("hr");
    case "quote": return h("blockquote", {}, deeper(block.text));
    case "table": return table(block.lines);
    case "list": {
      const items = block.items.map((item) => h("li", {}, item.includes("\n") ? deeper(item) : inline(item)));
      return block.ordered ? h("ol", { start: block.start }, items) : h("ul", {}, items);
    }
    default: return h("p", {}, inline(block.text));
  }
}

function code({ info, lines }) {
  const text = lines.join("\n");
  const label = info ? `Code, ${info.slice(0, 30)}` : "Code";
  return h("div", { class: "code" },
    h("pre", { tabindex: "0", "aria-label": label, role: "region" }, h("code", {}, text)),
    copyButton({}, () => text));
}

function table(lines) {
  const cells = (line) => line.trim().replace(/^\||\|$/g, "").split("|").slice(0, 100).map((cell) => cell.trim());
  const row = (line, tag) => h("tr", {}, cells(line).map((cell) => h(tag, {}, inline(cell))));
  return h("table", {},
    h("thead", {}, row(lines[0], "th")),
    h("tbody", {}, lines.slice(2).map((line) => row(line, "td"))));
}

/** The address of a link, if it is harmless. */
function address(text) {
  try {
    const url = new URL(text);
    return ["http:", "https:", "mailto:"].includes(url.protocol) ? url.href : null;
  } catch {
    return null;
  }
}

const link = (href, children) => h("a", { href, target: "_blank", rel: "noopener noreferrer" }, children);

const MARKS = [["**", "strong"], ["__", "strong"], ["~~", "s"], ["*", "em"], ["_", "em"]];

/** The nodes of a line's text. */
export function inline(text, depth = 0) {
  const out = [];
  let plain = "";
  const put = (node) => {
    if (plain) out.push(plain);
    plain = "";
    out.push(node);
  };
  const find = finder(text);
  for (let i = 0; i < text.length; ) {
    const c = text[i];
    if (c === "\\" && /[!-/:-@[-`{-~]/.test(text[i + 1] ?? "")) {
      plain += text[i + 1];
      i += 2;
      continue;
    }
    if (c === "\n") {
      if (plain.endsWith("  ")) put(h("br"));
      else plain += "\n";
      i++;
      continue;
    }
    const part = depth < MAX_DEPTH ? span(text, i, find, depth) : null;
    if (part) {
      put(part.node);
      i = part.end;
    } else {
      plain += c;
      i++;
    }
  }
  if (plain) out.push(plain);
  return out;
}

/** Looks for marks in a text; remembers where they are, so that many looks take one pass. */
function finder(text) {
  const found = new Map();
  const find = (mark, from) => {
    const last = found.get(mark);
    let at = last && from >= last.from && from <= last.at ? last.at : -2;
    if (at === -2) {
      at = text.indexOf(mark, from);
      found.set(mark, { from, at: at < 0 ? Infinity : at });
    }
    return at - from > REACH ? -1 : at;
  };
  /** Up to here no mark of the kind ends anything. */
  find.open = new Map();
  return find;
}

/** A marked part of a text that begins at `i`. */
function span(text, i, find, depth) {
  const c = text[i];
  if (c === "`") {
    const mark = /^`+/.exec(text.slice(i, i + 20))[0];
    const end = find(mark, i + mark.length);
    if (end < 0) return { node: mark, end: i + mark.length };
    return { node: h("code", {}, text.slice(i + mark.length, end).trim()), end: end + mark.length };
  }
  if (c === "[") {
    const middle = find("](", i + 1);
    const end = middle < 0 ? -1 : find(")", middle + 2);
    if (end < 0) return null;
    const [label, target] = [text.slice(i + 1, middle), text.slice(middle + 2, end).trim().split(/\s/)[0]];
    const href = address(target);
    // What is no link is shown as it was written.
    return { node: href ? link(href, inline(label, depth + 1)) : text.slice(i, end + 1), end: end + 1 };
  }
  if (c === "h" && (i === 0 || /[\s(<]/.test(text[i - 1]))) {
    const found = /^https?:\/\/[^\s<>"')\]]+/.exec(text.slice(i, i + REACH));
    const href = found && address(found[0].replace(/[.,;:!?]+$/, ""));
    if (!href) return null;
    const shown = found[0].replace(/[.,;:!?]+$/, "");
    return { node: link(href, shown), end: i + shown.length };
  }
  const found = MARKS.find(([mark]) => text.startsWith(mark, i));
  if (!found) return null;
  const [mark, tag] = found;
  const from = i + mark.length;
  const inWord = mark[0] === "_" && /\w/.test(text[i - 1] ?? "");
  if (inWord || /\s/.test(text[from] ?? " ")) return null;
  const start = Math.max(from + 1, find.open.get(mark) ?? 0);
  for (let end = find(mark, start); end >= 0 && end - from < REACH; end = find(mark, end + 1)) {
    const isOpen = /\s/.test(text[end - 1]) || (mark[0] === "_" && /\w/.test(text[end + mark.length] ?? ""));
    if (!isOpen) return { node: h(tag, {}, inline(text.slice(from, end), depth + 1)), end: end + mark.length };
    find.open.set(mark, end + 1);
  }
  return null;
}

/** Shows a text that grows in an element: only blocks that have changed are made again. */
export class Markdown {
  constructor(root) {
    this.root = root;
    this.shown = [];
  }

  update(text) {
    const all = blocks(text);
    let same = 0;
    while (same < all.length && this.shown[same]?.raw === all[same].raw && same + 1 < this.shown.length) same++;
    while (this.shown.length > same) this.shown.pop().element.remove();
    for (const block of all.slice(same)) {
      const made = element(block, 0);
      this.root.append(made);
      this.shown.push({ raw: block.raw, element: made });
    }
  }
}
