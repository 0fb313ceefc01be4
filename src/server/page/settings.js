// The system prompt and the sampling settings. What is left empty is the server's default, which
// the placeholder names.

import { $, h } from "./dom.js";

const STORE = "moeba-settings";

/** Name, label, step, least and largest value. */
const NUMBERS = [
  ["temperature", "Temperature", 0.05, 0, 100],
  ["top_p", "Top p", 0.01, 0, 1],
  ["top_k", "Top k", 1, 0, 100000],
  ["min_p", "Min p", 0.01, 0, 1],
  ["repeat_penalty", "Repeat penalty", 0.01, 0.01, 10],
  ["presence_penalty", "Presence penalty", 0.1, -2, 2],
  ["max_tokens", "Most tokens", 1, -1, 1000000],
  ["seed", "Seed", 1, 0, 4294967295],
];
const EFFORTS = ["", "none", "low", "medium", "high"];

const fields = {};

/** The settings as they are saved with an answer: nothing that is empty. */
export function current() {
  const settings = {};
  const system = fields.system.value.trim();
  if (system) settings.system = fields.system.value;
  for (const [name] of NUMBERS) {
    const { value } = fields[name];
    if (value !== "" && fields[name].validity.valid) settings[name] = Number(value);
  }
  if (fields.effort.value) settings.reasoning_effort = fields.effort.value;
  const tools = readTools();
  if (tools) settings.tools = tools;
  return settings;
}

/** The seed of the next answer: the one that is set, or a random one. */
export const nextSeed = (settings) => settings.seed ?? crypto.getRandomValues(new Uint32Array(1))[0];

function readTools() {
  const text = fields.tools.value.trim();
  fields.tools.removeAttribute("aria-invalid");
  if (!text) return null;
  try {
    const tools = JSON.parse(text);
    if (Array.isArray(tools)) return tools;
  } catch {
    // Said below.
  }
  fields.tools.setAttribute("aria-invalid", "true");
  return null;
}

/** Makes the fields, with what was set the last time. `onchange` follows each change. */
export function build(onchange) {
  const saved = load();
  const field = (name, label, element) => {
    fields[name] = element;
    element.id = `set-${name}`;
    element.value = saved[name] ?? "";
    element.addEventListener("input", () => {
      store();
      onchange(current());
    });
    return h("div", {}, h("label", { htmlFor: element.id }, label), element);
  };
  const numbers = NUMBERS.map(([name, label, step, min, max]) =>
    field(name, label, h("input", { type: "number", step: step < 1 ? "any" : step, min, max, inputMode: "decimal" })));
  const options = EFFORTS.map((effort) => h("option", { value: effort }, effort || "default"));
  $("settings-fields").append(
    field("system", "System prompt", h("textarea", { rows: 2 })),
    h("div", { class: "fields" }, numbers, field("effort", "Reasoning", h("select", {}, options))),
    field("tools", "Tools (a JSON array in OpenAI's format)", h("textarea", { rows: 2 })));
  onchange(current());
}

/** Names the server's defaults in the empty fields. */
export function showDefaults(props) {
  const defaults = props.default_generation_settings?.params ?? {};
  for (const [name, value] of Object.entries({ ...defaults, max_tokens: defaults.n_predict, seed: "random" })) {
    if (NUMBERS.some(([known]) => known === name)) {
      fields[name].placeholder = typeof value === "number" ? String(+value.toFixed(4)) : value;
    }
  }
}

function load() {
  try {
    return JSON.parse(localStorage.getItem(STORE)) ?? {};
  } catch {
    return {};
  }
}

function store() {
  const values = Object.entries(fields).map(([name, field]) => [name, field.value]);
  localStorage.setItem(STORE, JSON.stringify(Object.fromEntries(values.filter(([, value]) => value !== ""))));
}
