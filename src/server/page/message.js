// One message on the page.

import { bytes, count, h, short } from "./dom.js";
import { Markdown } from "./markdown.js";

const NAMES = { user: "You", assistant: "Model", tool: "Tool result" };

/**
 * The element of a message. `actions`: what its buttons do, by name; `versions`: those of the
 * message, itself among them.
 */
export class MessageView {
  constructor(node, versions, actions) {
    this.node = node;
    this.body = h("div", { class: node.role === "assistant" ? "body md" : "body plain" });
    this.markdown = new Markdown(this.body);
    this.reasoning = h("div");
    this.summary = h("summary", {}, "Reasoning");
    this.fold = h("details", { class: "reasoning", hidden: true }, this.summary, this.reasoning);
    this.calls = h("div");
    this.progress = h("div", { class: "prefill", hidden: true });
    this.meta = h("p", { class: "meta", hidden: true });
    this.replay = h("p", { class: "replay", role: "status", hidden: true });
    this.error = h("p", { class: "error", role: "alert", hidden: true });
    this.element = h("article", { class: `message ${node.role}`, "aria-label": NAMES[node.role], "data-id": node.id },
      this.head(versions, actions), this.fold, this.progress, this.body, this.calls, this.error, this.meta, this.replay);
    this.update(node);
  }

  head(versions, actions) {
    const button = (name, label, run) =>
      h("button", { type: "button", class: "small", "data-action": name, "aria-label": label, onclick: run },
        label.split(" ")[0]);
    const at = versions.indexOf(this.node);
    const step = (by, label, sign) => h("button", {
      type: "button", class: "small", "aria-label": label, "data-action": label.split(" ")[0].toLowerCase(),
      disabled: !versions[at + by], onclick: () => actions.choose(versions[at + by]),
    }, sign);
    const branch = versions.length > 1 && h("span", { class: "branch" },
      step(-1, "Previous version", "‹"), ` ${at + 1}/${versions.length} `, step(1, "Next version", "›"));
    const { role } = this.node;
    return h("div", { class: "head" },
      h("strong", {}, NAMES[role]), branch || null,
      h("span", { class: "actions" },
        button("edit", "Edit message", actions.edit),
        button("copy", "Copy message", () => navigator.clipboard?.writeText(this.node.text)),
        role === "assistant" && button("regenerate", "Regenerate answer", actions.regenerate),
        role === "assistant" && this.node.settings && button("replay", "Replay with the same seed", actions.replay)));
  }

  /** Shows what has come by now. */
  update(node, progress) {
    this.node = node;
    if (node.role === "assistant") this.markdown.update(node.text);
    else this.body.textContent = node.text;
    this.fold.hidden = !node.reasoning;
    if (node.reasoning && this.reasoning.textContent.length !== node.reasoning.length) {
      this.reasoning.textContent = node.reasoning;
      this.summary.textContent = `Reasoning, ${count(node.reasoning.trim().split(/\s+/).length)} words`;
    }
    this.showCalls(node.calls ?? []);
    const isFilling = progress && !node.text && !node.reasoning && !node.calls?.length;
    this.progress.hidden = !isFilling;
    if (isFilling) this.showProgress(progress);
    this.error.hidden = !node.error;
    this.error.textContent = node.error ?? "";
    this.meta.textContent = figures(node);
    this.meta.hidden = !this.meta.textContent;
  }

  showProgress({ total, processed, cache, time_ms: ms }) {
    const rate = ms > 0 && processed > cache ? `, ${short((1000 * (processed - cache)) / ms)} tokens/s` : "";
    const text = `Prompt: ${count(processed)} of ${count(total)} tokens, ${count(cache)} from the cache${rate}`;
    this.progress.replaceChildren(h("progress", { max: total || 1, value: processed, "aria-label": "Prompt" }), text);
  }

  showCalls(calls) {
    const known = this.calls.children;
    calls.forEach((call, i) => {
      if (!known[i]) {
        this.calls.append(h("details", { class: "call", open: true }, h("summary"), h("pre", { tabindex: "0" })));
      }
      const [summary, pre] = known[i].children;
      summary.textContent = `Call of ${call.name}`;
      pre.textContent = pretty(call.arguments);
    });
  }

  /** Says what a replay does or has found. */
  showReplay(text, same) {
    this.replay.hidden = false;
    this.replay.textContent = text;
    this.replay.className = same === undefined ? "replay" : `replay ${same ? "same" : "other"}`;
  }
}

function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

/** The line below an answer. */
function figures({ role, settings, timings, usage, moeba, stopped, finish }) {
  if (role !== "assistant") return "";
  const parts = [];
  const seed = moeba?.seed ?? settings?.seed;
  if (seed !== undefined) parts.push(`seed ${seed}`);
  if (usage) {
    const cached = usage.prompt_tokens_details?.cached_tokens;
    parts.push(`prompt ${count(usage.prompt_tokens)}${cached ? ` (${count(cached)} cached)` : ""}`);
    parts.push(`answer ${count(usage.completion_tokens)} tokens`);
  }
  if (timings?.predicted_per_second) parts.push(`${short(timings.predicted_per_second)} tokens/s`);
  const experts = moeba?.experts;
  if (experts && experts.hits + experts.misses > 0) {
    parts.push(`${((100 * experts.hits) / (experts.hits + experts.misses)).toFixed(0)} % of experts in memory`);
    parts.push(`${bytes(experts.read_bytes)} read`);
  }
  if (stopped) parts.push("stopped");
  else if (finish === "length") parts.push("cut by its length");
  return parts.join(" · ");
}
