// Conversations as files.

import { save } from "./dom.js";
import { contentOf, path, restore } from "./tree.js";

const fileName = (chat) => chat.title.replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "").slice(0, 40) || "chat";

/** All versions of all messages. */
export function asJson(chat) {
  save(`${fileName(chat)}.json`, "application/json", JSON.stringify(chat, null, 1));
}

/** The messages that are shown. */
export function asMarkdown(chat) {
  const names = { user: "You", assistant: "Model", tool: "Tool" };
  const parts = [`# ${chat.title}`];
  for (const node of path(chat)) {
    parts.push(`## ${names[node.role]}`);
    if (node.reasoning) parts.push(node.reasoning.replace(/^/gm, "> "));
    if (contentOf(node)) parts.push(contentOf(node));
    for (const call of node.calls ?? []) parts.push(`\`${call.name}(${call.arguments})\``);
  }
  save(`${fileName(chat)}.md`, "text/markdown", `${parts.join("\n\n")}\n`);
}

/** The conversation of a file that `asJson` has made. */
export const fromFile = async (file) => restore(JSON.parse(await file.text()));
