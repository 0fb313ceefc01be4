// What one does beside asking: files, search, names, settings of a chat, the machine's panel, a phone,
// a path below a site's root.
//
//     npm install playwright-core
//     node bench/page_in_browser/does.mjs [--moeba PATH] [--chromium PATH] [--port N] [--only WORD]
//
// Prints a line a check; ends with 1 if one fails.

import {
  PHONE, URL_BELOW, act, ask, elsewhere, ends, fake, must, open, run, says, send, setting, status, texts, titles, until,
} from "./browser.mjs";

const file = (name, text) => ({ name, mimeType: "", buffer: Buffer.from(text) });
const attached = (page) => page.$$eval("#attached li span:first-child", (all) => all.map((one) => one.textContent).join());
const sent = (page) => page.evaluate(() => self.sent.at(-1));

/** Lets files come from outside: `kind` is drop or paste. */
const give = (page, kind, files) => page.evaluate(([kind, files]) => {
  const data = new DataTransfer();
  for (const [name, text] of files) data.items.add(new File([text], name));
  const options = { bubbles: true, cancelable: true };
  const event = kind === "drop" ? new DragEvent("drop", { ...options, dataTransfer: data }) : new ClipboardEvent("paste", { ...options, clipboardData: data });
  document.getElementById(kind === "drop" ? "messages" : "prompt").dispatchEvent(event);
}, [kind, files]);

await run({
  async "text files are chosen, dropped and pasted, and sent as text"(context) {
    const page = await open(context);
    await fake(page, [["Read."]]);
    await page.setInputFiles("#attach-file", [file("a.py", "print(1)\n"), file("b.md", "```\ninner\n```\n")]);
    await give(page, "drop", [["c.txt", "dropped"], ["c2.txt", "too"]]);
    await give(page, "paste", [["d.log", "pasted"]]);
    await until("all are there", async () => (await attached(page)) === "a.py,b.md,c.txt,c2.txt,d.log");
    await page.click('[aria-label="Remove c2.txt"]');
    await ask(page, "What is in them?");
    must((await attached(page)) === "", "they are still attached");
    const { messages: [{ content }] } = await sent(page);
    must(content === "a.py:\n```py\nprint(1)\n```\n\nb.md:\n````md\n```\ninner\n```\n````\n\nc.txt:\n```txt\ndropped\n```\n\nd.log:\n```log\npasted\n```\n\nWhat is in them?", content);
    await page.reload();
    await until("they are kept", async () => (await page.$$eval(".message.user .file summary", (all) => all.map((one) => one.textContent).join())) === "a.py, 9 B,b.md, 14 B,c.txt, 7 B,d.log, 6 B");
    must((await texts(page, "user")).join() === "What is in them?", "the text is mixed with files");
    await fake(page, [["Again."]]);
    await page.locator('.message.user [data-action="edit"]').click();
    await page.fill(".message.user textarea", "And now?");
    await page.keyboard.press("Control+Enter");
    await ends(page);
    must((await sent(page)).messages[0].content.endsWith("pasted\n```\n\nAnd now?"), "the edit has lost the files");
  },
  async "a file alone is a message"(context) {
    const page = await open(context);
    await fake(page, [["Read."]]);
    await page.setInputFiles("#attach-file", file("alone.csv", "a,b\n"));
    await page.waitForSelector("#attached li");
    await page.click("#send");
    await ends(page);
    must((await titles(page)).join() === "alone.csv", await titles(page));
  },
  async "what is no text, or too large, is refused in a sentence"(context) {
    const page = await open(context);
    await page.setInputFiles("#attach-file", [file("ok.txt", "ok"), { name: "p.png", mimeType: "image/png", buffer: Buffer.from([0x89, 0x50, 0x4e, 0x47, 0, 1]) }]);
    await says(page, "p.png is not a text: pictures, PDFs and other such files cannot be attached.");
    must((await attached(page)) === "ok.txt", await attached(page));
    await page.setInputFiles("#attach-file", file("big.log", "x".repeat(700_000)));
    await says(page, "big.log has 684 KiB: a file may have 512 KiB.");
    must((await page.getAttribute("#attach", "title")).includes("512 KiB"), "the limit is not said");
  },
  async "all chats are searched"(context) {
    const page = await open(context);
    const far = Array.from({ length: 40 }, (_, i) => `Line ${i}.`).join("\n\n");
    await fake(page, [["Rust is a Language."], [`${far}\n\nA needle in hay.`], ["Nothing."]]);
    for (const text of ["first", "second", "third"]) {
      await ask(page, text);
      await page.click("#new");
    }
    await page.keyboard.press("Escape");
    await page.evaluate(() => document.activeElement.blur());
    await page.keyboard.press("f");
    await page.keyboard.type("NEEDLE");
    await until("one is left", async () => (await page.$$eval("#conversations .title", (all) => all.map((one) => one.textContent).join())) === "second");
    must((await page.textContent("#conversations mark")) === "needle", "the place is not shown");
    await page.click("#conversations .open");
    await until("it is open", async () => (await texts(page, "assistant"))[0]?.includes("needle"));
    await page.fill("#search", "first");
    must((await titles(page)).length === 1, "titles are not searched");
    await page.fill("#search", "nowhere");
    must((await page.textContent("#found")) === "No chat has this text.", "nothing is said");
    await page.fill("#search", "");
    must((await titles(page)).length === 4, "not all are back");
  },
  async "a version that is not shown is found, too"(context) {
    const page = await open(context);
    await fake(page, [["alpha"], ["beta"]]);
    await ask(page, "hello");
    await act(page, "regenerate");
    await until("it is answered", async () => (await texts(page, "assistant"))[0] === "beta");
    await ends(page);
    await page.fill("#search", "alpha");
    await page.click("#conversations .open");
    await until("it is shown", async () => (await texts(page, "assistant"))[0] === "alpha");
  },
  async "a chat gets another name, in all tabs"(context) {
    const page = await open(context);
    await fake(page, [["Yes."]]);
    await ask(page, "old name");
    const other = await open(context);
    const rename = async (name, key) => {
      await page.hover("#conversations li");
      await page.click('[aria-label^="Rename"]');
      await page.keyboard.type(name);
      await page.keyboard.press(key);
    };
    await rename("given up", "Escape");
    must((await titles(page)).join() === "old name", "Esc has kept it");
    await rename("new name", "Enter");
    must((await titles(page)).join() === "new name", "Enter has not kept it");
    await until("the other tab hears it", async () => (await titles(other)).includes("new name"));
    await ask(page, "more");
    await page.reload();
    await until("it is kept", async () => (await titles(page)).join() === "new name");
  },
  async "a chat has its own settings if it is to"(context) {
    const page = await open(context);
    const note = () => page.textContent("#settings-note");
    must((await note()) === "for all chats: the server's defaults", await note());
    await fake(page, [["Yes."]]);
    await setting(page, "temperature", "0.5");
    await ask(page, "one");
    await page.evaluate(() => { document.getElementById("settings").open = true; });
    await page.check("#set-own");
    await setting(page, "temperature", "0.25");
    await setting(page, "system", "Be brief.");
    must((await note()) === "only for this chat: system prompt, 1 set", await note());
    await ask(page, "again");
    must((await sent(page)).temperature === 0.25, "the chat's own are not sent");
    await page.click("#new");
    must((await note()) === "for all chats: 1 set" && (await page.inputValue("#set-temperature")) === "0.5", await note());
    await ask(page, "two");
    must((await sent(page)).temperature === 0.5 && (await sent(page)).messages[0].role === "user", "another chat's are sent");
    await page.reload();
    await page.click("text=one");
    await until("it has its own", async () => (await page.inputValue("#set-temperature")) === "0.25");
    await page.evaluate(() => { document.getElementById("settings").open = true; });
    await page.uncheck("#set-own");
    must((await page.inputValue("#set-temperature")) === "0.5" && (await page.inputValue("#set-system")) === "", "those of all are not back");
    await page.click("text=two");
    must((await page.inputValue("#set-temperature")) === "0.5", "those of all have changed");
  },
  async "the machine's panel is hidden, and stays so"(context) {
    const page = await open(context);
    must(await page.isVisible("#heatmap"), "it is not there");
    await page.click("text=Hide the machine");
    must(!(await page.isVisible("#machine")), "it is still there");
    await page.reload();
    await page.waitForSelector("text=Show the machine");
    must(!(await page.isVisible("#machine")), "it has come back");
    await page.evaluate(() => document.activeElement.blur());
    await page.keyboard.press("m");
    must(await page.isVisible("#heatmap"), "m does not show it");
    await until("figures are there", async () => (await page.$$("#figures div")).length > 0);
  },
  async "buttons say what they do; the slogan leaves with the first message"(context) {
    const page = await open(context);
    const names = await page.$$eval("button", (all) => all.filter((one) => one.checkVisibility()).map((one) => one.getAttribute("aria-label") ?? one.textContent));
    for (const name of ["Export as JSON", "Export as Markdown", "Import a chat", "Theme: auto", "Hide the machine"]) must(names.includes(name), `${name} is missing: ${names}`);
    must((await page.getAttribute("#theme", "title")) === "Switch to light (t)", "the theme's button says nothing");
    must(await page.isVisible(".purpose"), "the slogan is missing");
    await fake(page, [["Yes."]]);
    await ask(page, "hello");
    must((await page.$(".purpose")) === null, "the slogan is still there");
  },
  async "a phone has one line above, and its Enter makes lines"(context) {
    const page = await elsewhere(context, PHONE);
    const { height } = await page.locator("header").boundingBox();
    must(height <= 48, `the header has ${height} px`);
    must(await page.isVisible("#model") && (await page.textContent("#model")) === "moeba-demo", "no name of the model");
    const { scrollWidth } = await page.evaluate(() => ({ scrollWidth: document.documentElement.scrollWidth }));
    must(scrollWidth <= 390, `${scrollWidth} px wide`);
    await fake(page, [["Yes."]]);
    await page.tap("#prompt");
    await page.keyboard.type("one");
    await page.keyboard.press("Enter");
    await page.keyboard.type("two");
    must((await page.inputValue("#prompt")) === "one\ntwo" && (await status(page)) === "", "Enter sends");
    await page.tap("#send");
    await ends(page);
    must((await texts(page, "user")).join() === "one\ntwo", await texts(page, "user"));
    must(!(await page.isVisible("#theme")), "the menu is open");
    await page.tap("#more");
    await page.tap("#theme");
    must((await page.textContent("#theme")) === "Theme: light", "the theme is the same");
    await page.tap(".views [data-view=list]");
    must(!(await page.isVisible("#theme")) && await page.isVisible("#search"), "the menu stays open");
    await page.tap("#conversations .open");
    must(await page.isVisible("#prompt"), "the chat that was chosen is not shown");
  },
  async "the page works below a path"(context) {
    const page = await open(context, URL_BELOW);
    const failed = [];
    page.on("response", (response) => { if (!response.ok() || !response.url().startsWith(URL_BELOW)) failed.push(response.url()); });
    await page.reload();
    await until("figures are there", async () => (await page.$$("#figures div")).length > 0);
    await setting(page, "seed", "7");
    await send(page, "zero");
    await ends(page);
    await fake(page, [["A $x$ and\n\n```js\nlet a = 1;\n```"]]);
    await ask(page, "code");
    await until("the libraries are there", async () => (await page.$$(".katex, .hl-keyword")).length === 2);
    must(!failed.length, failed.join());
  },
});
