// Conversations in the browser's own database. Without one (a private window) they last as long as
// the page.

const NAME = "conversations";

function open() {
  return new Promise((done, failed) => {
    const request = indexedDB.open("moeba", 1);
    request.onupgradeneeded = () => request.result.createObjectStore(NAME, { keyPath: "id" });
    request.onsuccess = () => done(request.result);
    request.onerror = () => failed(request.error);
  });
}

let database;
async function run(mode, work) {
  try {
    database ??= open();
    const store = (await database).transaction(NAME, mode).objectStore(NAME);
    const request = work(store);
    return await new Promise((done, failed) => {
      request.onsuccess = () => done(request.result);
      request.onerror = () => failed(request.error);
    });
  } catch {
    return undefined;
  }
}

/** All conversations, newest first. */
export async function load() {
  const all = (await run("readonly", (store) => store.getAll())) ?? [];
  return all.sort((a, b) => b.updated - a.updated);
}
export const put = (chat) => run("readwrite", (store) => store.put(chat));
export const remove = (id) => run("readwrite", (store) => store.delete(id));
