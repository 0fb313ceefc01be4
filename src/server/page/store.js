// Conversations in the browser's own database: a record for each message, so that two tabs do not
// overwrite each other's. Tabs tell each other what they have written. Without a database (a private
// window) conversations last as long as the page.

const CHATS = "chats";
const MESSAGES = "messages";
/** All conversations as one record each, before version 2. */
const OLD = "conversations";

let on = { heard() {}, removed() {}, trouble() {} };
/** Conversations that have, or had, a record: what was deleted is not made again. */
const known = new Set();
const tabs = "BroadcastChannel" in self ? new BroadcastChannel("moeba") : null;
const tell = (message) => tabs?.postMessage(message);

const messagesOf = (id) => IDBKeyRange.bound([id], [id, []]);

function upgrade({ oldVersion, target: { result: base, transaction } }) {
  const chats = base.createObjectStore(CHATS, { keyPath: "id" });
  const messages = base.createObjectStore(MESSAGES, { keyPath: ["chat", "id"] });
  if (oldVersion < 1) return;
  transaction.objectStore(OLD).getAll().onsuccess = ({ target }) => {
    for (const { nodes, ...chat } of target.result) {
      chats.put({ ...chat, chosen: chat.chosen ?? {} });
      Object.values(nodes ?? {}).forEach((node, made) => messages.put({ made, ...node, chat: chat.id }));
    }
    base.deleteObjectStore(OLD);
  };
}

function open() {
  return new Promise((done, failed) => {
    const request = indexedDB.open("moeba", 2);
    request.onupgradeneeded = upgrade;
    request.onblocked = () => on.trouble("Reload the other tabs of this page: they hold the chats in an older form.");
    request.onsuccess = () => {
      on.trouble("");
      request.result.onversionchange = () => {
        request.result.close();
        why = "Reload this tab: another one has a newer page.";
        on.trouble(why);
      };
      // Somebody has cleared what the browser keeps.
      request.result.onclose = () => (database = undefined);
      done(request.result);
    };
    request.onerror = () => failed(request.error);
  });
}

let database;
/** Why nothing is kept, if it is known. */
let why = "";

/** What `work` returns, once it is in the database; `undefined` if there is none. */
async function run(mode, work) {
  try {
    const base = await (database ??= open());
    const transaction = base.transaction([CHATS, MESSAGES], mode);
    let result;
    work(transaction.objectStore(CHATS), transaction.objectStore(MESSAGES), (value) => (result = value));
    return await new Promise((done, failed) => {
      transaction.oncomplete = () => done(result);
      transaction.onabort = () => failed(transaction.error);
    });
  } catch (error) {
    on.trouble(why || `This browser does not keep the chats: export what you need. ${error?.message ?? ""}`.trim());
    return undefined;
  }
}

const assemble = (chat, nodes) => {
  known.add(chat.id);
  nodes.sort((a, b) => a.made - b.made);
  return { ...chat, nodes: Object.fromEntries(nodes.map(({ chat: _, ...node }) => [node.id, node])) };
};

/**
 * All conversations, newest first. `hooks`: `heard(chat)` and `removed(id)` follow what other tabs
 * write; `trouble(sentence)` says why nothing is kept.
 */
export async function load(hooks) {
  on = hooks;
  const found = await run("readonly", (chats, messages, give) => {
    chats.getAll().onsuccess = ({ target: { result: all } }) => {
      messages.getAll().onsuccess = ({ target }) => give([all, target.result]);
    };
  });
  const [all, nodes] = found ?? [[], []];
  const of = Object.fromEntries(all.map(({ id }) => [id, []]));
  for (const node of nodes) of[node.chat]?.push(node);
  return all.map((chat) => assemble(chat, of[chat.id])).sort((a, b) => b.updated - a.updated);
}

tabs?.addEventListener("message", async ({ data: { changed, removed } }) => {
  if (removed) {
    known.add(removed);
    on.removed(removed);
  }
  if (!changed) return;
  const chat = await run("readonly", (chats, messages, give) => {
    chats.get(changed).onsuccess = ({ target: { result: found } }) => {
      messages.getAll(messagesOf(changed)).onsuccess = ({ target }) => found && give(assemble(found, target.result));
    };
  });
  if (chat) on.heard(chat);
});

/**
 * Writes messages of a conversation, and which of the versions behind `parents` are chosen. Nothing
 * if another tab has deleted it.
 */
export async function put({ nodes: all, ...chat }, nodes, parents = nodes.map((node) => node.parent)) {
  const isNew = !known.has(chat.id);
  const given = structuredClone(isNew ? Object.values(all) : nodes);
  const keys = isNew ? Object.keys(chat.chosen) : parents;
  const chosen = Object.fromEntries(keys.map((parent) => [parent, chat.chosen[parent]]));
  const is = await run("readwrite", (chats, messages, give) => {
    chats.get(chat.id).onsuccess = ({ target: { result: was } }) => {
      give(Boolean(was) || isNew);
      if (!was && !isNew) return;
      if (keys.length) chats.put({ ...chat, chosen: { ...was?.chosen, ...chosen } });
      for (const node of given) messages.put({ ...node, chat: chat.id });
    };
  });
  if (is) {
    known.add(chat.id);
    tell({ changed: chat.id });
  } else if (is === false) on.removed(chat.id);
}

/** Changes what is kept of a conversation beside its messages; nothing if it has no record. */
export async function change(id, fields) {
  const is = await run("readwrite", (chats, _, give) => {
    chats.get(id).onsuccess = ({ target: { result: was } }) => {
      give(Boolean(was));
      if (was) chats.put({ ...was, ...fields });
    };
  });
  if (is) tell({ changed: id });
}

export async function remove(id) {
  known.add(id);
  await run("readwrite", (chats, messages) => {
    chats.delete(id);
    messages.delete(messagesOf(id));
  });
  tell({ removed: id });
}
