// Formulas: \(…\), $…$, \[…\] and $$…$$ in Markdown, and their elements. KaTeX is loaded with the first.

import { h, whenSeen } from "./dom.js";

/** The end of a formula is looked for this far. */
const REACH = 2000;
/** What begins a formula, what ends it, and whether it stands alone. */
const MARKS = [["$$", "$$", true], ["\\[", "\\]", true], ["\\(", "\\)", false], ["$", "$", false]];

/** Teaches a parser (markdown-it) formulas: tokens `math` and `math_block`. */
export function rules(parser) {
  parser.inline.ruler.before("escape", "math", inText);
  parser.block.ruler.before("fence", "math_block", alone, { alt: ["paragraph", "reference", "blockquote", "list"] });
}

function inText(state, isSilent) {
  const { src, pos } = state;
  const mark = MARKS.find(([begin]) => src.startsWith(begin, pos));
  if (!mark) return false;
  const [begin, end, isDisplay] = mark;
  const rest = src.slice(pos + begin.length, Math.min(pos + REACH, state.posMax));
  let at = rest.indexOf(end);
  while (end === "$" && rest[at - 1] === "\\") at = rest.indexOf(end, at + 1);
  const tex = rest.slice(0, Math.max(at, 0));
  if (!tex.trim() || (begin === "$" && !isFormula(tex, src[pos - 1], rest[at + 1]))) return false;
  if (!isSilent) put(state, "math", tex, begin + tex + end, isDisplay);
  state.pos = pos + begin.length + at + end.length;
  return true;
}

/** Whether what stands between single dollars is no text between two prices. */
function isFormula(tex, before, after) {
  if (/^\s|\s$/.test(tex) || /[\w$]/.test(before ?? "") || /\d/.test(after ?? "")) return false;
  return !/^\d[\s\S]*\s/.test(tex) || /[\\^_=+*/<>{]/.test(tex);
}

/** A formula in lines of its own; blank lines are not part of any. */
function alone(state, startLine, endLine, isSilent) {
  const line = (n) => state.src.slice(state.bMarks[n] + state.tShift[n], state.eMarks[n]).trimEnd();
  const [begin, end] = MARKS.slice(0, 2).find(([mark]) => line(startLine).startsWith(mark)) ?? [];
  if (!begin || state.sCount[startLine] - state.blkIndent > 3) return false;
  const from = state.bMarks[startLine] + state.tShift[startLine] + begin.length;
  if (!state.src.slice(from, from + REACH).includes(end)) return false;
  const lines = [];
  for (let n = startLine; n < endLine; n++) {
    const text = n === startLine ? line(n).slice(begin.length) : line(n);
    if (n > startLine && (!text || state.sCount[n] < state.blkIndent)) return false;
    const at = text.indexOf(end);
    lines.push(at < 0 ? text : text.slice(0, at));
    if (at < 0) continue;
    const tex = lines.join("\n");
    if (!tex.trim() || text.length > at + end.length) return false;
    if (!isSilent) put(state, "math_block", tex, begin + tex + end, true).map = [startLine, n + 1];
    state.line = n + 1;
    return true;
  }
  return false;
}

function put(state, type, tex, raw, isDisplay) {
  return Object.assign(state.push(type, "", 0), { content: tex, markup: raw, meta: { isDisplay } });
}

let library;
let loading;

function load() {
  const style = h("link", { rel: "stylesheet", href: new URL("./third_party/katex.min.css", import.meta.url).href });
  const styled = new Promise((done) => (style.onload = style.onerror = done));
  document.head.append(style);
  return Promise.all([import("./third_party/katex.min.js"), styled]).then(() => (library = self.katex));
}

/** The element of a formula's token: its source, until it is seen. `isGrowing`: there will soon be a longer text. */
export function formula({ content: tex, markup: raw, meta: { isDisplay } }, isGrowing) {
  const frame = isDisplay ? { class: "math display", tabindex: "0", role: "group", "aria-label": "Formula" } : { class: "math" };
  const element = h("span", frame, raw);
  if (isGrowing && library) paint(element, tex, isDisplay);
  else whenSeen(element, async () => {
    await (loading ??= load());
    paint(element, tex, isDisplay);
  });
  return element;
}

/** Draws a formula; one that is wrong stays as it was written. */
function paint(element, tex, isDisplay) {
  try {
    const options = { displayMode: isDisplay, strict: "ignore", trust: false, errorColor: "var(--danger)", maxExpand: 500, maxSize: 30 };
    element.replaceChildren(byScript(library.__renderToDomTree(tex, options)).toNode());
  } catch (error) {
    element.title = error.message;
  }
}

/** Makes parts of a formula set their styles by script: the page's policy allows no attribute of this name. */
function byScript(part) {
  const style = part.attributes?.style;
  if (style) {
    delete part.attributes.style;
    const make = part.toNode;
    part.toNode = () => {
      const node = make.call(part);
      node.style.cssText = style;
      return node;
    };
  }
  part.children?.forEach(byScript);
  return part;
}
