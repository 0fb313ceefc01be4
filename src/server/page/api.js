// Requests to the server that the page came from, with the key of this tab.

import { count, saved } from "./dom.js";

const KEY = "moeba-key";

export const key = () => saved("sessionStorage", KEY);
export const setKey = (value) => saved("sessionStorage", KEY, value);

/** An answer of the server that is an error; status 0: there is no answer. */
export class ServerError extends Error {
  constructor(status, message, details) {
    super(message);
    this.status = status;
    this.param = details?.param;
  }
}

/** How far a load is, and the work that it waits for, as the server says it. */
export const loading = ({ progress = 0, phase }) => `${(100 * progress).toFixed(0)} %${phase ? `: ${phase}` : ""}`;

/** An error as the server says it, in a sentence for people. */
function serverError(status, said, used) {
  if (status === 401) return new ServerError(status, used ? "That key was refused." : "The server asks for a key.");
  if (said?.code === "context_length_exceeded") {
    const { n_prompt_tokens: n, n_ctx: most } = said;
    const error = new ServerError(status, `The message is too long for the model's context: it has ${count(n)} tokens, ` +
      `and ${count(most)} fit. Shorten it, or start the server with a larger -c.`);
    return Object.assign(error, { fitting: most / n });
  }
  if (/^loading model$/i.test(said?.message ?? "")) return new ServerError(status, "The server is still loading the model.");
  return new ServerError(status, said?.message || `The server answers ${status}.`, said);
}

const lost = (message) => new ServerError(0, message);

/** Asks for a path below the page's own; an error if the answer is one. */
export async function ask(path, { body, signal } = {}) {
  const headers = {};
  const used = key();
  if (used) headers.Authorization = `Bearer ${used}`;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  const method = body === undefined ? "GET" : "POST";
  const options = { method, headers, body, signal, cache: "no-store" };
  const response = await fetch(path, options).catch((error) => {
    throw signal?.aborted ? error : lost("The server cannot be reached.");
  });
  if (response.ok) return response;
  let said;
  try {
    said = (await response.json()).error;
  } catch {
    // Not the server's own error, but a proxy's.
  }
  throw Object.assign(serverError(response.status, said, used), { key: used });
}

export const get = async (path) => (await ask(path)).json();

/** The events of a stream, as [name, data]. */
export async function* events(response) {
  const reader = response.body.getReader();
  const decoder = new TextDecoder();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read().catch(() => {
        throw lost("The connection to the server has broken off.");
      });
      if (done) return;
      const frames = (rest + decoder.decode(value, { stream: true })).split("\n\n");
      rest = frames.pop();
      for (const frame of frames) {
        let name = "message";
        const data = [];
        for (const line of frame.split("\n")) {
          if (line.startsWith("event: ")) name = line.slice(7);
          else if (line.startsWith("data: ")) data.push(line.slice(6));
        }
        if (data.length) yield [name, data.join("\n")];
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

/**
 * Streams the answer to a chat. `on` is told of `{ text, reasoning, calls, progress }` as they
 * grow. Returns all of it with its figures; `stopped` if `signal` has ended it.
 */
export async function complete(body, signal, on) {
  const answer = { text: "", reasoning: "", calls: [], finish: null, stopped: false };
  const full = { ...body, stream: true, stream_options: { include_usage: true }, return_progress: true };
  try {
    const response = await ask("v1/chat/completions", { body: JSON.stringify(full), signal });
    answer.hash = response.headers.get("x-moeba-request-hash");
    for await (const [, data] of events(response)) {
      if (data === "[DONE]") return answer;
      const chunk = JSON.parse(data);
      if (chunk.error) throw serverError(chunk.error.status ?? chunk.error.code, chunk.error);
      take(answer, chunk);
      if (on(answer) === false) return answer;
    }
    throw lost("The connection to the server has broken off.");
  } catch (error) {
    if (!signal.aborted) throw Object.assign(error, { answer });
    answer.stopped = true;
    return answer;
  }
}

/** Adds a chunk to an answer. */
function take(answer, chunk) {
  answer.fingerprint = chunk.system_fingerprint ?? answer.fingerprint;
  answer.progress = chunk.prompt_progress ?? answer.progress;
  answer.usage = chunk.usage ?? answer.usage;
  answer.timings = chunk.timings ?? answer.timings;
  answer.moeba = chunk.moeba ?? answer.moeba;
  const choice = chunk.choices?.[0];
  if (!choice) return;
  const delta = choice.delta ?? {};
  answer.text += delta.content ?? "";
  answer.reasoning += delta.reasoning_content ?? "";
  for (const { index, id, function: called } of delta.tool_calls ?? []) {
    const call = (answer.calls[index] ??= { id: "", name: "", arguments: "" });
    call.id += id ?? "";
    call.name += called?.name ?? "";
    call.arguments += called?.arguments ?? "";
  }
  answer.finish = choice.finish_reason ?? answer.finish;
}
