// Markdown to elements. Text from a model is hostile: markdown-it makes tokens of it, and these
// become text nodes and a fixed set of elements; links go to http, https and mailto only, and
// nothing is loaded.

import { code } from "./code.js";
import { h } from "./dom.js";
import { formula, rules } from "./math.js";
import MarkdownIt from "./third_party/markdown-it.min.js";

const parser = new MarkdownIt({ html: false, linkify: true });
parser.linkify.set({ fuzzyLink: false, fuzzyEmail: false, fuzzyIP: false });
parser.validateLink = (link) => address(link) !== null;
rules(parser);

const TASK = /^\[([ xX])\]\s+/;

/** The address of a link, if it is harmless. */
function address(text) {
  try {
    const url = new URL(text);
    return ["http:", "https:", "mailto:"].includes(url.protocol) ? url.href : null;
  } catch {
    return null;
  }
}

const link = (href, ...children) => h("a", { href: address(href), target: "_blank", rel: "noopener noreferrer" }, children);

/** The elements of tokens. `isGrowing`: there will soon be a longer text. */
function elements(tokens, isGrowing) {
  const open = [document.createDocumentFragment()];
  tokens.forEach((token, i) => {
    if (token.nesting < 0) return open.pop();
    const parent = open.at(-1);
    // Items of lists without blank lines have no paragraphs.
    if (token.hidden) return open.push(parent);
    if (token.type === "inline") {
      if (tokens[i - 2]?.type === "list_item_open") takeTask(token, parent);
      return parent.append(elements(token.children, isGrowing));
    }
    const made = token.nesting > 0 ? container(token) : leaf(token, isGrowing);
    const isTable = token.type === "table_open";
    parent.append(isTable ? h("div", { class: "scroll", tabindex: "0", role: "group", "aria-label": "Table" }, made) : made);
    if (token.nesting > 0) open.push(made);
  });
  return open[0];
}

/** Puts a box before the text of an item that begins with one. */
function takeTask({ children: [first] }, parent) {
  const found = first?.type === "text" && TASK.exec(first.content);
  if (!found) return;
  first.content = first.content.slice(found[0].length);
  const isDone = found[1] !== " ";
  parent.append(h("input", { type: "checkbox", disabled: true, checked: isDone, "aria-label": isDone ? "Done" : "To do" }));
  parent.closest("li").className = "task";
}

/** The element that a token opens. */
function container(token) {
  const { tag } = token;
  if (tag === "a") return link(token.attrGet("href"));
  if (tag === "ol") return h("ol", { start: Number(token.attrGet("start") ?? 1) });
  if (tag === "th" || tag === "td") return h(tag, { class: /\w+$/.exec(token.attrGet("style") ?? "")?.[0] });
  // The page itself has the first heading.
  if (/^h\d$/.test(tag)) return h(`h${Math.min(Number(tag[1]) + 1, 6)}`);
  return h(tag);
}

/** The node of a token that opens nothing. */
function leaf(token, isGrowing) {
  switch (token.type) {
    case "softbreak":
    case "hardbreak": return h("br");
    case "hr": return h("hr");
    case "code_inline": return h("code", {}, token.content);
    case "code_block":
    case "fence": return code(token.content.replace(/\n$/, ""), token.info.trim(), isGrowing);
    case "image": return link(token.attrGet("src"), token.content || "picture");
    case "math":
    case "math_block": return formula(token, isGrowing);
    default: return document.createTextNode(token.content);
  }
}

/** Cuts a text into blocks: where each begins, its source and its tokens. */
function blocks(text, env) {
  const starts = [0];
  for (let at = text.indexOf("\n"); at >= 0; at = text.indexOf("\n", at + 1)) starts.push(at + 1);
  const out = [];
  let tokens = [];
  let depth = 0;
  for (const token of parser.parse(text, env)) {
    tokens.push(token);
    depth += token.nesting;
    if (depth > 0) continue;
    const [begin, end] = tokens[0].map;
    out.push({ at: starts[begin], raw: text.slice(starts[begin], starts[end]), tokens });
    tokens = [];
  }
  return out;
}

/** Shows a text that grows in an element: what its end does not change stays. */
export class Markdown {
  constructor(root) {
    this.root = root;
    this.text = "";
    this.shown = [];
  }

  update(given) {
    const text = given.replace(/\r\n?/g, "\n");
    const isGrowing = this.text !== "" && text.startsWith(this.text);
    this.text = text;
    // The last line may turn out to be a part of the block before its own.
    const first = isGrowing ? Math.max(0, this.shown.length - 2) : 0;
    if (!isGrowing) {
      this.env = {};
      this.shown = [];
      this.root.replaceChildren();
    }
    const begin = this.shown[first]?.at ?? 0;
    const all = blocks(text.slice(begin), this.env);
    let same = 0;
    while (same < all.length && this.shown[first + same]?.raw === all[same].raw) same++;
    while (this.shown.length > first + same) this.shown.pop().element.remove();
    for (const { at, raw, tokens } of all.slice(same)) {
      const element = elements(tokens, isGrowing).firstChild;
      this.root.append(element);
      this.shown.push({ at: begin + at, raw, element });
    }
  }
}
