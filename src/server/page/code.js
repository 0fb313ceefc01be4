// A block of code: above it its language and a button that copies it, and colours once it is seen.

import { copyButton, h, whenSeen } from "./dom.js";

/** Characters: longer code has no colours, and long code none while it grows. */
const MOST = 200_000;
const MOST_GROWING = 20_000;
/** Long code gets its colours when it has not changed for so long, in ms. */
const REST = 300;

let library;
let loading;
const load = () => (loading ??= import("./third_party/highlight.min.js").then((loaded) => (library = loaded.default)));

/** The element of a block. `info` stands behind its fence; `isGrowing`: there will soon be a longer one. */
export function code(text, info, isGrowing) {
  const language = /^[^\s,{]*/.exec(info)[0].slice(0, 30);
  const inner = h("code", {}, text);
  const block = h("div", { class: "code" },
    h("div", { class: "code-head" }, h("span", {}, language || "text"), copyButton({}, () => text)),
    h("pre", { tabindex: "0", role: "group", "aria-label": language ? `Code, ${language}` : "Code" }, inner));
  if (!language || text.length > MOST) return block;
  const isLong = text.length > MOST_GROWING;
  if (isGrowing && library && !isLong) paint(inner, text, language);
  else whenSeen(block, () => setTimeout(async () => {
    if (!inner.isConnected) return;
    await load();
    paint(inner, text, language);
  }, isLong ? REST : 0));
  return block;
}

/** Puts parts of code into elements whose classes name what they are. */
function paint(inner, text, language) {
  if (!library.getLanguage(language)) return;
  const { _emitter: found } = library.highlight(text, { language, ignoreIllegals: true });
  const open = [document.createDocumentFragment()];
  found.walk({
    openNode({ scope }) {
      const part = h("span", { class: scope && `hl-${scope.split(/[.:]/)[0]}` });
      open.at(-1).append(part);
      open.push(part);
    },
    addText: (part) => open.at(-1).append(part),
    closeNode: () => open.pop(),
  });
  inner.replaceChildren(open[0]);
}
