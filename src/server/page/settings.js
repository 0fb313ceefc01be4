// The system prompt and the sampling settings: those of all conversations, or a conversation's own.
// What is left empty is the server's default, which the placeholder names.

import { $, h, saved } from "./dom.js";

const STORE = "moeba-settings";

/** Name, label, least and largest value, whether it is whole: the server's own bounds. */
const NUMBERS = [
  ["temperature", "Temperature", 0, 1e6, false],
  ["top_p", "Top p", 0, 1, false],
  ["top_k", "Top k", -2147483648, 2147483647, true],
  ["min_p", "Min p", 0, 1, false],
  ["repeat_penalty", "Repeat penalty", 1e-6, 1e6, false],
  ["presence_penalty", "Presence penalty", -2, 2, false],
  ["max_tokens", "Most tokens", -9007199254740991, 9007199254740991, true],
  ["seed", "Seed", -9007199254740991, 9007199254740991, true],
];
const EFFORTS = ["", "none", "low", "medium", "high"];

const fields = {};
const labels = {};
let contextLength = Infinity;
/** Follows what is set and how many fields are wrong; keeps what is a conversation's own. */
let on = { changed() {}, keep() {} };
const isOwn = h("input", { type: "checkbox", id: "set-own" });

/** Tokens of the server's context. */
export const context = () => contextLength;

/** What is wrong with a number: the sentence, or nothing. */
function wrongNumber([name, , least, most, isWhole]) {
  const { value, validity } = fields[name];
  if (value === "" && !validity.badInput) return "";
  // The server computes with 32 bits.
  const number = isWhole ? Number(value) : Math.fround(Number(value));
  const fits = number >= Math.fround(least) && number <= most && (!isWhole || Number.isSafeInteger(number));
  const range = most === Number.MAX_SAFE_INTEGER ? "" : ` from ${least} to ${most}`;
  return fits && !validity.badInput ? "" : `expected ${isWhole ? "a whole number" : "a number"}${range}`;
}

function wrongTools() {
  try {
    return !fields.tools.value.trim() || Array.isArray(JSON.parse(fields.tools.value)) ? "" : "expected a JSON array";
  } catch (error) {
    return `expected a JSON array: ${error.message}`;
  }
}

/** Marks a field, and says below it what is wrong. */
function mark(name, wrong) {
  const field = fields[name];
  if (wrong) field.setAttribute("aria-invalid", "true");
  else field.removeAttribute("aria-invalid");
  const place = $(`wrong-${name}`);
  place.textContent = wrong;
  place.hidden = !wrong;
}

/** Marks what is wrong; all of it as [name, sentence]. */
function faults() {
  const all = [...NUMBERS.map((row) => [row[0], wrongNumber(row)]), ["tools", wrongTools()]];
  for (const [name, wrong] of all) mark(name, wrong);
  return all.filter(([, wrong]) => wrong);
}

/** Shows a field that is wrong; the sentence for the status line. */
function point(name, wrong) {
  $("settings").open = true;
  fields[name].focus();
  return `Settings, ${labels[name]}: ${wrong}.`;
}

/** The first thing that is wrong, which is shown; nothing if all can be sent. */
export function check() {
  const [first] = faults();
  return first ? point(...first) : "";
}

/** Marks the setting that the server refuses. */
export function blame({ param, message }) {
  const name = /^\w+/.exec(param ?? "")?.[0];
  if (!Object.hasOwn(fields, name)) return;
  mark(name, message);
  point(name, message);
}

/** The settings as they are saved with an answer: nothing that is empty or wrong. */
export function current() {
  const settings = {};
  const system = fields.system.value.trim();
  if (system) settings.system = fields.system.value;
  for (const row of NUMBERS) {
    const { value } = fields[row[0]];
    if (value !== "" && !wrongNumber(row)) settings[row[0]] = Number(value);
  }
  if (fields.effort.value) settings.reasoning_effort = fields.effort.value;
  if (fields.tools.value.trim() && !wrongTools()) settings.tools = JSON.parse(fields.tools.value);
  return settings;
}

/** The seed of the next answer: the one that is set, or a random one, as -1 is. */
export const nextSeed = ({ seed = -1 }) => (seed === -1 ? crypto.getRandomValues(new Uint32Array(1))[0] : seed);

/**
 * Makes the fields. `hooks`: `changed(sentence)` follows what is set; `keep(own)` keeps the settings
 * that are the conversation's own, `undefined` if it has none.
 */
export function build(hooks) {
  on = hooks;
  const field = (name, label, element) => {
    fields[name] = element;
    labels[name] = label.split(" (")[0];
    element.id = `set-${name}`;
    element.addEventListener("input", () => {
      store();
      tell();
    });
    element.setAttribute("aria-describedby", `wrong-${name}`);
    return h("div", {}, h("label", { htmlFor: element.id }, label), element,
      h("p", { class: "error", id: `wrong-${name}`, hidden: true }));
  };
  const numbers = NUMBERS.map(([name, label, , , isWhole]) =>
    field(name, label, h("input", { type: "number", step: isWhole ? 1 : "any", inputMode: "decimal" })));
  const options = EFFORTS.map((effort) => h("option", { value: effort }, effort || "default"));
  isOwn.addEventListener("change", () => {
    if (isOwn.checked) store();
    else on.keep(undefined);
    show(isOwn.checked ? values() : undefined);
  });
  $("settings-fields").append(
    h("label", { class: "own" }, isOwn, " Only for this chat"),
    field("system", "System prompt", h("textarea", { rows: 2 })),
    h("div", { class: "fields" }, numbers, field("effort", "Reasoning", h("select", {}, options))),
    field("tools", "Tools (a JSON array in OpenAI's format)", h("textarea", { rows: 2 })));
}

/** Shows the settings of a conversation: its own, or those of all. The field `typed` stays as it is. */
export function show(own, typed) {
  const shown = own ?? load();
  isOwn.checked = Boolean(own);
  for (const [name, field] of Object.entries(fields)) {
    const value = shown[name] ?? "";
    if (field.value !== value && field !== typed) field.value = value;
  }
  tell();
}

/** Says what is set, beside the title of the fields. */
function tell() {
  const { system, ...set } = current();
  const n = Object.keys(set).length;
  const nWrong = faults().length;
  const parts = [system && "system prompt", n && `${n} set`, nWrong && `${nWrong} wrong`].filter(Boolean);
  on.changed(`${isOwn.checked ? "only for this chat" : "for all chats"}: ${parts.join(", ") || "the server's defaults"}`);
}

/** Names the server's defaults in the empty fields. */
export function showDefaults(props) {
  contextLength = props.default_generation_settings?.n_ctx ?? Infinity;
  // Those of a model that is not loaded are not known.
  for (const [name] of NUMBERS) fields[name].placeholder = "";
  const defaults = props.default_generation_settings?.params ?? {};
  for (const [name, value] of Object.entries({ ...defaults, max_tokens: defaults.n_predict, seed: "random" })) {
    if (NUMBERS.some(([known]) => known === name)) {
      fields[name].placeholder = typeof value === "number" ? String(+value.toFixed(4)) : value;
    }
  }
}

function load() {
  try {
    return JSON.parse(saved("localStorage", STORE)) ?? {};
  } catch {
    return {};
  }
}

/** What is in the fields that are not empty. */
function values() {
  const all = Object.entries(fields).map(([name, field]) => [name, field.value]);
  return Object.fromEntries(all.filter(([, value]) => value !== ""));
}

function store() {
  if (isOwn.checked) on.keep(values());
  else saved("localStorage", STORE, JSON.stringify(values()));
}
