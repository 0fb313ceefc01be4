// Sends a request again, with its seed, and compares the bytes of both answers. The server names a
// request by a digest of its tokens, parameters and seed, and itself by a fingerprint of what else
// bits depend on: equal names and other bytes would be a fault of the server.

import { complete } from "./api.js";
import { before, wire } from "./tree.js";

/** The body of the request behind an answer; the same each time. */
export function requestOf(chat, answer) {
  const { system, ...parameters } = answer.settings;
  const messages = before(chat, answer).map(wire);
  if (system) messages.unshift({ role: "system", content: system });
  // The server continues what the assistant says last.
  if (answer.begun) messages.push(wire({ role: "assistant", ...answer.begun }));
  return { messages, model: answer.model, ...parameters };
}

/** All that an answer says, as bytes. */
function bytesOf({ text, reasoning, calls }) {
  return new TextEncoder().encode([reasoning, text, JSON.stringify(calls ?? [])].join("\u0000"));
}

async function digest(bytes) {
  // Browsers have it on secure pages only, this machine's among them.
  if (!crypto.subtle) return null;
  const hash = new Uint8Array(await crypto.subtle.digest("SHA-256", bytes));
  return Array.from(hash, (byte) => byte.toString(16).padStart(2, "0")).join("");
}

/**
 * Repeats an answer. Returns `{ same, text }`, the sentence that says what was found. An answer
 * that was cut is compared as far as it goes.
 */
export async function replay(chat, answer, signal, on) {
  const { begun } = answer;
  const was = {
    text: answer.text.slice(begun?.text.length ?? 0),
    reasoning: (answer.reasoning ?? "").slice(begun?.reasoning.length ?? 0),
    calls: answer.calls ?? [],
  };
  const isPart = Boolean(answer.stopped || answer.writing || answer.error);
  const isEnough = (now) =>
    now.text.length >= was.text.length && now.reasoning.length >= was.reasoning.length;
  const now = await complete(requestOf(chat, answer), signal, (part) => {
    on(part);
    return !(isPart && isEnough(part));
  });
  if (now.stopped) return { same: false, text: "The replay was stopped." };
  if (isPart) {
    now.text = now.text.slice(0, was.text.length);
    now.reasoning = now.reasoning.slice(0, was.reasoning.length);
    now.calls = was.calls;
  }
  const [first, second] = [bytesOf(was), bytesOf(now)];
  const at = first.findIndex((byte, i) => byte !== second[i]);
  const isSame = at < 0 && first.length === second.length;
  const sameRequest = !answer.hash || !now.hash || answer.hash === now.hash;
  const sameServer = !answer.fingerprint || answer.fingerprint === now.fingerprint;
  const sum = await digest(second);
  const names = [
    sum && `SHA-256 ${sum.slice(0, 16)}…`,
    now.hash && `request ${now.hash.slice(0, 16)}${sameRequest ? "" : ` (was ${answer.hash.slice(0, 16)})`}`,
    now.fingerprint && `server ${now.fingerprint}${sameServer ? "" : ` (was ${answer.fingerprint})`}`,
  ].filter(Boolean).join(", ");
  const what = isSame
    ? `Same seed, same bytes: all ${first.length} are equal.`
    : `The bytes differ from byte ${at < 0 ? Math.min(first.length, second.length) : at} on.`;
  const why = isSame || (sameRequest && sameServer) ? "" : " The request or the server is another one.";
  return { same: isSame, text: `${what}${why} ${names}` };
}
