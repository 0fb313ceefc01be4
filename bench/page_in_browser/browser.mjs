// A browser before the page: a proxy on this machine serves the page's files from the source tree,
// passes all else to a server of the demo model, and slows answers down, so that there is time to
// look at them.

import { spawn } from "node:child_process";
import { mkdtempSync, readFileSync, rmSync, symlinkSync } from "node:fs";
import http from "node:http";
import { createRequire } from "node:module";
import { tmpdir } from "node:os";
import { setTimeout as sleep } from "node:timers/promises";
import { parseArgs } from "node:util";

const { values: flags } = parseArgs({ options: {
  moeba: { type: "string", default: "target/release/moeba" }, port: { type: "string", default: "19590" },
  chromium: { type: "string", default: "/usr/bin/chromium" }, only: { type: "string", default: "" },
} });
const require = createRequire(`${process.cwd()}/`);
const { chromium } = require("playwright-core");
const root = new URL("../..", import.meta.url).pathname;
export const PORT = Number(flags.port);
const BEHIND = PORT + 1;
export const URL_OF_PAGE = `http://127.0.0.1:${PORT}/`;
/** The page below a path, as a proxy of a site with other pages has it. */
export const URL_BELOW = `${URL_OF_PAGE}llm/`;
/** Milliseconds an event of an answer. */
let slow = 20;
export const slowDown = (ms) => { slow = ms; };
let server;
/** Whether it runs, and without a key. */
let isPlain = false;

const DEMO = `${root}models/demo/moeba-demo.gguf`;

export async function start(...more) {
  await serve(DEMO, ...more);
  isPlain = more.length === 0;
}

/** A server of several models: the demo model under each of these names. */
export async function startSeveral(...names) {
  const folder = mkdtempSync(`${tmpdir()}/moeba-page-`);
  process.on("exit", () => rmSync(folder, { recursive: true, force: true }));
  for (const name of names) symlinkSync(DEMO, `${folder}/${name}.gguf`);
  await serve("--models-dir", folder);
}

async function serve(...of) {
  await stop();
  const args = ["serve", ...of, "--port", BEHIND, "-c", "1200", "--parallel", "2"];
  server = spawn(flags.moeba, args.map(String), { stdio: "ignore" });
  await until("the server answers", async () => (await fetch(`http://127.0.0.1:${BEHIND}/health`)).ok);
}

export async function stop() {
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
  const { "accept-encoding": _, origin: __, host: ___, "if-none-match": ____, ...headers } = request.headers;
  const url = request.url.replace(/^\/llm(?=\/)/, "");
  const options = { port: BEHIND, path: url, method: request.method, headers };
  const behind = http.request(options, (answer) => {
    const file = `${root}src/server/page/${url === "/" ? "index.html" : url.replace("/page/", "")}`;
    const isFile = request.method === "GET" && (url === "/" || url.startsWith("/page/"));
    const { "content-length": _, ...headers } = answer.headers;
    response.writeHead(answer.statusCode, isFile ? headers : answer.headers);
    answer.on("error", () => response.destroy());
    if (isFile) response.end(readFileSync(file));
    else if (url.endsWith("/completions")) pass(answer, response).catch(() => response.destroy());
    else answer.pipe(response);
  });
  behind.on("error", () => response.destroy());
  response.on("close", () => behind.destroy());
  passed.add(response);
  response.on("close", () => passed.delete(response));
  request.pipe(behind);
});

export async function until(what, holds, ms = 10000) {
  for (const end = Date.now() + ms; Date.now() < end; await sleep(50)) if (await Promise.resolve(holds()).catch(() => false)) return;
  throw new Error(`never: ${what}`);
}

export const status = (page) => page.textContent("#status");
export const says = (page, text) => until(`the status line says "${text}"`, async () => (await status(page)).includes(text));
export const ends = (page) => until("the answer ends", async () => /complete|was cut/.test(await status(page)), 20000);
export const texts = (page, role) => page.$$eval(`.message.${role} .body`, (all) => all.map((one) => one.textContent));
export const titles = (page) => page.$$eval("#conversations .open", (all) => all.map((one) => one.textContent));
export const act = (page, name) => page.locator(`[data-action="${name}"]`).last().click();
export const must = (holds, what) => { if (!holds) throw new Error(what); };

export async function open(context, url = URL_OF_PAGE) {
  const page = await context.newPage();
  page.on("dialog", (dialog) => dialog.accept());
  page.on("pageerror", (error) => { page.fault = error; });
  page.on("console", (said) => { if (/Content Security Policy|TrustedHTML/.test(said.text())) page.fault = new Error(said.text()); });
  await page.goto(url);
  await page.waitForFunction(() => document.getElementById("model").textContent || document.querySelector("dialog[open]"));
  return page;
}

export async function send(page, text) {
  await page.fill("#prompt", text);
  await page.press("#prompt", "Enter");
}

/** Seeds with which the demo model answers at length. */
const SEEDS = {
  "delete me": 8, "delete there": 10, "tell a long story": 8, "go on": 10, "before it dies": 4, "first chat": 7,
  "second chat": 4, one: 4, zero: 7,
};

/** Sends, and waits until a part of the answer can be seen. */
export async function begin(page, text) {
  await setting(page, "seed", String(SEEDS[text] ?? ""));
  await send(page, text);
  await until("an answer grows", async () => (await texts(page, "assistant")).at(-1)?.length > 40);
}

export async function setting(page, name, value) {
  await page.evaluate(() => { document.getElementById("settings").open = true; });
  await page.fill(`#set-${name}`, value);
  await page.evaluate(() => { document.getElementById("settings").open = false; });
}

/** Lets answers be texts that are given: each is a list of what comes at a time, each `pause` ms; `sent` has the requests. */
export const fake = (page, answers, pause = 0) => page.evaluate(({ answers, pause }) => {
  self.real ??= self.fetch;
  self.sent = [];
  self.fetch = (path, options) => {
    if (!String(path).endsWith("chat/completions")) return self.real(path, options);
    self.sent.push(JSON.parse(options.body));
    const parts = answers.length > 1 ? answers.shift() : answers[0];
    const chunks = parts.map((content) => ({ choices: [{ index: 0, delta: { content }, finish_reason: null }] }));
    chunks.push({ choices: [{ index: 0, delta: {}, finish_reason: "stop" }] });
    const events = [...chunks.map((chunk) => JSON.stringify(chunk)), "[DONE]"];
    const stream = new ReadableStream({ async start(out) {
      for (const event of events) {
        out.enqueue(new TextEncoder().encode(`data: ${event}\n\n`));
        if (pause) await new Promise((done) => setTimeout(done, pause));
      }
      out.close();
    } });
    return Promise.resolve(new Response(stream));
  };
}, { answers, pause });

/** Sends, and waits until the answer has ended. */
export async function ask(page, text) {
  await send(page, text);
  await ends(page);
}

/** A browser that behaves as a phone. */
export const PHONE = { viewport: { width: 390, height: 844 }, isMobile: true, hasTouch: true };

/** A page of its own in a browser that behaves as is said; it closes with `context`. */
export async function elsewhere(context, options) {
  const other = await context.browser().newContext(options);
  context.once("close", () => other.close());
  return open(other);
}

/** Fails with what axe-core finds. */
export async function axe(page, where) {
  const { source } = require("axe-core");
  await page.evaluate(source);
  const found = await page.evaluate(async () => (await self.axe.run(document)).violations.map(({ id, nodes }) => `${id}: ${nodes.map((node) => node.target).join(", ")}`));
  must(!found.length, `${where}: ${found.join("; ")}`);
}

export const stored = (page) => page.evaluate(() => new Promise((done) => {
  indexedDB.open("moeba").onsuccess = ({ target: { result: base } }) => {
    base.transaction("messages").objectStore("messages").getAll().onsuccess = (event) => { base.close(); done(event.target.result); };
  };
}));

/** Runs checks by name, each with a profile of its own; ends with 1 if one fails. */
export async function run(checks) {
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
}
