// One message on the page.

import { bytes, copyButton, count, h, short, sizeOf } from "./dom.js";
import { Markdown } from "./markdown.js";
import { contentOf } from "./tree.js";

const NAMES = { user: "You", assistant: "Model", tool: "Tool result" };

/** The element of a message. `actions`: what its buttons do, by name. */
export class MessageView {
  constructor(node, actions) {
    this.node = node;
    this.actions = actions;
    this.head = h("div", { class: "head" });
    this.body = h("div", { class: node.role === "assistant" ? "body md" : "body plain" });
    this.markdown = new Markdown(this.body);
    this.reasoning = h("div");
    this.summary = h("summary", {}, "Reasoning");
    this.fold = h("details", { class: "reasoning", hidden: true }, this.summary, this.reasoning);
    const files = (node.files ?? []).map(({ name, text }) => h("details", { class: "file" },
      h("summary", {}, `${name}, ${sizeOf(text)}`), h("pre", { tabindex: "0", role: "group", "aria-label": name }, text)));
    this.calls = h("div");
    this.progress = h("div", { class: "prefill", hidden: true });
    this.meta = h("p", { class: "meta", hidden: true });
    this.replay = h("p", { class: "replay", role: "status", hidden: true });
    this.error = h("p", { class: "error", role: "alert", hidden: true });
    this.element = h("article", { class: `message ${node.role}`, "aria-label": NAMES[node.role], "data-id": node.id },
      this.head, this.fold, this.progress, ...files, this.body, this.calls, this.error, this.meta, this.replay);
  }

  /**
   * The line above a message. `versions`: those of the message, itself among them; `isWriting`: it
   * is being written; `isLast`: nothing follows it or has to.
   */
  showHead(versions, isWriting, isLast) {
    this.element.classList.toggle("writing", isWriting);
    this.isWriting = isWriting;
    const shown = JSON.stringify([versions.map((one) => one.id), isWriting, isLast, this.isCut(isLast)]);
    if (shown === this.shownHead) return;
    this.shownHead = shown;
    const { actions } = this;
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
    const { role, settings } = this.node;
    const isAnswer = role === "assistant";
    this.head.replaceChildren(
      h("strong", {}, NAMES[role]), branch || "",
      h("span", { class: "actions" },
        this.isCut(isLast) && button("continue", "Continue answer", actions.proceed),
        !isAnswer && isLast && button("answer", "Answer message", actions.answer),
        !isWriting && button("edit", "Edit message", actions.edit),
        copyButton({ "data-action": "copy", title: "Copy message" }, () => contentOf(this.node)),
        isAnswer && !isWriting && button("regenerate", "Regenerate answer", actions.regenerate),
        isAnswer && !isWriting && settings && button("replay", "Replay with the same seed", actions.replay)));
  }

  /** Whether this is the beginning of an answer that can go on. */
  isCut(isLast) {
    const { role, text, calls, writing, stopped, error, finish } = this.node;
    const isCut = writing || stopped || error || finish === "length";
    return Boolean(role === "assistant" && isLast && !this.isWriting && text && !calls?.length && isCut);
  }

  /** Shows what has come by now. */
  update(node, progress) {
    const { text, reasoning, calls, error, stopped, writing, finish, isFull } = node;
    const parts = [text.length, reasoning?.length, calls, error, stopped, writing, finish, isFull];
    const shown = JSON.stringify([parts, this.isWriting, progress]);
    if (shown === this.shown) return;
    this.shown = shown;
    this.node = node;
    if (node.role === "assistant") this.markdown.update(node.text);
    else this.body.textContent = node.text;
    this.body.classList.toggle("empty-body", !node.text);
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
    this.meta.textContent = figures(node, this.isWriting);
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
function figures({ role, model, settings, timings, usage, moeba, stopped, writing, isFull, finish }, isWriting) {
  if (role !== "assistant") return "";
  const parts = model ? [model] : [];
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
  else if (writing && !isWriting) parts.push("cut off: the page was closed or loaded again");
  else if (isFull) parts.push("cut: the context is full");
  else if (finish === "length") parts.push("cut by its length");
  return parts.join(" · ");
}
