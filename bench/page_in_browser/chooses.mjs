// A server with several models: the reader chooses one for each chat, and is told how far its load is.
//
//     npm install playwright-core
//     node bench/page_in_browser/chooses.mjs [--moeba PATH] [--chromium PATH] [--port N] [--only WORD]
//
// Prints a line a check; ends with 1 if one fails.

import { axe, act, ask, elsewhere, ends, fake, must, open, PHONE, run, says, send, startSeveral, stored, until, URL_OF_PAGE } from "./browser.mjs";

const chosen = (page) => page.inputValue("#models");
const stateOf = async (name) => (await (await fetch(`${URL_OF_PAGE}v1/models/${name}`)).json()).status.value;

/** Holds answers back until `self.release` is called; until then `name` is being loaded. */
const hold = (page, name) => page.evaluate((name) => {
  const real = self.fetch;
  let isHeld = true;
  const released = new Promise((done) => { self.release = () => { isHeld = false; done(); }; });
  self.fetch = async (path, options) => {
    const url = String(path);
    if (url.endsWith("chat/completions")) await released;
    const loading = { error: { code: 503, message: "Loading model", type: "unavailable_error" }, progress: 0.43, phase: "reading the file" };
    if (isHeld && url === `health?model=${name}`) return new Response(JSON.stringify(loading), { status: 503 });
    return real(path, options);
  };
}, name);

await run({
  async "one model has no picker"(context) {
    const page = await open(context);
    must(!(await page.isVisible("#models")) && await page.isVisible("#model"), "there is a picker");
    await fake(page, [["hello"]]);
    await ask(page, "who are you");
    must(await page.evaluate(() => !("model" in self.sent[0])), "the request names a model");
  },
  async "each chat keeps its model"(context) {
    await startSeveral("first", "second");
    const page = await open(context);
    must((await page.$$eval("#models option", (all) => all.map((one) => one.value))).join() === "first,second", "not all are listed");
    must((await chosen(page)) === "first", await chosen(page));
    await page.selectOption("#models", "second");
    await fake(page, [["hello"]]);
    await ask(page, "to the second");
    must(await page.evaluate(() => self.sent[0].model === "second"), "the request names another model");
    await page.click("#new");
    must((await chosen(page)) === "second", "a new chat has not the last choice");
    await page.selectOption("#models", "first");
    await ask(page, "to the first");
    must(await page.evaluate(() => self.sent[1].model === "first"), "the request names another model");
    await page.click("text=to the second");
    must((await chosen(page)) === "second", "the chat has lost its model");
    await act(page, "regenerate");
    await ends(page);
    must(await page.evaluate(() => self.sent[2].model === "second"), "the new answer is another model's");
    must((await page.textContent(".message.assistant .meta")).includes("second"), "the answer does not say its model");
    await page.reload();
    await page.click("text=to the second");
    await until("it is kept", async () => (await chosen(page)) === "second");
    await page.click("text=to the first");
    await until("it is kept", async () => (await chosen(page)) === "first");
    must((await stored(page)).filter((node) => node.role === "assistant").every((node) => node.model), "answers without a model");
    await axe(page, "the picker");
    const phone = await elsewhere(context, PHONE);
    must(await phone.isVisible("#models") && await phone.isVisible("#more"), "a phone has no picker");
    must(await phone.evaluate(() => document.documentElement.scrollWidth <= innerWidth), "the header is too wide for a phone");
  },
  async "the load of a model is told, and the first request begins it"(context) {
    await startSeveral("first", "second");
    const page = await open(context);
    await page.selectOption("#models", "second");
    await until("the map says why it is empty", async () => /not loaded/.test(await page.textContent("#machine-note")));
    must((await stateOf("second")) === "unloaded", "looking at it has loaded it");
    await hold(page, "second");
    await send(page, "hello");
    await says(page, "Loading second, 43 %: reading the file.");
    await page.evaluate(() => self.release());
    await ends(page);
    must((await stateOf("second")) === "loaded" && (await stateOf("first")) === "unloaded", "another model is loaded");
    await until("the map is that of the model", async () => (await page.$$("#figures div")).length > 0);
    await until("its defaults are shown", () => page.getAttribute("#set-temperature", "placeholder"));
    await act(page, "replay");
    await until("the replay has a verdict", async () => (await page.textContent(".replay.same")).includes("same bytes"));
    await page.click("#new");
    await page.selectOption("#models", "first");
    await until("its defaults are unknown", async () => !(await page.getAttribute("#set-temperature", "placeholder")));
    await ask(page, "hello");
    await until("they are known", () => page.getAttribute("#set-temperature", "placeholder"));
  },
  async "a model that is gone is a sentence"(context) {
    await startSeveral("first", "second");
    const page = await open(context);
    await fake(page, [["hello"]]);
    await page.selectOption("#models", "second");
    await ask(page, "hello");
    await startSeveral("first", "third");
    await page.reload();
    await until("the list is there", async () => (await chosen(page)) === "first");
    await act(page, "replay");
    await says(page, "model 'second' not found");
    await send(page, "go on");
    await ends(page);
  },
});
