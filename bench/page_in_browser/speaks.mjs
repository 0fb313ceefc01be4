// The page never goes dead, and says what is the matter: settings, copies, keys, a dead server.
//
//     npm install playwright-core
//     node bench/page_in_browser/speaks.mjs [--moeba PATH] [--chromium PATH] [--port N] [--only WORD]
//
// Prints a line a check; ends with 1 if one fails.

import { setTimeout as sleep } from "node:timers/promises";

import {
  PORT, URL_OF_PAGE, act, begin, ends, must, open, run, says, send, setting, slowDown,
  start, status, stop, texts, until,
} from "./browser.mjs";

await run({
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
    slowDown(5);
    await act(page, "regenerate");
    await ends(page);
  },
  async "a full context is a sentence"(context) {
    const page = await open(context);
    await send(page, "word ".repeat(700));
    await says(page, "The message is too long for the model's context");
    await page.click("#new");
    slowDown(0);
    await send(page, "word ".repeat(500));
    await until("it ends", async () => /complete|cut/.test(await status(page)));
    await send(page, "word ".repeat(400));
    await says(page, "The context is full: the 2 oldest messages were left out.");
    await send(page, "and?");
    await until("it ends", async () => /complete|cut/.test(await status(page)));
    must(/oldest messages were left out/.test(await status(page)), await status(page));
  },
  async "the status line tells the truth"(context) {
    const page = await open(context);
    slowDown(0);
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
});
