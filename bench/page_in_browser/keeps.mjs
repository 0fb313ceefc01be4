// What the page must not lose: messages, answers and chats, in two tabs and after a reload.
//
//     npm install playwright-core
//     node bench/page_in_browser/keeps.mjs [--moeba PATH] [--chromium PATH] [--port N] [--only WORD]
//
// Prints a line a check; ends with 1 if one fails.

import { setTimeout as sleep } from "node:timers/promises";

import {
  URL_OF_PAGE, act, begin, ends, must, open, run, says, send, setting, status, stop,
  stored, texts, titles, until,
} from "./browser.mjs";

/** Chats as the first version of the page has kept them; the connection stays open. */
const makeOld = (page) => page.evaluate(() => new Promise((done) => {
  const request = indexedDB.open("moeba", 1);
  request.onupgradeneeded = () => request.result.createObjectStore("conversations", { keyPath: "id" });
  request.onsuccess = () => {
    const nodes = {
      q: { id: "q", parent: "root", role: "user", text: "an old question" },
      a1: { id: "a1", parent: "q", role: "assistant", text: "first answer", reasoning: "", calls: [] },
      a2: { id: "a2", parent: "q", role: "assistant", text: "second answer", reasoning: "", calls: [] },
    };
    const put = request.result.transaction("conversations", "readwrite").objectStore("conversations")
      .put({ id: "c", title: "old chat", updated: 5, nodes, chosen: { root: "q", q: "a1" } });
    put.onsuccess = () => { self.base = request.result; done(); };
  };
}));

await run({
  async "a deleted chat stays deleted, also while it is written"(context) {
    const page = await open(context);
    await begin(page, "delete me");
    await page.click('[aria-label="Delete delete me"]');
    await sleep(1500);
    must((await stored(page)).length === 0, "messages are kept");
    await page.reload();
    await sleep(500);
    must(!(await titles(page)).includes("delete me"), "it has come back");
  },
  async "a chat that one tab deletes while another writes it is gone in both"(context) {
    const page = await open(context);
    await begin(page, "delete there");
    const other = await open(context);
    await other.click('[aria-label="Delete delete there"]');
    await until("it is gone", async () => !(await titles(page)).includes("delete there"));
    await sleep(2500);
    must((await stored(page)).length === 0, "messages are kept");
  },
  async "two tabs lose nothing and hear each other"(context) {
    const page = await open(context);
    await begin(page, "zero");
    await ends(page);
    const other = await open(context);
    await Promise.all([send(page, "from one"), send(other, "from two")]);
    await Promise.all([ends(page), ends(other)]);
    const kept = await stored(page);
    must(kept.filter((node) => node.role === "user").length === 3, "a question is missing");
    must(kept.filter((node) => node.role === "assistant" && node.text && !node.writing).length === 3, "an answer is missing");
    await send(page, "third");
    await until("the other tab hears it", async () => (await stored(other)).some((node) => node.text === "third"));
  },
  async "a tab sees what another writes, and answers after it"(context) {
    const page = await open(context);
    const other = await open(context);
    await begin(page, "tell a long story");
    await until("the other tab lists it", async () => (await titles(other)).includes("tell a long story"));
    await other.click("text=tell a long story");
    await until("it grows there", async () => (await texts(other, "assistant"))[0]?.length > 40);
    await send(other, "and then?");
    await says(other, "Waiting for the answer that another tab writes.");
    await until("both are answered", async () => (await texts(page, "assistant")).length === 2, 20000);
    await ends(other);
    must((await texts(page, "user")).join() === "tell a long story,and then?", await texts(page, "user"));
  },
  async "a reload in an answer keeps what was written, and it can be continued"(context) {
    const page = await open(context);
    await begin(page, "go on");
    await sleep(1500);
    await page.reload();
    await until("a part is there", async () => (await texts(page, "assistant"))[0]?.length > 40);
    await until("Continue is there", () => page.$('[data-action="continue"]'), 8000);
    const part = (await texts(page, "assistant"))[0];
    await act(page, "continue");
    await says(page, "The model is writing");
    await ends(page);
    const whole = (await stored(page)).find((node) => node.begun);
    must(whole.text.startsWith(whole.begun.text) && whole.text.length > whole.begun.text.length, "it does not go on");
    must(part.length > 40, part);
    await act(page, "replay");
    await until("the replay has a verdict", async () => (await page.textContent(".replay.same")).includes("same bytes"));
  },
  async "a question without an answer can be answered"(context) {
    const page = await open(context);
    await setting(page, "temperature", "0.5");
    await begin(page, "one");
    await page.keyboard.press("Escape");
    await says(page, "Stopped.");
    await page.evaluate(() => new Promise((done) => {
      indexedDB.open("moeba").onsuccess = ({ target: { result: base } }) => {
        const store = base.transaction("messages", "readwrite").objectStore("messages");
        store.getAll().onsuccess = ({ target }) => {
          for (const node of target.result) if (node.role === "assistant") store.delete([node.chat, node.id]);
          store.transaction.oncomplete = () => { base.close(); done(); };
        };
      };
    }));
    await page.reload();
    await page.click('[data-action="answer"]');
    await ends(page);
  },
  async "another chat does not stop the one that writes"(context) {
    const page = await open(context);
    await begin(page, "first chat");
    await page.click("#new");
    must((await status(page)) === "" && await page.isVisible("#send"), "the new chat says it is busy");
    await begin(page, "second chat");
    await page.click("text=first chat");
    await ends(page);
    must((await texts(page, "assistant"))[0].length > 80, "the first answer is short");
    await page.click("text=second chat");
    await ends(page);
    must((await stored(page)).every((node) => !node.stopped && !node.writing), "one was stopped");
  },
  async "chats of the first version are moved"(context) {
    const holder = await context.newPage();
    await holder.goto(`${URL_OF_PAGE}page/icon.svg`);
    await makeOld(holder);
    const page = await open(context);
    await until("it says what to do", async () => (await page.textContent("#trouble")).includes("Reload the other tabs"));
    await send(page, "meanwhile");
    await ends(page);
    await holder.close();
    await until("the old chat is listed", async () => (await titles(page)).includes("old chat"));
    must((await titles(page)).includes("meanwhile"), "the new chat is lost");
    await page.click("text=old chat");
    must((await texts(page, "assistant")).join() === "first answer", await texts(page, "assistant"));
    await page.click('[data-action="next"]');
    must((await texts(page, "assistant")).join() === "second answer", "the versions are not in order");
    await page.reload();
    await until("all are kept", async () => (await titles(page)).sort().join() === "meanwhile,old chat");
  },
  async "what is imported or typed outlives a reload"(context) {
    const page = await open(context);
    const nodes = { u: { parent: "root", role: "user", text: "hello" } };
    const file = { name: "c.json", mimeType: "application/json", buffer: Buffer.from(JSON.stringify({ title: "imported", nodes, chosen: { root: "u" } })) };
    await page.setInputFiles("#import-file", file);
    await page.fill("#prompt", "a draft");
    await until("it is kept", async () => (await stored(page)).length === 1);
    await page.reload();
    await until("it is listed", async () => (await titles(page)).includes("imported"));
    must((await page.inputValue("#prompt")) === "a draft", "the draft is lost");
  },
});
