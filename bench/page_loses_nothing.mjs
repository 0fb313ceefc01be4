// Tries the page in a browser: what it must not lose, and that it never goes dead.
//
//     npm install playwright-core
//     node bench/page_loses_nothing.mjs [--moeba PATH] [--chromium PATH] [--port N] [--only WORD]
//
// A proxy on this machine serves the page's files from the source tree, passes all else to a
// server of the demo model, and slows answers down, so that there is time to look at them. Prints
// a line a check; ends with 1 if one fails.

import { spawn } from "node:child_process";
import { existsSync, readFileSync } from "node:fs";
import http from "node:http";
import { createRequire } from "node:module";
import { setTimeout as sleep } from "node:timers/promises";
import { parseArgs } from "node:util";

const { values: flags } = parseArgs({ options: {
  moeba: { type: "string", default: "target/release/moeba" }, port: { type: "string", default: "19590" },
  chromium: { type: "string", default: "/usr/bin/chromium" }, only: { type: "string", default: "" },
} });
const { chromium } = createRequire(`${process.cwd()}/`)("playwright-core");
const root = new URL("..", import.meta.url).pathname;
const [PORT, BEHIND] = [Number(flags.port), Number(flags.port) + 1];
const URL_OF_PAGE = `http://127.0.0.1:${PORT}/`;
/** Milliseconds an event of an answer. */
let slow = 20;
let server;
/** Whether it runs, and without a key. */
let isPlain = false;

async function start(...more) {
  await stop();
  isPlain = more.length === 0;
  const args = ["serve", `${root}models/demo/moeba-demo.gguf`, "--port", BEHIND, "-c", "1200", "--parallel", "2", ...more];
  server = spawn(flags.moeba, args.map(String), { stdio: "ignore" });
  await until("the server answers", async () => (await fetch(`http://127.0.0.1:${BEHIND}/health`)).ok);
}

async function stop() {
  if (!server) return;
  isPlain = false;
  const gone = new Promise((done) => server.once("exit", done));
  server.kill("SIGKILL");
  await gone;
  // The server may have been faster than what is passed on.
  for (const response of passed) response.destroy();
  server = null;
}

const passed = new Set();

/** Passes events on, one after the other. */
async function pass(from, to) {
  let rest = "";
  for await (const part of from) {
    const frames = (rest + part).split("\n\n");
    rest = frames.pop();
    for (const frame of frames) {
      to.write(`${frame}\n\n`);
      await sleep(slow);
    }
  }
  to.end(rest);
}

const proxy = http.createServer((request, response) => {
  const { "accept-encoding": _, origin: __, host: ___, ...headers } = request.headers;
  const options = { port: BEHIND, path: request.url, method: request.method, headers };
  const behind = http.request(options, (answer) => {
    const file = `${root}src/server/page/${request.url === "/" ? "index.html" : request.url.replace("/page/", "")}`;
    const isFile = request.method === "GET" && (request.url === "/" || request.url.startsWith("/page/"));
    const { "content-length": _, ...headers } = answer.headers;
    response.writeHead(answer.statusCode, isFile ? headers : answer.headers);
    answer.on("error", () => response.destroy());
    if (isFile && existsSync(file)) response.end(readFileSync(file));
    else if (request.url.endsWith("/completions")) pass(answer, response).catch(() => response.destroy());
    else answer.pipe(response);
  });
  behind.on("error", () => response.destroy());
  response.on("close", () => behind.destroy());
  passed.add(response);
  response.on("close", () => passed.delete(response));
  request.pipe(behind);
});

async function until(what, holds, ms = 10000) {
  for (const end = Date.now() + ms; Date.now() < end; await sleep(50)) if (await Promise.resolve(holds()).catch(() => false)) return;
  throw new Error(`never: ${what}`);
}

const status = (page) => page.textContent("#status");
const says = (page, text) => until(`the status line says "${text}"`, async () => (await status(page)).includes(text));
const ends = (page) => until("the answer ends", async () => /complete|was cut/.test(await status(page)), 20000);
const texts = (page, role) => page.$$eval(`.message.${role} .body`, (all) => all.map((one) => one.textContent));
const titles = (page) => page.$$eval("#conversations .open", (all) => all.map((one) => one.textContent));
const act = (page, name) => page.locator(`[data-action="${name}"]`).last().click();
const must = (holds, what) => { if (!holds) throw new Error(what); };

async function open(context, url = URL_OF_PAGE) {
  const page = await context.newPage();
  page.on("dialog", (dialog) => dialog.accept());
  page.on("pageerror", (error) => { page.fault = error; });
  await page.goto(url);
  await page.waitForFunction(() => document.getElementById("model").textContent || document.querySelector("dialog[open]"));
  return page;
}

async function send(page, text) {
  await page.fill("#prompt", text);
  await page.press("#prompt", "Enter");
}

/** Seeds with which the demo model answers at length. */
const SEEDS = {
  "delete me": 8, "delete there": 10, "tell a long story": 8, "go on": 10, "before it dies": 4, "first chat": 7,
  "second chat": 4, one: 4, zero: 7,
};

/** Sends, and waits until a part of the answer can be seen. */
async function begin(page, text) {
  await setting(page, "seed", String(SEEDS[text] ?? ""));
  await send(page, text);
  await until("an answer grows", async () => (await texts(page, "assistant")).at(-1)?.length > 40);
}

async function setting(page, name, value) {
  await page.evaluate(() => { document.getElementById("settings").open = true; });
  await page.fill(`#set-${name}`, value);
  await page.evaluate(() => { document.getElementById("settings").open = false; });
}

const stored = (page) => page.evaluate(() => new Promise((done) => {
  indexedDB.open("moeba").onsuccess = ({ target: { result: base } }) => {
    base.transaction("messages").objectStore("messages").getAll().onsuccess = (event) => { base.close(); done(event.target.result); };
  };
}));

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

const checks = {
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
  async "a bad setting is named where it is"(context) {
    const page = await open(context);
    const bad = [["top_p", "1.5"], ["top_k", "0.5"], ["temperature", "-1"], ["repeat_penalty", "0"], ["presence_penalty", "3"], ["tools", "[{"], ["tools", "{}"]];
    for (const [name, value] of bad) {
      await setting(page, name, value);
      await send(page, "hello");
      await says(page, "Settings, ");
      must(await page.isVisible(`#wrong-${name}`), `${name} is not marked`);
      must((await page.inputValue("#prompt")) === "hello", "the text is gone");
      await setting(page, name, "");
    }
    await setting(page, "top_p", "1.5");
    await page.reload();
    await send(page, "hello");
    await says(page, "Top p: expected a number from 0 to 1");
    await setting(page, "top_p", "1");
    await setting(page, "tools", '[{"type":"function"}]');
    await send(page, "hello");
    await says(page, "has failed: tools");
    must(await page.isVisible("#wrong-tools"), "the tools are not marked");
    await setting(page, "tools", "");
    for (const [name, value] of [["top_k", "-1"], ["repeat_penalty", "1000"], ["seed", "-1"], ["max_tokens", "-1"]]) await setting(page, name, value);
    await send(page, "again");
    await ends(page);
  },
  async "Copied is said when it was copied, also without a secure context"(context) {
    for (const url of [URL_OF_PAGE, `http://lan.test:${PORT}/`]) {
      const page = await open(context, url);
      await page.bringToFront();
      await begin(page, `copy ${url}`);
      await page.locator('.message.user [data-action="copy"]').click();
      await until("it says so", async () => (await page.textContent('.message.user [data-action="copy"]')) === "Copied");
      await page.fill("#prompt", "");
      await page.press("#prompt", "Control+V");
      must((await page.inputValue("#prompt")) === `copy ${url}`, "nothing was copied");
      await page.evaluate(() => {
        Object.defineProperty(navigator, "clipboard", { value: undefined });
        document.execCommand = () => false;
      });
      await page.locator('.message.user [data-action="copy"]').click();
      await until("it says not", async () => (await page.textContent('.message.user [data-action="copy"]')) === "Not copied");
    }
  },
  async "a wrong key is a sentence"(context) {
    await start("--api-key", "right");
    const page = await open(context);
    const give = async (key) => { await page.fill("#key-input", key); await page.press("#key-input", "Enter"); };
    must((await page.textContent("#key-wrong")) === "The server asks for a key.", await page.textContent("#key-wrong"));
    await give("wrong");
    await until("it is refused", async () => await page.isVisible("#key-dialog") && (await page.textContent("#key-wrong")) === "That key was refused.");
    await give("right");
    await until("it is let in", async () => (await page.textContent("#model")) !== "" && !(await page.isVisible("#key-dialog")));
    await send(page, "hello");
    await ends(page);
    await start();
  },
  async "a dead server is a sentence, and the page comes back by itself"(context) {
    const page = await open(context);
    await begin(page, "before it dies");
    await until("figures are there", async () => (await page.$$("#figures div")).length > 0);
    await stop();
    await says(page, "The answer has failed: The connection to the server has broken off.");
    await until("the banner says so", async () => await page.isVisible("#banner") && (await page.textContent("#banner")).includes("cannot be reached"));
    must((await page.$$("#figures div, #slots td")).length === 0, "figures are frozen");
    must((await texts(page, "assistant"))[0].length > 40, "the part is lost");
    await send(page, "are you there");
    await says(page, "The answer has failed: The server cannot be reached.");
    await start();
    await until("the banner goes", async () => !(await page.isVisible("#banner")));
    await until("figures are back", async () => (await page.$$("#figures div")).length > 0);
    slow = 5;
    await act(page, "regenerate");
    await ends(page);
  },
  async "a full context is a sentence"(context) {
    const page = await open(context);
    await send(page, "word ".repeat(700));
    await says(page, "The chat is too long for the model's context");
    await page.click("#new");
    slow = 0;
    await send(page, "word ".repeat(500));
    await until("it ends", async () => /complete|cut/.test(await status(page)));
  },
  async "the status line tells the truth"(context) {
    const page = await open(context);
    slow = 0;
    for (let i = 0; i < 5; i++) {
      await page.click("#new");
      await send(page, `say something ${i}`);
      await ends(page);
      await sleep(300);
      must(/^The answer (is complete|was cut)/.test(await status(page)), await status(page));
    }
    await page.click("#new");
    must((await status(page)) === "", "the status of another chat");
    await setting(page, "max_tokens", "3");
    await send(page, "short");
    await says(page, "as many tokens as are allowed");
  },
};

proxy.listen(PORT, "127.0.0.1");
await start();
const args = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
  "--disable-component-update", "--disable-sync", "--host-resolver-rules=MAP lan.test 127.0.0.1"];
const browser = await chromium.launch({ executablePath: flags.chromium, args });
let failed = 0;
for (const [name, check] of Object.entries(checks).filter(([name]) => name.includes(flags.only))) {
  slow = 20;
  if (!isPlain) await start();
  const context = await browser.newContext();
  try {
    await check(context);
    for (const page of context.pages()) if (page.fault) throw page.fault;
    console.log(`ok    ${name}`);
  } catch (error) {
    failed += 1;
    const shown = await Promise.all(context.pages().map((page) => status(page).catch(() => "")));
    console.log(`FAILS ${name}: ${error.message} ${JSON.stringify(shown)}`);
  }
  await context.close();
}
await browser.close();
await stop();
process.exit(failed ? 1 : 0);
