// Text files that go with the next message: chosen, dropped or pasted.

import { $, bytes, h, sizeOf } from "./dom.js";

/** The largest file, in bytes. */
const MOST = 512 << 10;

let files = [];
let tell = () => {};

/** Prepares the ways in; `say` shows a sentence. */
export function build(say) {
  tell = say;
  $("attach").title = `Attach text files, each up to ${bytes(MOST)}; they can also be dropped and pasted`;
  $("attach").addEventListener("click", () => $("attach-file").click());
  $("attach-file").addEventListener("change", async ({ target }) => {
    await add(target.files);
    target.value = "";
    $("prompt").focus();
  });
  $("prompt").addEventListener("paste", (event) => {
    if (!event.clipboardData.files.length) return;
    event.preventDefault();
    add(event.clipboardData.files);
  });
  const hasFiles = (event) => event.dataTransfer?.types.includes("Files");
  const mark = (isOver) => document.body.classList.toggle("dropping", isOver);
  document.addEventListener("dragover", (event) => {
    if (!hasFiles(event)) return;
    event.preventDefault();
    mark(true);
  });
  document.addEventListener("dragleave", (event) => { if (!event.relatedTarget) mark(false); });
  document.addEventListener("drop", (event) => {
    if (!hasFiles(event)) return;
    event.preventDefault();
    mark(false);
    add(event.dataTransfer.files);
  });
}

/** What is attached: `{ name, text }` each. */
export const attached = () => files;

export function clear() {
  files = [];
  draw();
}

/** Attaches files; says of which that is not possible. */
async function add(given) {
  const refused = [];
  for (const file of [...given]) {
    try {
      files.push({ name: file.name, text: await textOf(file) });
    } catch (error) {
      refused.push(error.message);
    }
  }
  draw();
  tell(refused.join(" "));
}

async function textOf(file) {
  if (file.size > MOST) throw new Error(`${file.name} has ${bytes(file.size)}: a file may have ${bytes(MOST)}.`);
  const read = await file.arrayBuffer().catch(() => {
    throw new Error(`${file.name} cannot be read.`);
  });
  try {
    const text = new TextDecoder("utf-8", { fatal: true }).decode(read);
    if (!text.includes("\0")) return text;
  } catch {
    // Bytes that are no UTF-8.
  }
  throw new Error(`${file.name} is not a text: pictures, PDFs and other such files cannot be attached.`);
}

function draw() {
  const remove = (file) => {
    files = files.filter((other) => other !== file);
    draw();
    $("prompt").focus();
  };
  $("attached").hidden = !files.length;
  $("attached").replaceChildren(...files.map((file) => h("li", {}, h("span", {}, file.name), h("span", { class: "dim" }, sizeOf(file.text)),
    h("button", { type: "button", class: "small", "aria-label": `Remove ${file.name}`, onclick: () => remove(file) }, "×"))));
}
