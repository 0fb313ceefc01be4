// The models of a server that has several: which one a chat speaks to, and how far its load is.

import { get, loading } from "./api.js";
import { $, h, saved } from "./dom.js";

const STORE = "moeba-model";
/** The time between two looks at a load, in ms. */
const PAUSE = 500;

/** Names of all models; none where there is one, whose name no request needs. */
let names = [];
/** The model of requests without a name, as far as it is known. */
let usual;
/** The model that the chat wants that is shown. */
let wanted;
/** Whether the model that is shown was not loaded when it was looked at. */
let isAsleep = false;
/** `picked(name)`: the reader has chosen; `shown()`: another model is shown, or it is loaded now. */
let on = { picked() {}, shown() {} };

/** The model that is chosen; nothing where there is one. */
export const current = () => (names.length ? $("models").value : undefined);

/** The end of the paths that look at the chosen model. */
export const query = () => (current() ? `?model=${encodeURIComponent(current())}` : "");

/** Takes in what the server says of the model that is shown. */
export const note = (props) => { isAsleep = Boolean(props.is_sleeping); };

export function build(hooks) {
  on = hooks;
  $("models").addEventListener("change", () => {
    wanted = current();
    saved("localStorage", STORE, wanted);
    on.picked(wanted);
    on.shown();
  });
}

/** Asks which models there are. A model has an entry for each of its names; the first is its own. */
export async function look() {
  const { data } = await get("v1/models");
  const own = data.filter(({ id }, i) => !data.slice(0, i).some(({ aliases = [] }) => aliases.includes(id)));
  names = own.length > 1 ? own.map(({ id }) => id) : [];
  usual = (own.find(({ status }) => status?.value === "loaded") ?? own[0])?.id;
  $("models").replaceChildren(...names.map((name) => h("option", { value: name }, name)));
  $("models").hidden = !names.length;
  $("model").hidden = Boolean(names.length);
  choose();
}

function choose() {
  const name = [wanted, saved("localStorage", STORE), usual].find((one) => names.includes(one));
  if (name) $("models").value = name;
}

/** Shows the model of a chat; one that has none yet, or whose model is gone, has the last chosen one. */
export function show(model) {
  const before = current();
  wanted = model;
  choose();
  if (current() !== before) on.shown();
}

/** Says how far the load of a model is that an answer waits for, until `end` is called. */
export function watch(name, signal, say) {
  const stop = new AbortController();
  let hasWaited = false;
  const end = () => {
    if (stop.signal.aborted) return;
    stop.abort();
    if (hasWaited && !signal.aborted) say("Waiting for the model.");
    if (isAsleep) on.shown();
  };
  const look = async () => {
    const path = `health?model=${encodeURIComponent(name)}`;
    const response = await fetch(path, { cache: "no-store", signal: stop.signal });
    const now = response.status === 503 ? await response.json() : {};
    if (!now.phase || stop.signal.aborted) return;
    hasWaited = true;
    say(`Loading ${name}, ${loading(now)}.`);
  };
  const follow = async () => {
    while (!stop.signal.aborted && !signal.aborted) {
      await look().catch(() => {});
      await new Promise((done) => setTimeout(done, PAUSE));
    }
  };
  if (name) follow();
  return { end };
}
