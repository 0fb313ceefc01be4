// What an answer looks like: Markdown, formulas, code; that it stays cheap while it grows; axe-core.
//
//     npm install playwright-core axe-core
//     node bench/page_in_browser/shows.mjs [--moeba PATH] [--chromium PATH] [--port N] [--only WORD]
//
// Prints a line a check; ends with 1 if one fails.

import { PHONE, ask, axe, elsewhere, ends, fake, must, open, run, send, until } from "./browser.mjs";

const SAMPLE = `# Title

Inline \\(a+b\\) and $E=mc^2$, a vector $\\vec v$, but $5 and $6 are prices, and \\$7 too.

\\[
f(x) = \\begin{cases} x & x \\ge 0 \\\\ -x & x < 0 \\end{cases}
\\]

$$\\sum_{i=1}^n i$$

| Left | Centre | Right |
|:-----|:------:|------:|
| a | *b* | 1 |

- [x] done
- [ ] open
  - inner

3. three
4. four

\`\`\`rust
fn main() { println!("a"); } // said
\`\`\`

> quoted **bold** ~~gone~~ [link](https://example.com) https://example.com/a_b

---

\`\`\`
plain
\`\`\`

Last line
and another.
`;

const HOSTILE = `<script>self.owned = 1</script> <img src=x onerror="self.owned = 1">
<svg onload="self.owned = 1"></svg> [click](javascript:self.owned=1) [data](data:text/html,x) [rel](/slots)
![picture](https://evil.example/x.png) $\\href{javascript:self.owned=1}{x}$ $\\includegraphics{x.png}$ $\\htmlStyle{color:red}{x}$

\`\`\`html
<script>self.owned = 1</script><img src=x onerror="self.owned = 1">
\`\`\`

> <style>body { display: none }</style>
> - <base href="https://evil.example/">
`;

/** What `does` returns of the elements of a kind in the last answer. */
const last = (page, of, does) => page.locator(".message.assistant").last().locator(of).evaluateAll(does);

/** A page that shows all of a long answer: what is out of sight is drawn later. */
async function openTall(context) {
  const page = await open(context);
  await page.setViewportSize({ width: 1400, height: 2000 });
  return page;
}

await run({
  async "formulas, tables, boxes and code are drawn"(context) {
    const page = await openTall(context);
    await fake(page, [[SAMPLE]]);
    await ask(page, "show");
    const blocks = await last(page, ".body > *", (all) => all.map((e) => e.localName + "." + e.className));
    must(blocks.join(" ") === "h2. p. span.math display span.math display div.scroll ul. ol. div.code blockquote. hr. div.code p.", blocks.join(" "));
    await until("formulas are drawn", async () => (await last(page, ".math .katex", (all) => all.length)) === 5);
    must((await last(page, "p", (all) => all[0].textContent)).includes("but $5 and $6 are prices, and $7 too."), "prices are formulas");
    const width = await last(page, ".katex svg", (all) => Math.min(...all.map((e) => e.getBoundingClientRect().width)));
    must(width > 3, `a part of a formula is ${width} wide`);
    must((await last(page, "th", (all) => all.map((e) => getComputedStyle(e).textAlign).join())) === "left,center,right", "the table is not aligned");
    must((await last(page, ".task > input", (all) => all.map((e) => e.checked).join())) === "true,false", "boxes are missing");
    must((await last(page, "ol", (all) => all[0].start)) === 3, "the list begins elsewhere");
    must((await last(page, ".code-head span", (all) => all.map((e) => e.textContent).join())) === "rust,text", "labels are missing");
    await until("code is coloured", async () => (await last(page, ".hl-keyword, .hl-comment", (all) => all.map((e) => e.textContent).join())) === "fn,// said");
    must((await last(page, "a", (all) => all.map((e) => e.href).join())) === "https://example.com/,https://example.com/a_b", "links are wrong");
    const over = await last(page, ".code", (all) => all.some((e) => e.querySelector("button").getBoundingClientRect().bottom > e.querySelector("pre").getBoundingClientRect().top));
    must(!over, "Copy lies over code");
    must(await page.evaluate(() => { const list = document.getElementById("messages"); return list.scrollHeight - list.scrollTop - list.clientHeight < 2; }), "the end is out of view");
  },
  async "what dollars mean"(context) {
    const page = await open(context);
    const cases = [
      ["$x$", 1], ["$5 and $6", 0], ["it costs $5, or 6$ there", 0], ["US$5 and US$6", 0], ["$10$ is ten", 1], ["$ a $", 0], ["$a\\$b$", 1],
      ["$2 x = 4$", 1], ["`$x$` and \\(y\\)", 1], ["from $3-$4 a day", 0], ["$$x$$ in a line", 1], ["\\\\(no\\\\)", 0], ["\\[x\n\nnot closed", 0],
      ["a **bold $x_1 * y_1$ end**", 1], ["- \\[\n  a\n  \\]", 1], ["> $$\n> - b\n> $$", 1],
    ];
    await fake(page, cases.map(([text]) => [text]));
    for (const [text, n] of cases) {
      await ask(page, text);
      must((await last(page, ".math", (all) => all.length)) === n, `${text}: ${await last(page, ".body", (all) => all[0].innerHTML)}`);
    }
  },
  async "a wrong formula stays as it was written"(context) {
    const page = await open(context);
    await fake(page, [["A $\\frac{1$ and $y$."]]);
    await ask(page, "show");
    await until("the right one is drawn", async () => (await last(page, ".katex", (all) => all.length)) === 1);
    must((await last(page, ".math", (all) => all[0].textContent)) === "$\\frac{1$", "the source is gone");
  },
  async "hostile text is text"(context) {
    const page = await openTall(context);
    await fake(page, [[HOSTILE]]);
    await ask(page, "show");
    await until("formulas are drawn", async () => (await last(page, ".katex", (all) => all.length)) > 0);
    await until("code is coloured", async () => (await last(page, ".hl-tag", (all) => all.length)) > 0);
    const bad = await last(page, ".body :is(script, img, style, base, iframe, form, [onerror], [onload])", (all) => all.map((e) => e.outerHTML).join());
    must(bad === "", bad);
    const links = await last(page, ".body a", (all) => all.map((e) => e.href).join());
    must(links === "https://evil.example/x.png,https://evil.example/", links);
    must((await page.evaluate(() => self.owned)) === undefined, "it was run");
  },
  async "a growing text ends as the whole one, and what is complete stays"(context) {
    const page = await open(context);
    await fake(page, [SAMPLE.match(/[\s\S]{1,3}/g)], 1);
    await send(page, "show");
    await until("the table is there", async () => (await last(page, "table", (all) => all.length)) === 1);
    await last(page, "h2, p, .math", (all) => all.forEach((e) => { e.isFirst = true }));
    await ends(page);
    must(await last(page, "h2, .body > p:nth-child(2)", (all) => all.every((e) => e.isFirst)), "it was drawn again");
    const shape = () => last(page, ".body *", (all) => all.filter((e) => !e.closest(".math > *, code > *")).map((e) => [e.localName, e.className, e.children.length ? "" : e.textContent].join()).join(";").replace(/code,,[^;]*/g, "code"));
    const grown = await shape();
    await page.reload();
    await until("it is there", async () => (await page.$$(".message.assistant")).length === 1);
    const whole = await shape();
    must(grown.replace(/math[^;]*/g, "") === whole.replace(/math[^;]*/g, ""), `${grown}\n${whole}`);
  },
  async "long answers are quick"(context) {
    const page = await open(context);
    const blocks = Array.from({ length: 1500 }, (_, i) => `Text ${i} with $x_${i}$.\n\n\`\`\`js\nconst a = ${i}; // said\n\`\`\`\n\n`);
    await fake(page, [[blocks.join("")], blocks, [`\`\`\`js\n${"const a = 'b';\n".repeat(8000)}\`\`\``]]);
    for (const text of ["at once", "block by block", "one block"]) {
      const start = Date.now();
      await ask(page, text);
      const ms = Date.now() - start;
      must(ms < 5000, `${text}: ${ms} ms`);
      console.log(`      ${text}: ${ms} ms`);
    }
    await until("what is seen is coloured", async () => (await last(page, ".hl-keyword", (all) => all.length)) > 1000);
  },
  async "axe-core finds nothing, in light, dark and on a phone"(context) {
    const wide = await openTall(context);
    const phone = await elsewhere(context, PHONE);
    for (const page of [wide, phone]) {
      await axe(page, "empty");
      await fake(page, [[SAMPLE + HOSTILE]]);
      await page.fill("#prompt", "show");
      await page.click("#send");
      await ends(page);
      await until("it is drawn", async () => (await last(page, ".katex", (all) => all.length)) > 0 && (await last(page, ".code", (all) => all.length)) === 3);
      if (page === wide) await until("code is coloured", async () => (await last(page, ".hl-tag, .hl-keyword", (all) => all.length)) > 1);
      await page.setInputFiles("#attach-file", { name: "a.txt", mimeType: "text/plain", buffer: Buffer.from("a") });
      await page.waitForSelector("#attached li");
      await page.evaluate(() => { document.getElementById("settings").open = true; });
      for (const theme of ["light", "dark"]) {
        await page.evaluate((theme) => { document.documentElement.dataset.theme = theme; }, theme);
        for (const view of page === phone ? ["list", "chat", "machine"] : ["chat"]) {
          if (page === phone) await page.click(`.views [data-view=${view}]`);
          await axe(page, `${page === phone ? "phone" : "wide"}, ${theme}, ${view}`);
        }
        if (page === phone) continue;
        await page.fill("#search", "prices");
        await page.hover("#conversations li");
        await axe(page, `${theme}, search`);
        await page.click("#help");
        await axe(page, `${theme}, shortcuts`);
        await page.keyboard.press("Escape");
      }
    }
    await phone.click("#more");
    await axe(phone, "the menu");
  },
});
